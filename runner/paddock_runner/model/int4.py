"""4-bit weights of GPTQ, AWQ and compressed-tensors as blocks of q4_0 or q4_z, or (columns in any order of groups) as f16. Exact, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FileError, UnsupportedError
from ..files.view import Int4, TensorView

BLOCK = 32
SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)
AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""Which of eight neighbours lies in which four bits. Source: AutoAWQ, awq/modules/linear/gemm.py, order_map."""
Bytes = NDArray[np.uint8]
Read = Callable[[TensorView], Bytes]
Numbers = Callable[[TensorView], NDArray[np.float32]]


def converted(view: TensorView, read: Read, numbers: Numbers) -> Bytes:
    """What a weight's codes, scales, zero points and order become, in the view's format.

    read: a tensor's bytes. numbers: scales as f32, checked. Raises: FileError, UnsupportedError naming the tensor at fault.
    """
    int4, (rows, cols) = _int4(view), view.shape
    is_turned = int4.words != "rows"
    order = _order(view, read(int4.order)) if int4.order is not None else None
    by_group = numbers(int4.scale).reshape(-1, rows).T if is_turned else numbers(int4.scale).reshape(rows, -1)
    zeros = _zeros(view, read(int4.zeros)) if int4.zeros is not None else None
    if view.format == "q4_0" and zeros is not None and (zeros != 8).any():
        raise UnsupportedError(f"{view.path}: tensor {int4.zeros.name if int4.zeros else ''} holds zero points other than 8, but config.json says sym", what="zero points")
    codes = _codes(view, read(view))
    if view.format == "f16":
        groups = order if order is not None else np.arange(cols) // int4.group
        zero = zeros[:, groups].astype(np.float32) if zeros is not None else np.float32(8)
        return np.ascontiguousarray((codes.astype(np.float32) - zero) * by_group[:, groups]).astype("<f2").view(np.uint8).reshape(-1)
    if order is not None and (order != np.arange(cols) // int4.group).any():
        raise UnsupportedError(f"{view.path}: tensor {view.name} has its columns in the order of activations, but config.json does not say desc_act", what="act-order")
    return _blocks(view, codes, _halves(view, by_group), zeros)


def _blocks(view: TensorView, codes: Bytes, halves: NDArray[np.float16], zeros: Bytes | None) -> Bytes:
    rows, cols = view.shape
    repeats, packed = _int4(view).group // BLOCK, codes.reshape(rows, -1, 2, BLOCK // 2)
    head = 2 if view.format == "q4_0" else 4
    out = np.zeros((rows, cols // BLOCK, head + BLOCK // 2), np.uint8)
    out[..., :2] = np.repeat(halves, repeats, axis=1)[..., None].view(np.uint8)
    if head == 4:
        out[..., 2] = np.repeat(zeros, repeats, axis=1) if zeros is not None else 8
    out[..., head:] = packed[:, :, 0] | packed[:, :, 1] << 4
    return out.reshape(-1)


def _halves(view: TensorView, by_group: NDArray[np.float32]) -> NDArray[np.float16]:
    """The scales as f16. Raises: UnsupportedError when one is no f16 number."""
    with np.errstate(over="ignore"):
        halves = np.ascontiguousarray(by_group).astype(np.float16)
    wrong = halves.astype(np.float32) != by_group
    if wrong.any():
        raise UnsupportedError(f"{view.path}: tensor {_int4(view).scale.name} holds {by_group[wrong][0]}, which is no f16 number", what="int4 scale")
    return halves


def _order(view: TensorView, raw: Bytes) -> NDArray[np.int32]:
    """The group of every column. Raises: FileError when there is no such group."""
    order = _int4(view).order
    groups, n = raw.view("<i4"), view.shape[1] // _int4(view).group
    if order is not None and groups.size and (groups.min() < 0 or groups.max() >= n):
        raise FileError(f"{order.path}: tensor {order.name} names group {groups.max() if groups.max() >= n else groups.min()} of {n}", path=str(order.path), field=order.name)
    return groups


def _int4(view: TensorView) -> Int4:
    if view.int4 is None:
        raise UnsupportedError(f"{view.name} holds no 4-bit codes")
    return view.int4


def _nibbles(raw: Bytes, n: int) -> NDArray[Any]:
    """[words / n, n, 8]: the eight codes of every word, n words a row."""
    return (raw.view("<u4").reshape(-1, n, 1) >> SHIFTS & 15).astype(np.uint8)


def _codes(view: TensorView, raw: Bytes) -> Bytes:
    """Codes [N, K], one a byte."""
    rows, cols = view.shape
    kind = _int4(view).words
    if kind == "rows":
        return _nibbles(raw, cols // 8).reshape(rows, cols)
    if kind == "columns":
        return np.ascontiguousarray(_nibbles(raw, rows).transpose(0, 2, 1).reshape(cols, rows).T)
    return np.ascontiguousarray(_awq(_nibbles(raw, rows // 8)).T)


def _awq(nibbles: Bytes) -> Bytes:
    """[n, words, 8] in AWQ's order -> [n, 8 words]."""
    out = np.empty_like(nibbles)
    out[:, :, AWQ_ORDER] = nibbles
    return out.reshape(len(nibbles), -1)


def _zeros(view: TensorView, raw: Bytes) -> Bytes:
    """Zero points [N, K/group]."""
    int4, (rows, cols) = _int4(view), view.shape
    n = cols // int4.group
    if int4.words == "rows":
        found = _nibbles(raw, n).transpose(0, 2, 1).reshape(-1, n)[:rows]
    else:
        nibbles = _nibbles(raw, -(-rows // 8))
        found = (_awq(nibbles) if int4.words == "awq" else nibbles.reshape(n, -1))[:, :rows].T
    return np.ascontiguousarray(found) + np.uint8(int4.zero_offset)
