"""qwen3: Qwen 3, dense. As qwen2, with norms on q and k instead of biases."""

from __future__ import annotations

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint
from ..sizes import gguf_sizes, hf_sizes
from .qwen2 import dense, windowed


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "qwen3.*" keys. Raises: FileError, UnsupportedError."""
    return dense("qwen3", gguf_sizes(checkpoint, arch), False, True)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type qwen3. Raises: FileError, UnsupportedError."""
    config = config.with_defaults({"head_dim": 128})
    config.choice("hidden_act", "silu", ("silu",))
    return windowed(dense("qwen3", hf_sizes(checkpoint, config), config.flag("attention_bias", False), True), config)
