"""Reads every number that scales others, and every plain number, of a checkpoint: NaN and infinity make a model talk nonsense.

Knows where the scales of each block format lie; computes nothing with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import FileError
from ..formats.table import FORMATS
from .checkpoint import Checkpoint
from .view import TensorView

CHUNK_BYTES = 8 << 20
HALVES: dict[str, tuple[int, ...]] = {
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2),
    "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,), "f16": (0,),
}  # fmt: skip
"""Byte offsets of the f16 numbers in a block. Source: as formats/block32.py, k_quants.py and iq4.py."""
NAN_CODES: dict[str, tuple[int, int, int]] = {
    "fp8_e4m3": (0x7F, 0x7F, 1), "fp8_e5m2": (0x7C, 0x7C, 1), "e8m0": (0xFF, 0xFF, 1), "mxfp4": (0xFF, 0xFF, 1), "nvfp4": (0x7F, 0x7F, 4),
}  # fmt: skip
"""(mask, value, bytes of a block that are such codes): a code whose masked bits are the value is no number."""
BLOCKS = {f.name: f.block_bytes for f in FORMATS}


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A tensor with numbers that are none. first: the byte, in its file, of the first block of them."""

    tensor: str
    format: str
    n_blocks: int
    first: int


def scan(checkpoint: Checkpoint, moved: Callable[[int], None]) -> list[NotFinite]:
    """Read all tensors. moved(n): n more bytes were read. Formats that are unknown or hold whole numbers are passed over.

    Raises: FileError when a file is shorter than its header says.
    """
    return [found for view in checkpoint.tensors.values() if (found := _scan_one(view, moved)) is not None]


def _scan_one(view: TensorView, moved: Callable[[int], None]) -> NotFinite | None:
    if not (view.format in HALVES or view.format in NAN_CODES or view.format in ("f32", "bf16")):
        moved(view.n_bytes)
        return None
    n_bad, first = 0, -1
    for offset, raw in _chunks(view):
        bad = np.flatnonzero(_bad_blocks(view.format, raw))
        if bad.size and first < 0:
            first = offset + int(bad[0]) * BLOCKS[view.format]
        n_bad += int(bad.size)
        moved(raw.size)
    return NotFinite(view.name, view.format, n_bad, first) if n_bad else None


def _chunks(view: TensorView) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(byte in the file, bytes) in whole blocks."""
    step = CHUNK_BYTES // BLOCKS[view.format] * BLOCKS[view.format]
    with view.path.open("rb") as file:
        file.seek(view.offset)
        for start in range(0, view.n_bytes, step):
            raw = np.fromfile(file, np.uint8, min(step, view.n_bytes - start))
            if raw.size < min(step, view.n_bytes - start):
                raise FileError(f"{view.path} ends within tensor {view.name}", path=str(view.path), field=view.name)
            yield view.offset + start, raw


def _bad_blocks(format: str, raw: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """For every block, whether a number in it is NaN or infinite."""
    blocks = raw.reshape(-1, BLOCKS[format])
    bad = np.zeros(len(blocks), bool)
    if format in NAN_CODES:
        mask, value, n_codes = NAN_CODES[format]
        bad |= ((blocks[:, :n_codes] & mask) == value).any(axis=1)
        return bad
    if format in ("f32", "bf16"):
        words, exponent = (raw.view("<u4"), 0x7F800000) if format == "f32" else (raw.view("<u2"), 0x7F80)
        bad |= (words & exponent) == exponent
        return bad
    for at in HALVES[format]:
        bad |= (blocks[:, at + 1] & 0x7C) == 0x7C
    return bad
