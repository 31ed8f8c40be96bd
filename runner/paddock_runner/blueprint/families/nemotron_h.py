"""nemotron-h: NVIDIA Nemotron-H and Nemotron 3: blocks of one part each: Mamba 2, attention without positions, a feed-forward, or experts.

Feed-forwards and experts have no gate; their activation is the square of a rectifier.
Source: https://github.com/huggingface/transformers, models/nemotron_h/modeling_nemotron_h.py.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import FileError, UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import NO_ATTENTION, Blueprint, Experts, FeedForward, Layer, Mamba
from ..layers import attention_of, blueprint_of
from ..mamba import gguf_mamba
from ..mixture import checked_experts, gguf_experts
from ..sizes import Sizes, gguf_sizes, hf_sizes

PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of hybrid_override_pattern."""
KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention", "mlp": "mlp", "moe": "moe"}
NOTHING = FeedForward(0)
LEAST_STEP = 0.001
"""Least time step of configs that name none, and of GGUF files, which do not say. Source: transformers, configuration_nemotron_h.py."""


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "nemotron_h.*" or "nemotron_h_moe.*" keys; a block is what its tensors are. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch, may_have_experts=True, is_mixed=True)
    if any("ffn_latent" in name for name in checkpoint.tensors):
        raise UnsupportedError(f"{checkpoint.path}: experts in a latent space are not supported", what="moe_latent_size")
    layers = []
    for i in range(s.n_layers):
        layer = _gguf_layer(checkpoint, s, i)
        if layer is None:
            raise FileError(f"{checkpoint.path}: block {i} has no tensors of Mamba, attention, experts or a feed-forward", path=str(checkpoint.path), field=f"blk.{i}")
        layers.append(layer)
    return blueprint_of("nemotron-h", s, tuple(layers))


def _gguf_layer(checkpoint: Checkpoint, s: Sizes, i: int) -> Layer | None:
    def has(name: str) -> bool:
        return f"blk.{i}.{name}" in checkpoint.tensors

    f, arch = s.fields, s.arch
    if has("ssm_in.weight"):
        return Layer(NO_ATTENTION, NOTHING, "mamba", mamba=gguf_mamba(f, arch, has("ssm_conv1d.bias"), least_step=LEAST_STEP))
    if has("attn_q.weight"):
        return Layer(replace(attention_of(s), n_kv_heads=s.n_kv_heads[i], rope=None), NOTHING)
    if has("ffn_gate_inp.weight"):
        experts = replace(gguf_experts(checkpoint, s), activation="relu2", is_gated=False)
        shared = FeedForward(f.integer(f"{arch}.expert_shared_feed_forward_length", 0), "relu2", is_gated=False)
        return Layer(NO_ATTENTION, shared, "none", experts=experts)
    return Layer(NO_ATTENTION, FeedForward(s.ff_widths[i], "relu2", is_gated=False), "none") if has("ffn_up.weight") else None


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type nemotron_h. Raises: FileError, UnsupportedError."""
    config.choice("mlp_hidden_act", "relu2", ("relu2",))
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        if config.flag(key, False):
            raise UnsupportedError(f"{config.where}: {key} is not supported in nemotron_h", what=key)
    if config.integer("moe_latent_size", 0):
        raise UnsupportedError(f"{config.where}: experts in a latent space (moe_latent_size) are not supported", what="moe_latent_size")
    kinds = _kinds(config)
    values = {**config, "num_hidden_layers": len(kinds), "rms_norm_eps": config.number("layer_norm_epsilon", 1e-5), "num_nextn_predict_layers": 0}
    s = hf_sizes(checkpoint, Fields(values, config.where, "field"))
    attention = replace(attention_of(s), rope=None)
    mamba = _mamba(config)
    alone = {
        "mamba": lambda: Layer(NO_ATTENTION, NOTHING, "mamba", mamba=mamba),
        "attention": lambda: Layer(attention, NOTHING),
        "mlp": lambda: Layer(NO_ATTENTION, FeedForward(s.ff_widths[0], "relu2", is_gated=False), "none"),
        "moe": lambda: Layer(NO_ATTENTION, _shared(config), "none", experts=_experts(config)),
    }
    return blueprint_of("nemotron-h", s, tuple(alone[k]() for k in kinds))


def _kinds(config: Fields) -> list[str]:
    """What each block is. Raises: FileError."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern and all(c in PATTERN for c in pattern):
        return [PATTERN[c] for c in pattern]
    named = config.get("layers_block_type") or config.get("layer_types")
    if not isinstance(named, list) or not named or any(k not in KINDS for k in named):
        raise config.error("layers_block_type", f"is no list of {', '.join(KINDS)}")
    return [KINDS[k] for k in named]


def _mamba(config: Fields) -> Mamba:
    n_groups = config.integer("n_groups", 8, low=1)
    return Mamba(
        config.integer("mamba_num_heads", 128, low=1), config.integer("mamba_head_dim", 64, low=1), n_groups, config.integer("ssm_state_size", 128, low=1),
        config.integer("conv_kernel", 4, low=2, high=16), n_groups, config.flag("use_conv_bias", True), step=(config.number("time_step_min", LEAST_STEP), float("inf")),
    )  # fmt: skip


def _shared(config: Fields) -> FeedForward:
    return FeedForward(config.integer("moe_shared_expert_intermediate_size", low=0, high=1 << 24), "relu2", is_gated=False)


def _experts(config: Fields) -> Experts:
    experts = Experts(
        config.integer("n_routed_experts", low=1), config.integer("num_experts_per_tok", low=1), config.integer("moe_intermediate_size", low=1, high=1 << 24),
        "sigmoid", config.flag("norm_topk_prob", True), config.number("routed_scaling_factor", 1.0), config.integer("n_group", 1, low=1),
        config.integer("topk_group", 1, low=1), choice_bias=True, activation="relu2", is_gated=False,
    )  # fmt: skip
    return checked_experts(experts, config)
