"""moe: families that are a known dense graph with experts: Mixtral, Qwen 2 and 3 MoE, OLMoE, Granite MoE, GLM 4.5 MoE.

Source: https://github.com/huggingface/transformers, models/{mixtral,qwen2_moe,qwen3_moe,olmoe,granitemoe,glm4_moe}; GGUF as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...errors import UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Attention, Blueprint, Experts, FeedForward, Layer
from ..layers import attention_of, blueprint_of, gated, stack
from ..sizes import Sizes, gguf_sizes, hf_sizes

SCORES = {1: "softmax", 2: "sigmoid", 3: "chosen"}
"""GGUF expert_gating_func. Source: llama.cpp, llama_expert_gating_func_type."""


def _with_experts(layers: tuple[Layer, ...], experts: Experts, shared_width: int, dense: Callable[[int], bool]) -> tuple[Layer, ...]:
    """The layers; those for which dense(i) is false with experts, and a shared expert of that width (0: none)."""
    shared = FeedForward(shared_width, layers[0].feed_forward.activation)
    return tuple(x if dense(i) else replace(x, feed_forward=shared, experts=experts) for i, x in enumerate(layers))


def _checked(experts: Experts, fields: Fields) -> Experts:
    """Raises: FileError for numbers that cannot be."""
    if not 1 <= experts.n_used <= experts.n_experts <= 4096:
        raise fields.error("num_experts_per_tok", f"is {experts.n_used} of {experts.n_experts} experts, expected 1 to all of at most 4096")
    if experts.n_groups < 1 or experts.n_experts % experts.n_groups or not 1 <= experts.n_groups_used <= experts.n_groups:
        raise fields.error("n_group", f"is {experts.n_groups} (of which {experts.n_groups_used} are used) for {experts.n_experts} experts")
    return experts


# ---- GGUF ----

GGUF_NORMALISED = {"llama": True, "qwen3moe": True, "qwen2moe": False, "olmoe": False, "granitemoe": True}


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From the keys of any architecture of this file. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch, may_have_experts=True)
    f = s.fields
    n_experts = f.integer(f"{arch}.expert_count", low=1)
    width = f.integer(f"{arch}.expert_feed_forward_length", s.ff_widths[0], low=1)
    score = SCORES.get(f.integer(f"{arch}.expert_gating_func", 1), "")
    if not score:
        raise f.error(f"{arch}.expert_gating_func", f"is {f[f'{arch}.expert_gating_func']}, expected 1, 2 or 3")
    experts = Experts(
        n_experts, f.integer(f"{arch}.expert_used_count", low=1), width, score,
        f.flag(f"{arch}.expert_weights_norm", GGUF_NORMALISED.get(arch, False)),
        f.number(f"{arch}.expert_weights_scale", 1.0) or 1.0,
        f.integer(f"{arch}.expert_group_count", 1) or 1, f.integer(f"{arch}.expert_group_used_count", 1) or 1,
        choice_bias=any(name.endswith("exp_probs_b.bias") for name in checkpoint.tensors),
        shared_gate="blk.0.ffn_gate_inp_shexp.weight" in checkpoint.tensors,
    )  # fmt: skip
    n_shared = f.integer(f"{arch}.expert_shared_count", 0)
    shared = f.integer(f"{arch}.expert_shared_feed_forward_length", width * n_shared if arch == "glm4moe" else 0)
    first = f.integer(f"{arch}.leading_dense_block_count", 0)
    attention = _gguf_attention(checkpoint, s, arch)
    layers = _with_experts(stack(s, Layer(attention, gated(s))), _checked(experts, f), shared, lambda i: i < first)
    if arch != "granitemoe":
        return blueprint_of(FAMILY_OF.get(arch, arch), s, layers)
    n = f.number
    layers = tuple(replace(x, attention=replace(x.attention, scale=n(f"{arch}.attention.scale", attention.scale))) for x in layers)
    return blueprint_of(
        "granite", s, layers, embed_scale=n(f"{arch}.embedding_scale", 1.0), residual_scale=n(f"{arch}.residual_scale", 1.0),
        logit_scale=1 / (n(f"{arch}.logit_scale", 1.0) or 1.0),
    )  # fmt: skip


FAMILY_OF = {"llama": "mixtral", "qwen2moe": "qwen2", "qwen3moe": "qwen3", "glm4moe": "glm4"}


def _gguf_attention(checkpoint: Checkpoint, s: Sizes, arch: str) -> Attention:
    attention = attention_of(s, "interleaved" if arch in ("llama", "granitemoe") else "neox")
    has = checkpoint.tensors.__contains__
    return replace(
        attention,
        qkv_bias=has("blk.0.attn_q.bias"),
        qk_norm=arch != "olmoe" and has("blk.0.attn_q_norm.weight"),
        qk_norm_all=arch == "olmoe",
    )


# ---- Hugging Face ----


def _n_experts(config: Fields, default: int) -> int:
    """Old and new spelling."""
    return config.integer("num_local_experts" if "num_local_experts" in config else "num_experts", default, low=1)


def mixtral(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type mixtral. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    s = hf_sizes(checkpoint, config)
    experts = Experts(config.integer("num_local_experts", 8, low=1), config.integer("num_experts_per_tok", 2, low=1), s.ff_widths[0])
    layers = stack(s, Layer(replace(attention_of(s), window=config.integer("sliding_window", 0)), gated(s)))
    return blueprint_of("mixtral", s, _with_experts(layers, _checked(experts, config), 0, lambda i: False))


def qwen(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type qwen2_moe or qwen3_moe. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    is_three = config.text("model_type", "qwen3_moe") == "qwen3_moe"
    s = hf_sizes(checkpoint, config.with_defaults({"head_dim": 128}) if is_three else config)
    experts = Experts(
        _n_experts(config, 128 if is_three else 60),
        config.integer("num_experts_per_tok", 8 if is_three else 4, low=1),
        config.integer("moe_intermediate_size", low=1),
        is_normalised=config.flag("norm_topk_prob", False),
        shared_gate=not is_three,
    )
    if config.flag("use_sliding_window", False):
        raise UnsupportedError(f"{config.where}: sliding windows of {config['model_type']} are not supported", what="qwen moe window")
    attention = replace(attention_of(s), qk_norm=is_three, qkv_bias=config.flag("attention_bias" if is_three else "qkv_bias", not is_three))
    step, only = config.integer("decoder_sparse_step", 1, low=1), config.get("mlp_only_layers") or []
    shared = 0 if is_three else config.integer("shared_expert_intermediate_size", low=1)
    layers = _with_experts(
        stack(s, Layer(attention, gated(s))), _checked(experts, config), shared, lambda i: i in only or (i + 1) % step != 0
    )
    return blueprint_of("qwen3" if is_three else "qwen2", s, layers)


def olmoe(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type olmoe. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    if config.get("clip_qkv") is not None:
        raise UnsupportedError(f"{config.where}: clip_qkv is not supported", what="clip_qkv")
    s = hf_sizes(checkpoint, config)
    experts = Experts(
        _n_experts(config, 64), config.integer("num_experts_per_tok", 8, low=1), s.ff_widths[0],
        is_normalised=config.flag("norm_topk_prob", False),
    )  # fmt: skip
    bias = config.flag("attention_bias", False)
    attention = replace(attention_of(s), qk_norm_all=True, qkv_bias=bias, out_bias=bias)
    return blueprint_of("olmoe", s, _with_experts(stack(s, Layer(attention, gated(s))), _checked(experts, config), 0, lambda i: False))


def granite(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type granitemoe or granitemoeshared. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    s, n = hf_sizes(checkpoint, config), config.number
    experts = Experts(config.integer("num_local_experts", 8, low=1), config.integer("num_experts_per_tok", 2, low=1), s.ff_widths[0], "chosen")
    bias = config.flag("attention_bias", False)
    attention = replace(attention_of(s), scale=n("attention_multiplier", 1.0), qkv_bias=bias, out_bias=bias)
    shared = config.integer("shared_intermediate_size", 0)
    layers = _with_experts(stack(s, Layer(attention, gated(s))), _checked(experts, config), shared, lambda i: False)
    divisor = n("logits_scaling", 1.0)
    if divisor == 0:
        raise config.error("logits_scaling", "is 0, expected another number")
    return blueprint_of(
        "granite", s, layers, embed_scale=n("embedding_multiplier", 1.0), residual_scale=n("residual_multiplier", 1.0), logit_scale=1 / divisor
    )


def glm4(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type glm4_moe. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    s = hf_sizes(checkpoint, config.with_defaults({"partial_rotary_factor": 0.5}) if "rope_parameters" not in config else config)
    width = config.integer("moe_intermediate_size", low=1)
    experts = Experts(
        config.integer("n_routed_experts", low=1), config.integer("num_experts_per_tok", low=1), width, "sigmoid",
        config.flag("norm_topk_prob", True), config.number("routed_scaling_factor", 1.0),
        config.integer("n_group", 1, low=1), config.integer("topk_group", 1, low=1), choice_bias=True,
    )  # fmt: skip
    attention = replace(attention_of(s), qk_norm=config.flag("use_qk_norm", False), qkv_bias=config.flag("attention_bias", False))
    first = config.integer("first_k_dense_replace", 1)
    shared = width * config.integer("n_shared_experts", 1)
    return blueprint_of("glm4", s, _with_experts(stack(s, Layer(attention, gated(s))), _checked(experts, config), shared, lambda i: i < first))
