"""q8_0, q4_0, q4_1, q5_0, q5_1: blocks of 32 elements with an f16 scale (and, in the _1 kinds, an f16 minimum); q4_z, with a zero point.

Source: ggml/src/ggml-common.h, block_q8_0, block_q4_0, block_q4_1, block_q5_0, block_q5_1; decoding as in ggml-quants.c.
"""

from __future__ import annotations

import numpy as np

from .arrays import F32, U8, half, nibbles


def dequantize_q8_0(blocks: U8) -> F32:
    """d f16, q i8[32]: x = d q. [n, 34] -> [n, 32]."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * half(blocks[:, :2])


def dequantize_q4_0(blocks: U8) -> F32:
    """d f16, q u4[32] (low halves first): x = d (q - 8). [n, 18] -> [n, 32]."""
    return half(blocks[:, :2]) * (nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def dequantize_q4_1(blocks: U8) -> F32:
    """d f16, m f16, q u4[32]: x = d q + m. [n, 20] -> [n, 32]."""
    return half(blocks[:, :2]) * nibbles(blocks[:, 4:]).astype(np.float32) + half(blocks[:, 2:4])


def dequantize_q4_z(blocks: U8) -> F32:
    """d f16, z u8, a byte of nothing, q u4[32]: x = d (q - z); what AWQ and GPTQ store with zero points. [n, 20] -> [n, 32]."""
    return half(blocks[:, :2]) * (nibbles(blocks[:, 4:]).astype(np.float32) - blocks[:, 2:3].astype(np.float32))


def _five_bits(high: U8, low: U8) -> F32:
    """high [n, 4]: the fifth bits, bit i of the 32-bit word for element i. low [n, 16]: the nibbles. -> [n, 32]."""
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    return (nibbles(low) | fifth << 4).astype(np.float32)


def dequantize_q5_0(blocks: U8) -> F32:
    """d f16, h u32, q u4[32]: x = d (q + 16 h_i - 16). [n, 22] -> [n, 32]."""
    return half(blocks[:, :2]) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.float32(16))


def dequantize_q5_1(blocks: U8) -> F32:
    """d f16, m f16, h u32, q u4[32]: x = d (q + 16 h_i) + m. [n, 24] -> [n, 32]."""
    return half(blocks[:, :2]) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + half(blocks[:, 2:4])
