"""qwen2: Qwen 2 and 2.5, dense. Biases on q, k and v; neox rope."""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Attention, Blueprint, FeedForward, Layer
from ..sizes import Sizes, gguf_sizes, hf_sizes


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "qwen2.*" keys. Raises: FileError, UnsupportedError."""
    return dense("qwen2", gguf_sizes(checkpoint, arch), True, False)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type qwen2. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    return windowed(dense("qwen2", hf_sizes(checkpoint, config), True, False), config)


def dense(family: str, s: Sizes, qkv_bias: bool, qk_norm: bool) -> Blueprint:
    """Qwen's dense graph, with or without biases and query-key norms."""
    rope = s.rope()
    layers = tuple(
        Layer(
            Attention(
                s.n_heads, n_kv, s.head_width, s.head_width**-0.5, rope, s.v_width, qkv_bias=qkv_bias, qk_norm=qk_norm
            ),
            FeedForward(width, "silu"),
        )
        for n_kv, width in zip(s.n_kv_heads, s.ff_widths, strict=True)
    )
    return Blueprint(
        family, s.n_vocab, s.model_width, s.max_ctx_tokens, layers, s.norm_eps, s.tied_head, name=s.name, notes=s.notes
    )


def windowed(blueprint: Blueprint, config: Fields) -> Blueprint:
    """With the sliding window on the layers that the config names, when it switches it on."""
    if not config.flag("use_sliding_window", False):
        return blueprint
    window = config.integer("sliding_window", 0)
    first = config.integer("max_window_layers", 0)
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != blueprint.n_layers):
        raise config.error("layer_types", f"has the wrong length, expected {blueprint.n_layers}")
    layers = tuple(
        replace(layer, attention=replace(layer.attention, window=window))
        if (kinds[i] == "sliding_attention" if kinds is not None else i >= first)
        else layer
        for i, layer in enumerate(blueprint.layers)
    )
    return replace(blueprint, layers=layers)
