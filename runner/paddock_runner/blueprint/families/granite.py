"""granite: IBM Granite 3 and 4, dense. The llama graph with four multipliers.

Granite 4 calls itself granitemoehybrid; with Mamba layers or experts it is read by granite_moe.
Source: https://github.com/huggingface/transformers, models/granite/modeling_granite.py; GGUF keys as in llama.cpp, models/granite.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Layer
from ..layers import attention_of, blueprint_of, gated, stack
from ..sizes import Sizes, gguf_sizes, hf_sizes
from . import granite_moe


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "granite.*" or "granitehybrid.*" keys. Raises: FileError, UnsupportedError."""
    if arch == "granitehybrid":
        return granite_moe.hybrid_from_gguf(checkpoint, arch)
    s = gguf_sizes(checkpoint, arch)
    n = s.fields.number
    scales = (
        n(f"{arch}.embedding_scale", 1.0),
        n(f"{arch}.attention.scale", s.head_width**-0.5),
        n(f"{arch}.residual_scale", 1.0),
        n(f"{arch}.logit_scale", 1.0),
    )
    return _blueprint(s, "interleaved", scales, "blk.0.attn_q.bias" in checkpoint.tensors)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type granite, or a granitemoehybrid that is dense. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    if config.text("model_type", "granite") == "granitemoehybrid":
        kinds = config.get("layer_types") or config.get("layers_block_type") or []
        if config.integer("num_local_experts", 0) or any(k not in ("attention", "full_attention") for k in kinds):
            return granite_moe.from_hf(checkpoint, config)
        config = _dense_hybrid(config)
    if config.flag("mlp_bias", False):
        raise UnsupportedError(
            f"{config.where}: granite with feed-forward biases is not supported", what="granite mlp_bias"
        )
    s = hf_sizes(checkpoint, config)
    n = config.number
    scales = (
        n("embedding_multiplier", 1.0),
        n("attention_multiplier", 1.0),
        n("residual_multiplier", 1.0),
        n("logits_scaling", 1.0),
    )
    blueprint = _blueprint(s, "neox", scales, config.flag("attention_bias", False))
    if config.text("position_embedding_type", "rope") != "rope" and "position_embedding_type" in config:
        layers = tuple(replace(x, attention=replace(x.attention, rope=None)) for x in blueprint.layers)
        blueprint = replace(blueprint, layers=layers)
    return blueprint


def _dense_hybrid(config: Fields) -> Fields:
    """The fields as granite spells them."""
    values = {k: v for k, v in config.items() if k not in ("layer_types", "layers_block_type")}
    values["intermediate_size"] = config.integer("shared_intermediate_size", low=1)
    return Fields(values, config.where, config.noun, config.prefix)


def _blueprint(s: Sizes, layout: str, scales: tuple[float, float, float, float], bias: bool) -> Blueprint:
    embed, attention_scale, residual, logit_divisor = scales
    if logit_divisor == 0:
        raise s.fields.error("logits_scaling", "is 0, expected another number")
    attention = replace(attention_of(s, layout), scale=attention_scale, qkv_bias=bias, out_bias=bias)
    layers = stack(s, Layer(attention, gated(s)))
    return blueprint_of("granite", s, layers, embed_scale=embed, residual_scale=residual, logit_scale=1 / logit_divisor)
