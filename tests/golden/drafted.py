"""Tiny models with their draft layers (tests/golden/mtp), as folders that can be opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from paddock_runner.files.checkpoint import open_checkpoint

TINY = Path(__file__).resolve().parent / "tiny"
MTP = TINY.parent / "mtp"
N_PROMPT = 25
"""Tokens of each golden's prompt."""


def folder(name: str, to: Path) -> Path:
    """The tiny model with its draft layer in a second file, in a folder of its name."""
    out = Path(shutil.copytree(TINY / name, to / name))
    shutil.copy(MTP / name / "mtp.safetensors", out / "mtp.safetensors")
    where = {key: file for file in ("model.safetensors", "mtp.safetensors") for key in open_checkpoint(out / file).tensors}
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return out
