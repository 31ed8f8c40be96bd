"""iq4_nl and iq4_xs: four bits that index a table of uneven steps.

Source: ggml/src/ggml-common.h, block_iq4_nl, block_iq4_xs, kvalues_iq4nl.
"""

from __future__ import annotations

import numpy as np

from .arrays import F32, U8, bit_planes, half, nibbles

STEPS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def dequantize_iq4_nl(blocks: U8) -> F32:
    """d f16, q u4[32]: x = d STEPS[q]. [n, 18] -> [n, 32]."""
    return half(blocks[:, :2]) * STEPS[nibbles(blocks[:, 2:])]


def dequantize_iq4_xs(blocks: U8) -> F32:
    """d f16, high scale bits u16, low scale bits u4[8], q u4[256]: x = d (s - 32) STEPS[q], groups of 32. [n, 136] -> [n, 256]."""
    high = bit_planes(blocks[:, 2:4], 2, 1).reshape(-1, 8)
    low = bit_planes(blocks[:, 4:8], 4, 1).reshape(-1, 8)
    scale = half(blocks[:, :2]) * ((low | high << 4).astype(np.float32) - np.float32(32))
    q = STEPS[nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    return (scale[:, :, None] * q).reshape(-1, 256)
