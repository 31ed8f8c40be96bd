"""Whole safetensors files as numpy arrays: for tools of the tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from paddock_runner.files.checkpoint import open_checkpoint


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every f32 tensor of a file."""
    opened = open_checkpoint(path)
    return {name: np.frombuffer(opened.read(view), np.float32).reshape(view.shape) for name, view in opened.tensors.items()}
