"""q2_k to q6_k: superblocks of 256 elements whose sub-block scales are quantised too.

Source: ggml/src/ggml-common.h, block_q2_K .. block_q6_K; decoding as in ggml-quants.c, dequantize_row_q*_K.
"""

from __future__ import annotations

import numpy as np

from .arrays import F32, U8, bit_planes, half


def _scales_and_minima(packed: U8) -> tuple[F32, F32]:
    """The 12 bytes of q4_k and q5_k -> eight 6-bit scales and eight 6-bit minima, [n, 8] each.

    Bytes 0-3: scales 0-3 (6 bits) and the top two bits of scales 4-7; bytes 4-7: the same for the minima; bytes 8-11: the
    low four bits of scales 4-7 and, above them, of minima 4-7.
    """
    scale, minimum, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([scale & 63, (rest & 15) | (scale >> 6 << 4)], axis=1)
    minima = np.concatenate([minimum & 63, (rest >> 4) | (minimum >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def dequantize_q2_k(blocks: U8) -> F32:
    """s u8[16] (scale | minimum << 4), q u2[256], d f16, dmin f16: x = d sc q - dmin m, groups of 16. [n, 84] -> [n, 256]."""
    scales = blocks[:, :16]
    d, dmin = half(blocks[:, 80:82]), half(blocks[:, 82:84])
    scale = (d * (scales & 15).astype(np.float32))[:, :, None]
    minimum = (dmin * (scales >> 4).astype(np.float32))[:, :, None]
    q = bit_planes(blocks[:, 16:80], 2, 32).reshape(-1, 16, 16).astype(np.float32)
    return (scale * q - minimum).reshape(-1, 256)


def dequantize_q3_k(blocks: U8) -> F32:
    """h u1[256], q u2[256], s i6[16] (biased by 32), d f16: x = d sc (q - 4 (1 - h)), groups of 16. [n, 110] -> [n, 256]."""
    packed = blocks[:, 96:108]
    low = bit_planes(packed[:, :8], 4, 8).reshape(-1, 16)
    high = bit_planes(packed[:, 8:], 2, 4).reshape(-1, 16)
    scale = half(blocks[:, 108:110]) * ((low | high << 4).astype(np.float32) - np.float32(32))
    q = bit_planes(blocks[:, 32:96], 2, 32).reshape(-1, 16, 16).astype(np.float32)
    h = bit_planes(blocks[:, :32], 1, 32).reshape(-1, 16, 16).astype(np.float32)
    return (scale[:, :, None] * (q - (np.float32(4) - np.float32(4) * h))).reshape(-1, 256)


def dequantize_q4_k(blocks: U8) -> F32:
    """d f16, dmin f16, 12 bytes of scales, q u4[256]: x = d sc q - dmin m, groups of 32. [n, 144] -> [n, 256]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale = (half(blocks[:, :2]) * scales)[:, :, None]
    minimum = (half(blocks[:, 2:4]) * minima)[:, :, None]
    q = bit_planes(blocks[:, 16:], 4, 32).reshape(-1, 8, 32).astype(np.float32)
    return (scale * q - minimum).reshape(-1, 256)


def dequantize_q5_k(blocks: U8) -> F32:
    """d f16, dmin f16, 12 bytes of scales, h u1[256], q u4[256]: x = d sc (q + 16 h) - dmin m. [n, 176] -> [n, 256]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale = (half(blocks[:, :2]) * scales)[:, :, None]
    minimum = (half(blocks[:, 2:4]) * minima)[:, :, None]
    low = bit_planes(blocks[:, 48:], 4, 32).reshape(-1, 8, 32)
    high = bit_planes(blocks[:, 16:48], 1, 32).reshape(-1, 8, 32)
    return (scale * (low | high << 4).astype(np.float32) - minimum).reshape(-1, 256)


def dequantize_q6_k(blocks: U8) -> F32:
    """q u4[256], h u2[256], s i8[16], d f16: x = d s (q + 16 h - 32), groups of 16. [n, 210] -> [n, 256]."""
    scale = half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    low = bit_planes(blocks[:, :128], 4, 64).reshape(-1, 8, 32)
    high = bit_planes(blocks[:, 128:192], 2, 32).reshape(-1, 8, 32)
    q = ((low | high << 4).astype(np.float32) - np.float32(32)).reshape(-1, 16, 16)
    return (scale[:, :, None] * q).reshape(-1, 256)
