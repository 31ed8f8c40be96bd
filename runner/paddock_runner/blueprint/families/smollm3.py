"""smollm3: SmolLM 3. The llama graph; every fourth layer has no rope.

Source: https://github.com/huggingface/transformers, models/smollm3/modeling_smollm3.py; GGUF as in llama.cpp, models/smollm3.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Layer
from ..layers import attention_of, blueprint_of, gated, local_layers, stack, with_ropes, with_windows
from ..sizes import Sizes, gguf_sizes, hf_sizes

PERIOD = 4
THETA = 2000000.0


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "smollm3.*" keys; the period is not stored. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch)
    return _blueprint(s, "interleaved", [int((i + 1) % PERIOD != 0) for i in range(s.n_layers)], False, False)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type smollm3. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    config = config.with_defaults({"rope_theta": THETA})
    s = hf_sizes(checkpoint, config, tied_default=True)
    period = config.integer("no_rope_layer_interval", PERIOD, low=1)
    if "no_rope_layers" in config:
        turned = list(config.integers("no_rope_layers", s.n_layers, high=1))
    else:
        turned = [int((i + 1) % period != 0) for i in range(s.n_layers)]
    blueprint = _blueprint(s, "neox", turned, config.flag("attention_bias", False), config.flag("mlp_bias", False))
    if not config.flag("use_sliding_window", False):
        return blueprint
    local = local_layers(config, s.n_layers, [not x for x in turned])
    return replace(blueprint, layers=with_windows(blueprint.layers, local, config.integer("sliding_window", 0)))


def _blueprint(s: Sizes, layout: str, turned: list[int], bias: bool, ff_bias: bool) -> Blueprint:
    """turned: 1 where a layer has rope."""
    attention = replace(attention_of(s, layout), qkv_bias=bias, out_bias=bias)
    layers = stack(s, Layer(attention, gated(s, bias=ff_bias)))
    return blueprint_of("smollm3", s, with_ropes(layers, [s.rope(layout) if x else None for x in turned]))
