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
    """A weight stored as 4-bit codes in 32-bit words: x = scale (q - zero). The view's format says what becomes of it: q4_0 (every zero is 8),
    q4_z (any zero), or f16 (columns belong to groups in any order, so no block of neighbours has one scale).

    words: how codes lie in words: "rows" [N, K/8] (compressed-tensors), "columns" [K/8, N] (GPTQ), "awq" [K, N/8] (eight rows a word, in
    AWQ's order). scale: one factor per `group` columns of a row, [N, K/group] with "rows", [K/group, N] else.
    zeros: four bits each, eight rows a word, as [N/8, K/group] with "rows", [K/group, N/8] else; stored less zero_offset; None: 8.
    order: the group of every column, where that is stored.
    """

    scale: TensorView
    group: int
    words: str = "rows"
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
    transposed_of: the weight is that one's values, transposed; offset and n_bytes are those of its own form.
    int4: how 4-bit codes become what the format says.
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
    transposed_of: TensorView | None = None
    int4: Int4 | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight itself: those of its view, or of the rows that are picked."""
        if self.int4 is not None:
            return 2 * self.n_elements if self.format == "f16" else self.n_elements // 32 * (18 if self.format == "q4_0" else 20)
        return self.n_bytes // self.pick.period * self.pick.length if self.pick else self.n_bytes

    @property
    def n_elements(self) -> int:
        """Product of the shape (1 for a scalar)."""
        n = 1
        for d in self.shape:
            n *= d
        return n
