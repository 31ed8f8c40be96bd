"""Tensor: address, shape, stride, format of one operand. No arithmetic."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

from . import abi

T = abi.PK_ROWS_T
S = abi.PK_ROWS_S
ELEMENT_BYTES = {abi.PK_F32: 4, abi.PK_F16: 2, abi.PK_BF16: 2, abi.PK_FP8_E4M3: 1, abi.PK_FP8_E5M2: 1, abi.PK_I32: 4, abi.PK_U8: 1}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A matrix [rows, cols] at an address; rows may be the symbols T or S. stride: bytes from row to row
    (packed: 0, or from one matrix of a stack to the next)."""

    data: int
    rows: int
    cols: int
    format: int
    stride: int = 0
    layout: int = abi.PK_ROWS

    def columns(self, first: int, n: int) -> Tensor:
        """A view of `n` columns from `first` on; unpacked tensors only."""
        return replace(self, data=self.data + first * ELEMENT_BYTES[self.format], cols=n, stride=self.row_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row."""
        return self.stride or self.cols * ELEMENT_BYTES[self.format]

    def fill(self, target: ctypes.Structure) -> None:
        """Writes this operand into a pk_tensor."""
        target.data, target.rows, target.cols = self.data, self.rows, self.cols
        target.stride = self.stride if self.layout == abi.PK_PACKED else self.row_bytes
        target.format, target.layout = self.format, self.layout
