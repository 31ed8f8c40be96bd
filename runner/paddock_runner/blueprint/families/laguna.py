"""laguna: Poolside's Laguna. Heads per layer, a softplus gate on attention's output, windows in most layers, sigmoid routing with a shared expert.

Source: https://github.com/huggingface/transformers, models/laguna.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Attention, Blueprint, Experts, Layer
from ..layers import attention_of, blueprint_of, gated, local_layers, stack
from ..mixture import checked_experts
from ..sizes import Sizes, hf_sizes

ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
"""Of configs that name none. Source: transformers, configuration_laguna.py."""
GATINGS = {True: True, "per-head": True, "per-element": False}
"""gating -> whether a head has one gate."""


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """Raises: UnsupportedError."""
    raise UnsupportedError(f"{checkpoint.path}: {arch} from GGUF is not supported; its safetensors folder is", what=f"{arch} GGUF")


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type laguna. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    if config.flag("moe_apply_router_weight_on_input", False):
        raise UnsupportedError(f"{config.where}: moe_apply_router_weight_on_input is not supported", what="router weight on input")
    config = config.with_defaults({"head_dim": 128, "rope_parameters": ROPES})
    wide = hf_sizes(checkpoint, config, rope_key="full_attention")
    local = hf_sizes(checkpoint, config, rope_key="sliding_attention")
    n, is_local = wide.n_layers, local_layers(config, wide.n_layers, [False] * wide.n_layers)
    window = config.integer("sliding_window", 512, low=1)
    heads = config.integers("num_attention_heads_per_layer", n, wide.n_heads, high=4096)
    dense = _dense_layers(config, n)
    experts = _experts(config)
    shared = config.integer("shared_expert_intermediate_size", 512, low=1)
    layers = []
    for i, layer in enumerate(stack(wide, Layer(_attention(wide, config), gated(wide)))):
        if not heads[i] or heads[i] % wide.n_kv_heads[i]:
            raise config.error("num_attention_heads_per_layer", f"is {heads[i]} in layer {i}, expected a multiple of {wide.n_kv_heads[i]}")
        rope = local.rope() if is_local[i] else wide.rope()
        attention = replace(layer.attention, n_heads=heads[i], rope=rope, window=window if is_local[i] else 0)
        feed_forward = layer.feed_forward if dense[i] else replace(layer.feed_forward, width=shared)
        layers.append(replace(layer, attention=attention, feed_forward=feed_forward, experts=None if dense[i] else experts))
    return blueprint_of("laguna", wide, tuple(layers))


def _attention(s: Sizes, config: Fields) -> Attention:
    gating = config.get("gating", True)
    if not isinstance(gating, bool | str) or gating not in GATINGS:
        raise config.error("gating", f"is {gating!r:.40}, expected true, per-head or per-element")
    bias = config.flag("attention_bias", False)
    return replace(
        attention_of(s), qk_norm=True, qkv_bias=bias, out_bias=bias, out_gate=True, gate_act="softplus", gate_by_head=GATINGS[gating]
    )


def _experts(config: Fields) -> Experts:
    experts = Experts(
        config.integer("num_experts", 256, low=1), config.integer("num_experts_per_tok", 8, low=1), config.integer("moe_intermediate_size", 512, low=1),
        "sigmoid", True, config.number("moe_routed_scaling_factor", 1.0), choice_bias=True,
        router_softcap=config.number("moe_router_logit_softcapping", 0.0),
    )  # fmt: skip
    return checked_experts(experts, config)


def _dense_layers(config: Fields, n_layers: int) -> list[bool]:
    """Which layers have no experts: as mlp_layer_types says, else the first. Raises: FileError."""
    if "mlp_layer_types" not in config:
        return [i == 0 for i in range(n_layers)]
    kinds = config["mlp_layer_types"]
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(k not in ("dense", "sparse") for k in kinds):
        raise config.error("mlp_layer_types", f"is no list of {n_layers} times dense or sparse")
    return [k == "dense" for k in kinds]
