"""exaone4: EXAONE 4. Norms after the branches only, norms on q and k; with windows, the global layers have no rope.

Source: https://github.com/huggingface/transformers, models/exaone4/modeling_exaone4.py; GGUF keys as in llama.cpp, models/exaone4.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Layer
from ..layers import attention_of, blueprint_of, gated, gguf_local_layers, local_layers, stack, with_ropes, with_windows
from ..sizes import Sizes, gguf_sizes, hf_sizes

PERIOD = 4


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "exaone4.*" keys. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch)
    window = s.fields.integer(f"{arch}.attention.sliding_window", 0)
    return _blueprint(s, gguf_local_layers(s, _three_of_four(s, PERIOD)), window)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type exaone4. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    s = hf_sizes(checkpoint, config)
    period = (
        config.integer("sliding_window_pattern", PERIOD, low=1)
        if isinstance(config.get("sliding_window_pattern"), int)
        else PERIOD
    )
    window = config.integer("sliding_window", 0)
    return _blueprint(s, local_layers(config, s.n_layers, _three_of_four(s, period)), window)


def _three_of_four(s: Sizes, period: int) -> list[bool]:
    return [(i + 1) % period != 0 and i + 1 != s.n_layers for i in range(s.n_layers)]


def _blueprint(s: Sizes, local: list[bool], window: int) -> Blueprint:
    layers = stack(s, Layer(replace(attention_of(s), qk_norm=True), gated(s), post_norms=True, pre_norms=False))
    if window:
        layers = with_ropes(with_windows(layers, local, window), [s.rope() if x else None for x in local])
    return blueprint_of("exaone4", s, layers)
