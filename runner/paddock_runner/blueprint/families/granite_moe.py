"""granite-moe: Granite 3 with experts, and Granite 4: granite's multipliers, softmax over the chosen experts, Mamba 2 in most layers.

Source: https://github.com/huggingface/transformers, models/granitemoe, models/granitemoehybrid; GGUF: blueprint/mixture.py.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import NO_ATTENTION, Blueprint, Experts, Layer, Mamba
from ..layers import attention_of, blueprint_of, gated, stack
from ..mamba import MAMBA_KINDS, gguf_mamba, step_limits
from ..mixture import checked_experts, gguf_experts, with_experts
from ..sizes import gguf_sizes, hf_sizes


def hybrid_from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "granitehybrid.*" keys: layers without key-value heads are Mamba 2. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch, may_have_experts=True, is_mixed=True)
    f, n, has = s.fields, s.fields.number, checkpoint.tensors.__contains__
    attention = replace(attention_of(s, "interleaved"), scale=n(f"{arch}.attention.scale", s.head_width**-0.5))
    if not f.flag(f"{arch}.rope.scaling.finetuned", True):
        attention = replace(attention, rope=None)
    layers = stack(s, Layer(attention, gated(s)))
    if f.integer(f"{arch}.expert_count", 0):
        shared = f.integer(f"{arch}.expert_shared_feed_forward_length", 0)
        layers = with_experts(layers, gguf_experts(checkpoint, s), shared, lambda i: False)
    kinds = [n == 0 for n in s.n_kv_heads]
    if any(kinds):
        first = kinds.index(True)
        mamba = gguf_mamba(f, arch, has(f"blk.{first}.ssm_conv1d.bias"), has(f"blk.{first}.ssm_in.bias"))
        layers = tuple(replace(x, kind="mamba", attention=NO_ATTENTION, mamba=mamba) if kind else x for x, kind in zip(layers, kinds, strict=True))
    return blueprint_of(
        "granite", s, layers, embed_scale=n(f"{arch}.embedding_scale", 1.0), residual_scale=n(f"{arch}.residual_scale", 1.0),
        logit_scale=1 / (n(f"{arch}.logit_scale", 1.0) or 1.0),
    )  # fmt: skip


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type granitemoe, granitemoeshared or granitemoehybrid. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    s, n = hf_sizes(checkpoint, config), config.number
    bias = config.flag("attention_bias", False)
    attention = replace(attention_of(s), scale=n("attention_multiplier", 1.0), qkv_bias=bias, out_bias=bias)
    if "position_embedding_type" in config and config.text("position_embedding_type") != "rope":
        attention = replace(attention, rope=None)
    shared = config.integer("shared_intermediate_size", 0)
    layers = stack(s, Layer(attention, gated(s)))
    if config.integer("num_local_experts", 8):
        used = config.integer("num_experts_per_tok", 2, low=1)
        experts = Experts(config.integer("num_local_experts", 8, low=1), used, s.ff_widths[0], "chosen")
        layers = with_experts(layers, checked_experts(experts, config), shared, lambda i: False)
    else:
        layers = tuple(replace(x, feed_forward=replace(x.feed_forward, width=shared)) for x in layers)
    if config.text("model_type", "") == "granitemoehybrid":
        layers = _hybrid(layers, config)
    divisor = n("logits_scaling", 1.0)
    if divisor == 0:
        raise config.error("logits_scaling", "is 0, expected another number")
    return blueprint_of(
        "granite",
        s,
        layers,
        embed_scale=n("embedding_multiplier", 1.0),
        residual_scale=n("residual_multiplier", 1.0),
        logit_scale=1 / divisor,
    )


def _hybrid(layers: tuple[Layer, ...], config: Fields) -> tuple[Layer, ...]:
    """The layers, those that layer_types names so with Mamba 2 instead of attention. Raises: FileError."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * len(layers)
    if not isinstance(kinds, list) or len(kinds) != len(layers) or any(k not in (*MAMBA_KINDS, "attention", "full_attention") for k in kinds):
        raise config.error("layer_types", f"is no list of {len(layers)} times mamba or attention")
    n_groups = config.integer("mamba_n_groups", 1, low=1)
    mamba = Mamba(
        config.integer("mamba_n_heads", 128, low=1), _head_width(config), n_groups, config.integer("mamba_d_state", 256, low=1),
        config.integer("mamba_d_conv", 4, low=2, high=16), n_groups, config.flag("mamba_conv_bias", True), config.flag("mamba_proj_bias", False), step_limits(config),
    )  # fmt: skip
    return tuple(replace(x, kind="mamba", attention=NO_ATTENTION, mamba=mamba) if kind in MAMBA_KINDS else x for x, kind in zip(layers, kinds, strict=True))


def _head_width(config: Fields) -> int:
    if isinstance(config.get("mamba_d_head", "auto"), int):
        return config.integer("mamba_d_head", low=1)
    return config.integer("mamba_expand", 2, low=1) * config.integer("hidden_size", low=1) // config.integer("mamba_n_heads", 128, low=1)
