"""gemma2: Gemma 2. Every other layer has a window, logits are soft-capped, four norms a layer, scaled embeddings.

Source: https://github.com/huggingface/transformers, models/gemma2/modeling_gemma2.py; GGUF keys as in llama.cpp, models/gemma2.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Layer
from ..layers import attention_of, blueprint_of, gated, local_layers, stack, with_windows
from ..sizes import Sizes, gguf_sizes, hf_sizes

DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""Fields that published configs leave out. Source: transformers, configuration_gemma2.py."""

WIDE_LAYERS = 46
"""The 27B model, known by its layers: its attention scale comes from the model width, and GGUF does not store it."""


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "gemma2.*" keys; norm weights hold 1 + w already. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch)
    usual = (s.model_width / s.n_heads if s.n_layers == WIDE_LAYERS else s.head_width) ** -0.5
    scale = s.fields.number(f"{arch}.attention.scale", usual)
    softcaps = (
        s.fields.number(f"{arch}.attn_logit_softcapping", 50.0),
        s.fields.number(f"{arch}.final_logit_softcapping", 30.0),
    )
    window = s.fields.integer(f"{arch}.attention.sliding_window", 4096, low=1)
    return _blueprint(s, _even(s), window, scale, softcaps)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type gemma2. Raises: FileError, UnsupportedError."""
    # a softcap that is null is switched off: only fields that are not there have the default
    absent = {k: v for k, v in DEFAULTS.items() if k not in list(config)}
    config = config.with_defaults(absent)
    config.choice("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    s = hf_sizes(checkpoint, config, tied_default=True)
    scalar = config.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise config.error("query_pre_attn_scalar", f"is {scalar}, expected more than 0")
    softcaps = (config.number("attn_logit_softcapping", 0.0), config.number("final_logit_softcapping", 0.0))
    local = local_layers(config, s.n_layers, _even(s))
    blueprint = _blueprint(s, local, config.integer("sliding_window", 4096, low=1), scalar**-0.5, softcaps)
    return replace(blueprint, norm_offset=1.0)


def _even(s: Sizes) -> list[bool]:
    return [i % 2 == 0 for i in range(s.n_layers)]


def _blueprint(s: Sizes, local: list[bool], window: int, scale: float, softcaps: tuple[float, float]) -> Blueprint:
    attention = replace(attention_of(s), scale=scale, softcap=softcaps[0])
    layers = with_windows(stack(s, Layer(attention, gated(s, "gelu_tanh"), post_norms=True)), local, window)
    return blueprint_of("gemma2", s, layers, embed_scale=math.sqrt(s.model_width), logit_softcap=softcaps[1])
