"""f32, f16 and bf16: layout and reference decoding."""

from __future__ import annotations

import numpy as np

from .arrays import F32, U8


def dequantize_f32(blocks: U8) -> F32:
    """[n, 4] bytes -> [n, 1]."""
    return blocks.view("<f4")


def dequantize_f16(blocks: U8) -> F32:
    """[n, 2] bytes -> [n, 1]."""
    return blocks.view("<f2").astype(np.float32)


def dequantize_bf16(blocks: U8) -> F32:
    """[n, 2] bytes -> [n, 1]: the upper half of an f32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)
