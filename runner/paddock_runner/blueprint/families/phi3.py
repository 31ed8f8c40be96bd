"""phi3: Phi 3, 3.5 and 4 (text). The llama graph with fused q, k, v and fused gate, up; longrope; part of each head rotated.

Source: https://github.com/huggingface/transformers, models/phi3/modeling_phi3.py; GGUF keys as in llama.cpp, models/phi3.cpp.
"""

from __future__ import annotations

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Layer
from ..layers import attention_of, blueprint_of, gated, stack, with_windows
from ..sizes import Sizes, gguf_sizes, hf_sizes


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "phi3.*" keys. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch)
    return _blueprint(s, s.fields.integer(f"{arch}.attention.sliding_window", 0))


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type phi3. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    return _blueprint(hf_sizes(checkpoint, config), config.integer("sliding_window", 0))


def _blueprint(s: Sizes, window: int) -> Blueprint:
    window = window if window < s.max_ctx_tokens else 0
    layers = stack(s, Layer(attention_of(s), gated(s)))
    return blueprint_of("phi3", s, with_windows(layers, [True] * s.n_layers, window))
