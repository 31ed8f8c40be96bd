"""qwen35: Qwen 3.5 to 3.8 and Qwen3-Next: three layers of gated delta net to one of attention with an output gate; dense or experts.

Source: https://github.com/huggingface/transformers, models/qwen3_5, models/qwen3_5_moe, models/qwen3_next.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import NO_ATTENTION, Blueprint, Delta, Experts, Layer
from ..layers import attention_of, blueprint_of, gated, stack
from ..mixture import checked_experts, n_experts_of, with_experts
from ..sizes import Sizes, gguf_sizes, hf_sizes

DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
PERIOD = 4


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "qwen35.*", "qwen35moe.*" or "qwen3next.*" keys; norms hold 1 + w, and the first two tile their value heads.

    Raises: FileError, UnsupportedError.
    """
    s = gguf_sizes(checkpoint, arch, may_have_experts=True)
    f = s.fields
    n_v_heads, n_values = f.integer(f"{arch}.ssm.time_step_rank", low=1), f.integer(f"{arch}.ssm.inner_size", low=1)
    delta = Delta(
        f.integer(f"{arch}.ssm.group_count", low=1), n_v_heads, f.integer(f"{arch}.ssm.state_size", low=1), n_values // n_v_heads,
        f.integer(f"{arch}.ssm.conv_kernel", low=2, high=16), arch != "qwen3next",
    )  # fmt: skip
    if n_v_heads % delta.n_k_heads or n_values % n_v_heads:
        raise f.error(f"{arch}.ssm.time_step_rank", f"is {n_v_heads} for {delta.n_k_heads} key heads and {n_values} values")
    layers = stack(s, Layer(replace(attention_of(s), qk_norm=True, out_gate=True), gated(s)))
    if f.integer(f"{arch}.expert_count", 0) > 0:
        experts = Experts(
            f.integer(f"{arch}.expert_count"), f.integer(f"{arch}.expert_used_count", low=1),
            f.integer(f"{arch}.expert_feed_forward_length", low=1), shared_gate=True,
        )  # fmt: skip
        shared = f.integer(f"{arch}.expert_shared_feed_forward_length", experts.width, low=1)
        layers = with_experts(layers, checked_experts(experts, f), shared, lambda i: f"blk.{i}.ffn_gate_inp.weight" not in checkpoint.tensors)
    period = f.integer(f"{arch}.full_attention_interval", PERIOD, low=1)
    kinds = [(i + 1) % period != 0 for i in range(s.n_layers)]
    return blueprint_of("qwen35", s, mixed(layers, delta, kinds))


def mixed(layers: tuple[Layer, ...], delta: Delta, kinds: list[bool]) -> tuple[Layer, ...]:
    """The layers, those that are of gated delta net without attention."""
    return tuple(
        replace(x, kind="delta", attention=NO_ATTENTION, delta=delta) if is_delta else x for x, is_delta in zip(layers, kinds, strict=True)
    )


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type qwen3_5, qwen3_5_moe or qwen3_next (or their text parts). Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    rope = config.section("rope_parameters") if "rope_parameters" in config else None
    defaults = DEFAULTS if rope is None or "partial_rotary_factor" not in rope else {"head_dim": 256}
    has_experts = config.integer("num_experts", config.integer("num_local_experts", 0)) > 0
    dense_width = {"intermediate_size": config.get("moe_intermediate_size", 1)} if has_experts else {}
    s = hf_sizes(checkpoint, config.with_defaults({**defaults, **dense_width}))
    delta = delta_of(config)
    attention = replace(attention_of(s), qk_norm=True, out_gate=True, qkv_bias=config.flag("attention_bias", False))
    layers = stack(s, Layer(attention, gated(s)))
    if has_experts:
        layers = with_shared_experts(layers, config)
    return blueprint_of("qwen35", s, mixed(layers, delta, delta_layers(config, s)), norm_offset=1.0)


def delta_of(config: Fields) -> Delta:
    """The gated delta net of such a config. Raises: FileError."""
    n = config.integer
    delta = Delta(
        n("linear_num_key_heads", 16, low=1), n("linear_num_value_heads", 32, low=1), n("linear_key_head_dim", 128, low=1),
        n("linear_value_head_dim", 128, low=1), n("linear_conv_kernel_dim", 4, low=2, high=16),
    )  # fmt: skip
    if delta.n_v_heads % delta.n_k_heads:
        raise config.error("linear_num_value_heads", f"is {delta.n_v_heads}, expected a multiple of {delta.n_k_heads}")
    return delta


def delta_layers(config: Fields, s: Sizes) -> list[bool]:
    """Which layers are of gated delta net."""
    if "layer_types" not in config:
        period = config.integer("full_attention_interval", PERIOD, low=1)
        return [(i + 1) % period != 0 for i in range(s.n_layers)]
    kinds = config["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != s.n_layers:
        raise config.error("layer_types", f"has the wrong length, expected {s.n_layers}")
    odd = [k for k in kinds if k not in ("linear_attention", "full_attention", "indexed_attention")]
    if odd:
        raise config.error("layer_types", f"names {odd[0]!r:.40}, expected linear_attention or full_attention")
    return [k == "linear_attention" for k in kinds]


def with_shared_experts(layers: tuple[Layer, ...], config: Fields) -> tuple[Layer, ...]:
    """The layers with experts and a shared expert that has a gate of its own, where the config wants them. Raises: FileError."""
    n = config.integer
    experts = Experts(
        n_experts_of(config, 512), n("num_experts_per_tok", 8, low=1), n("moe_intermediate_size", low=1),
        is_normalised=config.flag("norm_topk_prob", True), shared_gate=True,
    )  # fmt: skip
    step, only = n("decoder_sparse_step", 1, low=1), config.get("mlp_only_layers") or []
    shared = n("shared_expert_intermediate_size", 512, low=1)
    return with_experts(layers, checked_experts(experts, config), shared, lambda i: i in only or (i + 1) % step != 0)
