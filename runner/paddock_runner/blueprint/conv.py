"""Tensors of gated short convolutions, and how LFM2 names the rest of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..files.view import TensorView
from .blueprint import ShortConv

HF_LAYER = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "conv.in_proj": "conv_in", "conv.conv": "conv", "conv.out_proj": "o",
    "self_attn.out_proj": "o", "self_attn.q_layernorm": "q_norm", "self_attn.k_layernorm": "k_norm",
    "feed_forward.w1": "gate", "feed_forward.w3": "up", "feed_forward.w2": "down", "feed_forward.gate": "router",
}  # fmt: skip


GGUF_LAYER = {"shortconv.conv": "conv", "shortconv.in_proj": "conv_in", "shortconv.out_proj": "o"}


def with_taps(ours: Mapping[str, TensorView], name: str, n_channels: int, conv_width: int) -> dict[str, TensorView]:
    """The tensors, that convolution's [C, W] (GGUF) as [C, 1, W]."""
    view = ours.get(name)
    is_flat = view is not None and view.shape == (n_channels, conv_width)
    return {**ours, name: replace(view, shape=(n_channels, 1, conv_width))} if view is not None and is_flat else dict(ours)


def conv_shapes(x: ShortConv, model_width: int) -> dict[str, tuple[int, ...]]:
    """Our name within the layer -> shape."""
    want: dict[str, tuple[int, ...]] = {
        "conv_in.weight": (3 * x.width, model_width), "conv.weight": (x.width, 1, x.conv_width), "o.weight": (model_width, x.width),
    }  # fmt: skip
    if x.bias:
        want |= {"conv_in.bias": (3 * x.width,), "conv.bias": (x.width,), "o.bias": (model_width,)}
    return want
