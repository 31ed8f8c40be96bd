"""What most dense families share when they build their layers: one template, its widths and windows per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..files.fields import Fields
from .blueprint import Attention, Blueprint, FeedForward, Layer, Rope
from .sizes import Sizes


def attention_of(s: Sizes, layout: str = "neox") -> Attention:
    """Attention with the sizes' widths and rope, and the usual scale; the first layer's key-value heads."""
    return Attention(s.n_heads, s.n_kv_heads[0], s.head_width, s.head_width**-0.5, s.rope(layout), s.v_width)


def stack(s: Sizes, layer: Layer) -> tuple[Layer, ...]:
    """The template once per layer, each with its own key-value heads and feed-forward width."""
    return tuple(
        replace(
            layer,
            attention=replace(layer.attention, n_kv_heads=n_kv),
            feed_forward=replace(layer.feed_forward, width=width),
        )
        for n_kv, width in zip(s.n_kv_heads, s.ff_widths, strict=True)
    )


def with_windows(layers: Sequence[Layer], is_local: Sequence[bool], window: int) -> tuple[Layer, ...]:
    """The layers, those that are local with that window."""
    return tuple(
        replace(layer, attention=replace(layer.attention, window=window)) if local else layer
        for layer, local in zip(layers, is_local, strict=True)
    )


def with_ropes(layers: Sequence[Layer], ropes: Sequence[Rope | None]) -> tuple[Layer, ...]:
    """The layers, each with its own rope, or none."""
    return tuple(
        replace(layer, attention=replace(layer.attention, rope=rope)) for layer, rope in zip(layers, ropes, strict=True)
    )


def blueprint_of(family: str, s: Sizes, layers: tuple[Layer, ...], **more: Any) -> Blueprint:
    """A blueprint with the sizes' widths; more: any other field."""
    settings = {"name": s.name, "notes": s.notes, "n_draft_layers": s.n_draft_layers, **more}
    return Blueprint(family, s.n_vocab, s.model_width, s.max_ctx_tokens, layers, s.norm_eps, s.tied_head, **settings)


def local_layers(config: Fields, n_layers: int, default: Sequence[bool]) -> list[bool]:
    """Which layers have the sliding window: as layer_types says, else the default. Raises: FileError."""
    if "layer_types" not in config:
        return list(default)
    kinds = config["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise config.error("layer_types", f"has the wrong length, expected {n_layers}")
    odd = [k for k in kinds if k not in ("sliding_attention", "full_attention", "attention")]
    if odd:
        raise config.error("layer_types", f"names {odd[0]!r:.40}, expected sliding_attention or full_attention")
    return [k == "sliding_attention" for k in kinds]


def gguf_local_layers(s: Sizes, default: Sequence[bool]) -> list[bool]:
    """Which layers have the sliding window: as the GGUF's pattern says (flags, or a period whose last layer sees all)."""
    key = f"{s.arch}.attention.sliding_window_pattern"
    if key not in s.fields:
        return list(default)
    value = s.fields[key]
    if isinstance(value, int) and not isinstance(value, bool):
        return [bool(value) and (i + 1) % value != 0 for i in range(s.n_layers)]
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != s.n_layers:
        raise s.fields.error(key, f"is no period and no array of {s.n_layers} flags")
    return [bool(v) for v in value]


def gated(s: Sizes, activation: str = "silu", bias: bool = False) -> FeedForward:
    """The gated feed-forward of the first layer."""
    return FeedForward(s.ff_widths[0], activation, bias)
