"""olmo2: OLMo 2 and OLMo 3. Norms after the branches only; q and k normed over all heads together; OLMo 3 adds windows.

Source: https://github.com/huggingface/transformers, models/olmo2 and models/olmo3; GGUF keys as in llama.cpp, models/olmo2.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Layer, Rope
from ..layers import attention_of, blueprint_of, gated, gguf_local_layers, local_layers, stack, with_ropes, with_windows
from ..sizes import Sizes, gguf_sizes, hf_sizes, rope_base

PERIOD = 4


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "olmo2.*" keys; OLMo 3 is olmo2 with a window, and its windowed layers have an unscaled rope. Raises: FileError."""
    s = gguf_sizes(checkpoint, arch)
    window = s.fields.integer(f"{arch}.attention.sliding_window", 0)
    local = gguf_local_layers(s, _three_of_four(s)) if window else [False] * s.n_layers
    plain = Rope(s.theta, s.rope_width)
    return _blueprint(s, local, window, [plain if x else s.rope() for x in local], False)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type olmo2 or olmo3. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    bias = config.flag("attention_bias", False)
    s = hf_sizes(checkpoint, config, rope_key="full_attention")
    if config.text("model_type", "olmo2") == "olmo2":
        return _blueprint(s, [False] * s.n_layers, 0, [s.rope()] * s.n_layers, bias)
    local = local_layers(config, s.n_layers, _three_of_four(s))
    own = config.section("rope_parameters") if "rope_parameters" in config else config
    theta = (
        rope_base(own.section("sliding_attention"), "rope_theta", s.theta) if "sliding_attention" in own else s.theta
    )
    ropes = [Rope(theta, s.rope_width) if x else s.rope() for x in local]
    return _blueprint(s, local, config.integer("sliding_window", 4096, low=1), ropes, bias)


def _three_of_four(s: Sizes) -> list[bool]:
    return [(i + 1) % PERIOD != 0 for i in range(s.n_layers)]


def _blueprint(s: Sizes, local: list[bool], window: int, ropes: list[Rope], bias: bool) -> Blueprint:
    attention = replace(attention_of(s), qk_norm_all=True, qkv_bias=bias, out_bias=bias)
    layers = stack(s, Layer(attention, gated(s), post_norms=True, pre_norms=False))
    return blueprint_of("olmo2", s, with_ropes(with_windows(layers, local, window), ropes))
