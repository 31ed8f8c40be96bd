"""Small tensors whose numbers belong in the blueprint: factors that the forward pass has as constants."""

from __future__ import annotations

import math
import struct

from ..errors import FileError, UnsupportedError
from ..files.checkpoint import Checkpoint

MOST = 1 << 16
CODES = {"f32": "f", "f16": "e", "bf16": "H"}


def stored_numbers(checkpoint: Checkpoint, name: str) -> tuple[float, ...]:
    """The numbers of that tensor; none where only a header is at hand. Raises: FileError for a large tensor, and for one that holds no numbers."""
    view = checkpoint.tensors[name]
    if view.n_elements > MOST or view.format not in CODES:
        raise FileError(
            f"{view.path}: tensor {name} is {view.format} {list(view.shape)}, expected at most {MOST} plain numbers", path=str(view.path), field=name
        )
    try:
        data = checkpoint.read(view)
    except UnsupportedError:
        return ()
    values = struct.unpack(f"<{view.n_elements}{CODES[view.format]}", data)
    if view.format == "bf16":
        values = struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}I", *(v << 16 for v in values)))
    if not all(math.isfinite(v) for v in values):
        raise FileError(f"{view.path}: tensor {name} holds a number that is not finite", path=str(view.path), field=name)
    return values
