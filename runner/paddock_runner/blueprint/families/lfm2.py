"""lfm2: LFM2, dense and with experts. Gated short convolutions, and attention with norms on q and k in some layers.

Source: https://github.com/huggingface/transformers, models/lfm2 and models/lfm2_moe.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import NO_ATTENTION, Blueprint, Experts, Layer, ShortConv
from ..layers import attention_of, blueprint_of, gated, stack
from ..mixture import checked_experts, gguf_experts, with_experts
from ..sizes import gguf_sizes, hf_sizes


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "lfm2.*" or "lfm2moe.*" keys: layers without key-value heads are convolutions. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch, may_have_experts=True, is_mixed=True)
    f = s.fields
    layers = stack(s, Layer(replace(attention_of(s), qk_norm=True), gated(s)))
    if f.integer(f"{arch}.expert_count", 0):
        first = f.integer(f"{arch}.leading_dense_block_count", 0)
        layers = with_experts(layers, gguf_experts(checkpoint, s), 0, lambda i: i < first)
    taps = f.integer(f"{arch}.shortconv.l_cache", low=2, high=16)
    has_bias = any(name.endswith("shortconv.conv.bias") for name in checkpoint.tensors)
    return blueprint_of("lfm2", s, _mixed(layers, ShortConv(s.model_width, taps, has_bias), [n == 0 for n in s.n_kv_heads]))


def _mixed(layers: tuple[Layer, ...], conv: ShortConv, kinds: list[bool]) -> tuple[Layer, ...]:
    """The layers, those that are convolutions without attention."""
    return tuple(replace(x, kind="conv", attention=NO_ATTENTION, conv=conv) if is_conv else x for x, is_conv in zip(layers, kinds, strict=True))


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type lfm2 or lfm2_moe. Raises: FileError, UnsupportedError."""
    has_experts = config.text("model_type", "lfm2") == "lfm2_moe"
    values = {**config, "rms_norm_eps": config.number("norm_eps", 1e-5)}
    values["intermediate_size"] = config.integer("intermediate_size", low=1) if has_experts else _width(config)
    config = Fields(values, config.where, config.noun, config.prefix).with_defaults({"rope_theta": 1000000.0})
    s = hf_sizes(checkpoint, config, tied_default=config.flag("tie_embedding", True))
    layers = stack(s, Layer(replace(attention_of(s), qk_norm=True), gated(s)))
    if has_experts:
        experts = Experts(
            config.integer("num_experts", low=1), config.integer("num_experts_per_tok", low=1), config.integer("moe_intermediate_size", low=1),
            "sigmoid", config.flag("norm_topk_prob", True), config.number("routed_scaling_factor", 1.0),
            choice_bias=config.flag("use_expert_bias", True),
        )  # fmt: skip
        first = config.integer("num_dense_layers", 2)
        layers = with_experts(layers, checked_experts(experts, config), 0, lambda i: i < first)
    conv = ShortConv(s.model_width, config.integer("conv_L_cache", 3, low=2, high=16), config.flag("conv_bias", False))
    return blueprint_of("lfm2", s, _mixed(layers, conv, _conv_layers(config, s.n_layers)))


def _width(config: Fields) -> int:
    """The feed-forward's width: two thirds of what the config names, rounded up to whole multiples."""
    width = config.integer("block_ff_dim", config.integer("intermediate_size", 12288, low=1), low=1)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    unit = config.integer("block_multiple_of", 256, low=1)
    return -(-int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)) // unit) * unit


def _conv_layers(config: Fields, n_layers: int) -> list[bool]:
    """Which layers are convolutions."""
    if "layer_types" not in config:
        full = config.get("full_attn_idxs")
        return [isinstance(full, list) and i not in full for i in range(n_layers)]
    kinds = config["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(k not in ("conv", "full_attention") for k in kinds):
        raise config.error("layer_types", f"is no list of {n_layers} times conv or full_attention")
    return [k == "conv" for k in kinds]
