"""Symmetric 4-bit weights of GPTQ and compressed-tensors as blocks of q4_0: exact, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FileError, UnsupportedError
from ..files.view import Int4, TensorView

BLOCK = 32
SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)
Bytes = NDArray[np.uint8]


def blocks(view: TensorView, words: Bytes, scales: NDArray[np.float32]) -> Bytes:
    """q4_0 blocks [N, K/32, 18] of a weight. words: its bytes; scales: as stored, f32.

    Raises: UnsupportedError when a scale is no f16 number.
    """
    int4, (rows, cols) = _int4(view), view.shape
    codes = _nibbles(words, rows, cols, int4.is_by_columns).reshape(rows, -1, 2, BLOCK // 2)
    by_group = scales.reshape(-1, rows).T if int4.is_by_columns else scales.reshape(rows, -1)
    with np.errstate(over="ignore"):
        halves = by_group.astype(np.float16)
    if (halves.astype(np.float32) != by_group).any():
        worst = by_group[halves.astype(np.float32) != by_group][0]
        raise UnsupportedError(f"{view.path}: tensor {int4.scale.name} holds {worst}, which is no f16 number", what="int4 scale")
    out = np.empty((rows, cols // BLOCK, 18), np.uint8)
    out[..., :2] = np.repeat(halves, int4.group // BLOCK, axis=1)[..., None].view(np.uint8)
    out[..., 2:] = codes[:, :, 0] | codes[:, :, 1] << 4
    return out.reshape(-1)


def require_symmetric(view: TensorView, words: Bytes) -> None:
    """words: the stored zero points. Raises: UnsupportedError unless all are 8."""
    int4 = _int4(view)
    zeros = (words.view("<u4")[:, None] >> SHIFTS & 15) + int4.zero_offset
    if int4.zeros is not None and (zeros != 8).any():
        raise UnsupportedError(f"{view.path}: tensor {int4.zeros.name} holds zero points other than 8: asymmetric int4 is not supported", what="asymmetric int4")


def require_in_order(view: TensorView, words: Bytes) -> None:
    """words: the group of every column. Raises: UnsupportedError unless groups follow each other; FileError when their number is wrong."""
    int4, cols = _int4(view), view.shape[1]
    groups = words.view("<i4")
    if groups.size != cols:
        raise FileError(f"{view.path}: {groups.size} group numbers for {cols} columns of {view.name}", field=view.name)
    if (groups != np.arange(cols) // int4.group).any():
        raise UnsupportedError(f"{view.path}: tensor {view.name} has its columns in the order of activations, which is not supported", what="act-order")


def _int4(view: TensorView) -> Int4:
    if view.int4 is None:
        raise UnsupportedError(f"{view.name} holds no 4-bit codes")
    return view.int4


def _nibbles(words: Bytes, rows: int, cols: int, is_by_columns: bool) -> NDArray[Any]:
    """Codes [N, K], one a byte."""
    if is_by_columns:
        stored = words.view("<u4").reshape(cols // 8, 1, rows)
        return (stored >> SHIFTS[None, :, None] & 15).astype(np.uint8).reshape(cols, rows).T
    return (words.view("<u4").reshape(rows, -1, 1) >> SHIFTS & 15).astype(np.uint8).reshape(rows, cols)
