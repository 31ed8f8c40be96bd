"""TensorView: where one tensor of a checkpoint lies. Describes bytes; never reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor in one file.

    shape: outermost first (numpy order: a matrix is [rows N, columns K]), whatever the file's own order is.
    format: the Format name ("f32", "q4_k", ...) or "unsupported:<n>" for a type we do not know.
    offset, n_bytes: absolute position in `path`, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    path: Path
    offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        """Product of the shape (1 for a scalar)."""
        n = 1
        for d in self.shape:
            n *= d
        return n
