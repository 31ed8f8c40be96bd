"""Array types and bit tricks that the reference decoders share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


def half(two_bytes: U8) -> F32:
    """[n, 2k] bytes of little-endian f16 -> [n, k] f32."""
    return np.ascontiguousarray(two_bytes).view("<f2").astype(np.float32)


def nibbles(packed: U8) -> U8:
    """[..., n] bytes -> [..., 2n]: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def bit_planes(packed: U8, width: int, group: int) -> U8:
    """Fields of `width` bits: [n, k * group] bytes -> [n, k, 8/width, group]; plane p holds bits p*width.. of each byte."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    grouped = packed.reshape(packed.shape[0], -1, 1, group)
    return (grouped >> shifts) & np.uint8((1 << width) - 1)
