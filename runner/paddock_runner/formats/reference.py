"""Exact numpy decoding of any weight format: what every kernel is compared with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import numpy as np

from ..errors import FileError, UnsupportedError
from .arrays import F32, U8
from .table import by_name


def dequantize(format: str, data: bytes | bytearray | memoryview | U8, shape: tuple[int, ...]) -> F32:
    """The weight as f32 of that shape (outermost first, as in TensorView).

    data: the tensor's bytes as the file stores them, rows without gaps.
    Raises: UnsupportedError for a format that is no weight; FileError when the bytes do not fit the shape.
    """
    kind = by_name(format)
    if not kind.is_weight:
        raise UnsupportedError(f"{format} is not a weight format")
    flat = np.frombuffer(data, dtype=np.uint8)
    n_elements = int(np.prod(shape, dtype=np.int64))
    cols = shape[-1] if shape else 1
    need = n_elements // cols * kind.row_bytes(cols) if cols else 0
    if flat.size != need:
        raise FileError(
            f"{format} of shape {list(shape)} takes {need} bytes, got {flat.size}", need=need, have=flat.size
        )
    decode = cast(
        "Callable[[U8], F32]", getattr(importlib.import_module(f"{__package__}.{kind.decoder}"), f"dequantize_{format}")
    )
    with np.errstate(over="ignore"):
        return decode(flat.reshape(-1, kind.block_bytes)).reshape(shape)
