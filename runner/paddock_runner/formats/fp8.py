"""fp8_e4m3 (no infinity, one NaN code per sign) and fp8_e5m2 (as IEEE): eight bits of floating point.

Scales lie beside the weight in the checkpoint and are not part of the format.
Source: Micikevicius et al. 2022, FP8 formats for deep learning, table 1.
"""

from __future__ import annotations

import numpy as np

from .arrays import F32, U8


def _values(exponent_bits: int) -> F32:
    """The value of each of the 256 codes with that many exponent bits."""
    mantissa_bits = 7 - exponent_bits
    code = np.arange(256)
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    return np.where(code & 128, -value, value).astype(np.float32)


E4M3 = _values(4)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = _values(5)
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan


def dequantize_fp8_e4m3(blocks: U8) -> F32:
    """[n, 1] codes -> [n, 1]."""
    return E4M3[blocks]


def dequantize_fp8_e5m2(blocks: U8) -> F32:
    """[n, 1] codes -> [n, 1]."""
    return E5M2[blocks]
