"""Tensors of gated delta net layers and of attention with an output gate: their names, shapes, and how checkpoints interleave them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import UnsupportedError
from ..files.view import Pick, TensorView
from .blueprint import Attention, Delta

HF_LAYER = {
    "linear_attn.in_proj_qkv": "delta_qkv", "linear_attn.in_proj_z": "delta_z", "linear_attn.in_proj_b": "delta_b",
    "linear_attn.in_proj_a": "delta_a", "linear_attn.in_proj_qkvz": "delta_qkvz", "linear_attn.in_proj_ba": "delta_ba",
    "linear_attn.out_proj": "o", "linear_attn.conv1d": "delta_conv", "linear_attn.norm": "delta_scale",
    "linear_attn.A_log": "delta_a_log.weight", "linear_attn.dt_bias": "delta_dt.weight",
}  # fmt: skip
"""Stems, and whole names where the last word is no kind of tensor. delta_scale is the output norm's weight: it has no offset."""

GGUF_LAYER = {
    "attn_qkv": "delta_qkv", "attn_gate": "delta_z", "ssm_beta": "delta_b", "ssm_alpha": "delta_a", "ssm_ba": "delta_ba", "ssm_out": "o",
    "ssm_conv1d": "delta_conv", "ssm_norm": "delta_scale",
}  # fmt: skip


def gguf_delta_name(stem: str, kind: str) -> str | None:
    """Our name within a layer of gated delta net for a GGUF tensor; None when it is not one of its own."""
    if (stem, kind) == ("ssm_dt", "bias"):
        return "delta_dt.weight"
    return f"{GGUF_LAYER[stem]}.{kind}" if stem in GGUF_LAYER else None


def delta_shapes(x: Delta, model_width: int, is_fused: bool) -> dict[str, tuple[int, ...]]:
    """Our name within the layer -> shape. is_fused: q, k and v are one matrix."""
    keys = x.n_k_heads * x.k_width
    rows = {"qkv": x.n_channels} if is_fused else {"q": keys, "k": keys, "v": x.n_values}
    rows |= {"z": x.n_values, "b": x.n_v_heads, "a": x.n_v_heads}
    want: dict[str, tuple[int, ...]] = {f"delta_{name}.weight": (n, model_width) for name, n in rows.items()}
    want["delta_conv.weight"] = (x.n_channels, 1, x.conv_width)
    want |= {"delta_a_log.weight": (x.n_v_heads,), "delta_dt.weight": (x.n_v_heads,), "delta_scale.weight": (x.v_width,)}
    return {**want, "o.weight": (model_width, x.n_values)}


def split_delta(ours: Mapping[str, TensorView], i: int, x: Delta) -> dict[str, TensorView]:
    """The tensors, those of layer i that hold several projections (qwen3-next, key head after key head) taken apart."""
    out, at, ratio = dict(ours), f"layers.{i}.", x.n_v_heads // x.n_k_heads
    values = ratio * x.v_width
    conv = out.get(at + "delta_conv.weight")
    if conv is not None and conv.shape == (x.n_channels, x.conv_width):
        out[at + "delta_conv.weight"] = replace(conv, shape=(x.n_channels, 1, x.conv_width))
    _split(out, at + "delta_qkvz.weight", x.n_k_heads, {"delta_q": x.k_width, "delta_k": x.k_width, "delta_v": values, "delta_z": values}, at)
    _split(out, at + "delta_ba.weight", x.n_k_heads, {"delta_b": ratio, "delta_a": ratio}, at)
    return out


def split_gated_q(ours: Mapping[str, TensorView], i: int, a: Attention) -> dict[str, TensorView]:
    """The tensors, the query projection of layer i (head after head: query, gate) taken apart."""
    out, at = dict(ours), f"layers.{i}."
    _split(out, at + "q.weight", a.n_heads, {"q": a.head_width, "q_gate": a.head_width}, at)
    return out


def _split(out: dict[str, TensorView], name: str, n: int, parts: Mapping[str, int], at: str) -> None:
    """Replaces a matrix of n times the parts' rows by one view per part."""
    view, period = out.get(name), sum(parts.values())
    if view is None or len(view.shape) != 2 or view.shape[0] != n * period:
        return
    del out[name]
    first = 0
    for part, length in parts.items():
        out[f"{at}{part}.weight"] = _picked(view, n, Pick(first, length, period))
        first += length


def _picked(view: TensorView, n: int, pick: Pick) -> TensorView:
    """n times pick.length rows of a matrix, with their scales. Raises: UnsupportedError when that would cut a block of scales."""
    scales, rows = view.scales, n * pick.length
    if scales is not None and scales.kind != "tensor":
        size = scales.block[0] if scales.kind == "block" else 1
        if pick.first % size or pick.length % size or pick.period % size:
            raise UnsupportedError(f"{view.path}: tensor {view.name} would be split within a block of {size} rows of scales", what="split block")
        smaller = Pick(pick.first // size, pick.length // size, pick.period // size)
        shape = (n * smaller.length, *scales.view.shape[1:])
        scales = replace(scales, view=replace(scales.view, shape=shape, pick=smaller))
    return replace(view, shape=(rows, view.shape[1]), pick=pick, scales=scales)
