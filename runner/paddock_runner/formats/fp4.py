"""mxfp4 and nvfp4 as GGUF stores them: e2m1 elements with a power-of-two scale per 32, or an e4m3 scale per 16.

Source: OCP Microscaling Formats (MX) v1.0, 5.3.3 and 5.4.1; block layouts as in ggml/src/ggml-common.h, block_mxfp4, block_nvfp4.
"""

from __future__ import annotations

import numpy as np

from .arrays import F32, U8, nibbles
from .fp8 import E4M3

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def dequantize_mxfp4(blocks: U8) -> F32:
    """e u8, q u4[32] (low halves first): x = 2^(e - 127) E2M1[q]. [n, 17] -> [n, 32].

    Computed as (2^(e - 128)) (2 E2M1[q]), which stays finite where the scale alone would not.
    """
    half_scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    return half_scale * (np.float32(2) * E2M1[nibbles(blocks[:, 1:])])


def dequantize_nvfp4(blocks: U8) -> F32:
    """s e4m3[4] (sign ignored, code 127 reads as 0), q u4[4][16] (low halves first): x = s E2M1[q]. [n, 36] -> [n, 64]."""
    codes = blocks[:, :4]
    scale = np.where(codes & 127 == 127, np.float32(0), np.abs(E4M3[codes]))
    q = E2M1[nibbles(blocks[:, 4:].reshape(-1, 4, 8))]
    return (scale[:, :, None] * q).reshape(-1, 64)
