"""gemma3: Gemma 3, text part. Five sliding-window layers to one global, four norms a layer, scaled embeddings.

Source: https://github.com/huggingface/transformers, models/gemma3/modeling_gemma3.py; GGUF keys as in llama.cpp, llm_build_gemma3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Attention, Blueprint, FeedForward, Layer, Rope
from ..sizes import Sizes, gguf_sizes, hf_sizes, rope_base

DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
}
"""Fields that published configs leave out. Source: transformers, configuration_gemma3.py, Gemma3TextConfig."""

PERIOD = 6
LOCAL_THETA = 10000.0
WIDE_LAYERS = 62
"""The 27B model, known by its layers: its attention scale comes from the model width, and GGUF does not store it."""


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "gemma3.*" or "gemma-embedding.*" keys; norm weights hold 1 + w already. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch)
    window = s.fields.integer(f"{arch}.attention.sliding_window", low=1)
    pattern = s.fields.get(f"{arch}.attention.sliding_window_pattern", PERIOD)
    scale = s.fields.number(
        f"{arch}.attention.scale", (s.model_width / s.n_heads if s.n_layers == WIDE_LAYERS else s.head_width) ** -0.5
    )
    local = Rope(rope_base(s.fields, f"{arch}.rope.freq_base_swa", LOCAL_THETA), s.rope_width)
    is_encoder = arch == "gemma-embedding"
    layers = _layers(
        s, _local_layers(s, pattern), window // 2 + 1 if is_encoder else window, scale, local,
        s.fields.number(f"{arch}.attn_logit_softcapping", 0.0),
    )  # fmt: skip
    if is_encoder:
        layers = _both_ways(layers)
    return _blueprint(s, layers, s.fields.number(f"{arch}.final_logit_softcapping", 0.0), 0.0)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type gemma3_text, or the text_config of gemma3. Raises: FileError, UnsupportedError.

    EmbeddingGemma's windows look both ways: half of sliding_window to each side.
    """
    config = config.with_defaults(DEFAULTS)
    is_encoder = config.flag("use_bidirectional_attention", False)
    config.choice("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    s = hf_sizes(checkpoint, config, tied_default=True, rope_key="full_attention")
    theta = rope_base(config, "rope_local_base_freq", LOCAL_THETA)
    if "rope_parameters" in config and "sliding_attention" in config.section("rope_parameters"):
        theta = rope_base(config.section("rope_parameters").section("sliding_attention"), "rope_theta", theta)
    if "layer_types" in config:
        kinds = config["layer_types"]
        if not isinstance(kinds, list) or len(kinds) != s.n_layers:
            raise config.error("layer_types", f"has the wrong length, expected {s.n_layers}")
        local_layers = [k == "sliding_attention" for k in kinds]
    else:
        local_layers = _local_layers(s, config.integer("sliding_window_pattern", PERIOD, low=1))
    pre_scale = config.number("query_pre_attn_scalar", 256.0)
    if pre_scale <= 0:
        raise config.error("query_pre_attn_scalar", f"is {pre_scale}, expected more than 0")
    window = config.integer("sliding_window", 4096, low=1)
    layers = _layers(
        s,
        local_layers,
        window // 2 + 1 if is_encoder else window,
        pre_scale**-0.5,
        Rope(theta, s.rope_width),
        config.number("attn_logit_softcapping", 0.0),
    )
    if is_encoder:
        layers = _both_ways(layers)
    return _blueprint(s, layers, config.number("final_logit_softcapping", 0.0), 1.0)


def _both_ways(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """EmbeddingGemma's: every token sees those behind it too."""
    return tuple(replace(layer, attention=replace(layer.attention, causal=False)) for layer in layers)


def _local_layers(s: Sizes, pattern: object) -> list[bool]:
    """Which layers have the window: every one but each pattern-th, or as an array of flags says."""
    if isinstance(pattern, int) and pattern > 0:
        return [(i + 1) % pattern != 0 for i in range(s.n_layers)]
    if isinstance(pattern, Sequence) and not isinstance(pattern, str) and len(pattern) == s.n_layers:
        return [bool(p) for p in pattern]
    raise s.fields.error(
        "attention.sliding_window_pattern", f"is {pattern!r:.40}, expected a period or {s.n_layers} flags"
    )


def _layers(
    s: Sizes, local_layers: list[bool], window: int, scale: float, local: Rope, softcap: float
) -> tuple[Layer, ...]:
    wide = s.rope()
    return tuple(
        Layer(
            Attention(
                s.n_heads,
                s.n_kv_heads[i],
                s.head_width,
                scale,
                local if is_local else wide,
                s.v_width,
                window if is_local else 0,
                softcap,
                qk_norm=True,
            ),
            FeedForward(s.ff_widths[i], "gelu_tanh"),
            post_norms=True,
        )
        for i, is_local in enumerate(local_layers)
    )


def _blueprint(s: Sizes, layers: tuple[Layer, ...], softcap: float, norm_offset: float) -> Blueprint:
    return Blueprint(
        "gemma3", s.n_vocab, s.model_width, s.max_ctx_tokens, layers, s.norm_eps, s.tied_head,
        embed_scale=math.sqrt(s.model_width), logit_softcap=softcap, norm_offset=norm_offset, name=s.name, notes=s.notes,
    )  # fmt: skip
