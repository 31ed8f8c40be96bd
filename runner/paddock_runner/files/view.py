"""TensorView: where one tensor of a checkpoint lies. Describes bytes; never reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales that lie beside a weight in other tensors (safetensors checkpoints).

    kind: "tensor" (one factor), "row" (one a row), "block" (one a block of `block` rows x columns) or "group" (one byte per 16 or 32
    columns of a row). whole: one more factor for all, or None; is_divisor: the weight is divided by it.
    """

    kind: str
    view: TensorView
    block: tuple[int, int] = (1, 1)
    whole: TensorView | None = None
    is_divisor: bool = False


@dataclass(frozen=True, slots=True)
class Int4:
    """A weight stored as 4-bit codes in 32-bit words (GPTQ, compressed-tensors), symmetric: x = scale (q - 8). The view is in format q4_0.

    scale: one factor per `group` columns of a row. is_by_columns: words run down the columns, [K/8, N], and scales are [K/group, N].
    zeros, order: tensors that must say "8 everywhere" (stored less zero_offset) and "groups in order", where they are there.
    """

    scale: TensorView
    group: int
    is_by_columns: bool = False
    zeros: TensorView | None = None
    zero_offset: int = 0
    order: TensorView | None = None


@dataclass(frozen=True, slots=True)
class Pick:
    """Which rows of the stored matrix a weight is: of every `period` rows the `length` from `first` on.

    is_transposed: the same of its columns, made rows (plain formats). of_elements: of its elements, whatever the rows.
    """

    first: int = 0
    length: int = 1
    period: int = 1
    is_transposed: bool = False
    of_elements: bool = False


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor in one file.

    shape: outermost first (numpy order: a matrix is [rows N, columns K]), whatever the file's own order is.
    format: the Format name ("f32", "q4_k", ...) or "unsupported:<n>" for a type we do not know.
    offset, n_bytes: absolute position in `path`, in bytes. scales: what the stored elements are multiplied with, or None.
    is_log_of_negative: the vector wanted is log(-x) of what is stored.
    int4: how 4-bit codes become the blocks of format q4_0.
    pick: how the weight lies among these bytes, when it is not simply all of them.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    path: Path
    offset: int
    n_bytes: int
    scales: Scales | None = None
    pick: Pick | None = None
    is_log_of_negative: bool = False
    int4: Int4 | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight itself: those of its view, or of the rows that are picked."""
        if self.int4 is not None:
            return self.n_elements // 32 * 18
        return self.n_bytes // self.pick.period * self.pick.length if self.pick else self.n_bytes

    @property
    def n_elements(self) -> int:
        """Product of the shape (1 for a scalar)."""
        n = 1
        for d in self.shape:
            n *= d
        return n
