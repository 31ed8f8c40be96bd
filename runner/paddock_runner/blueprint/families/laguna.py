"""laguna: Poolside's Laguna. Heads per layer, a softplus gate on attention's output, windows in most layers, sigmoid routing with a shared expert.

Source: https://github.com/huggingface/transformers, models/laguna.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Experts, Layer, Rope
from ..layers import attention_of, blueprint_of, gated, gguf_local_layers, local_layers, stack
from ..mixture import checked_experts, gguf_experts
from ..sizes import Sizes, gguf_sizes, hf_sizes, rope_base

ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
"""Of configs that name none. Source: transformers, configuration_laguna.py."""
PERIOD = 4
"""Every so many layers, from the first on, one sees all tokens, in GGUF files that do not say."""
LOCAL_THETA = 10000.0
GATINGS = {True: True, "per-head": True, "per-element": False}
"""gating -> whether a head has one gate."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs between layers, and the experts. by_head: a head has one gate."""

    heads: tuple[int, ...]
    is_local: list[bool]
    window: int
    wide: Rope
    local: Rope
    is_dense: list[bool]
    experts: Experts
    shared: int
    by_head: bool


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "laguna.*" keys; the gates' widths are those of their tensors. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch, may_have_experts=True, is_mixed=True)
    f = s.fields
    window = f.integer(f"{arch}.attention.sliding_window", 0)
    is_local = gguf_local_layers(s, [bool(window)] * s.n_layers)
    if window and f"{arch}.attention.sliding_window_pattern" not in f:
        is_local = [(i % PERIOD) != 0 for i in range(s.n_layers)]
    local = Rope(rope_base(f, f"{arch}.rope.freq_base_swa", LOCAL_THETA), f.integer(f"{arch}.rope.dimension_count_swa", s.head_width, low=2))
    parts = Parts(
        f.integers(f"{arch}.attention.head_count", s.n_layers, high=4096), is_local, window, s.rope(), local,
        [f"blk.{i}.ffn_gate_inp.weight" not in checkpoint.tensors for i in range(s.n_layers)], gguf_experts(checkpoint, s),
        f.integer(f"{arch}.expert_shared_feed_forward_length", 0), _by_head(checkpoint, s, "blk.{}.attn_gate.weight", True),
    )  # fmt: skip
    return _blueprint(s, parts, "blk.0.attn_q.bias" in checkpoint.tensors)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type laguna. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    if config.flag("moe_apply_router_weight_on_input", False):
        raise UnsupportedError(f"{config.where}: moe_apply_router_weight_on_input is not supported", what="router weight on input")
    config = config.with_defaults({"head_dim": 128, "rope_parameters": ROPES})
    wide, local = (hf_sizes(checkpoint, config, rope_key=key) for key in ROPES)
    n = wide.n_layers
    is_local = local_layers(config, n, [False] * n)
    gating = config.get("gating", True)
    if not isinstance(gating, bool | str) or gating not in GATINGS:
        raise config.error("gating", f"is {gating!r:.40}, expected true, per-head or per-element")
    parts = Parts(
        config.integers("num_attention_heads_per_layer", n, wide.n_heads, high=4096), is_local,
        config.integer("sliding_window", 512, low=int(any(is_local))), wide.rope(), local.rope(), _dense_layers(config, n), _experts(config),
        config.integer("shared_expert_intermediate_size", 512, low=1), _by_head(checkpoint, wide, "model.layers.{}.self_attn.g_proj.weight", GATINGS[gating]),
    )  # fmt: skip
    return _blueprint(wide, parts, config.flag("attention_bias", False))


def _by_head(checkpoint: Checkpoint, s: Sizes, name: str, default: bool) -> bool:
    """Whether a head has one gate: as wide as the first layer's tensor is (configs say true for either), else the default."""
    view = checkpoint.tensors.get(name.format(0))
    return default if view is None or not view.shape else view.shape[0] < s.head_width * s.n_kv_heads[0]


def _blueprint(s: Sizes, parts: Parts, bias: bool) -> Blueprint:
    attention = replace(attention_of(s), qk_norm=True, qkv_bias=bias, out_bias=bias, out_gate=True, gate_act="softplus", gate_by_head=parts.by_head)
    layers = []
    for i, layer in enumerate(stack(s, Layer(attention, gated(s)))):
        heads, n_kv = parts.heads[i], s.n_kv_heads[i]
        if not heads or not n_kv or heads % n_kv:
            raise s.fields.error("num_attention_heads_per_layer", f"is {heads} in layer {i}, expected a multiple of {n_kv}")
        rope, window = (parts.local, parts.window) if parts.is_local[i] else (parts.wide, 0)
        layer = replace(layer, attention=replace(layer.attention, n_heads=heads, rope=rope, window=window))
        if not parts.is_dense[i]:
            layer = replace(layer, feed_forward=replace(layer.feed_forward, width=parts.shared), experts=parts.experts)
        layers.append(layer)
    return blueprint_of("laguna", s, tuple(layers))


def _experts(config: Fields) -> Experts:
    experts = Experts(
        config.integer("num_experts", 256, low=1), config.integer("num_experts_per_tok", 8, low=1), config.integer("moe_intermediate_size", 512, low=1),
        "sigmoid", True, config.number("moe_routed_scaling_factor", 1.0), choice_bias=True,
        router_softcap=config.number("moe_router_logit_softcapping", 0.0),
    )  # fmt: skip
    return checked_experts(experts, config)


def _dense_layers(config: Fields, n_layers: int) -> list[bool]:
    """Which layers have no experts: as mlp_layer_types or mlp_only_layers says, else the first. Raises: FileError."""
    if "mlp_layer_types" not in config:
        only = config.get("mlp_only_layers")
        return [i in only if isinstance(only, list) and only else i == 0 for i in range(n_layers)]
    kinds = config["mlp_layer_types"]
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(k not in ("dense", "sparse") for k in kinds):
        raise config.error("mlp_layer_types", f"is no list of {n_layers} times dense or sparse")
    return [k == "dense" for k in kinds]
