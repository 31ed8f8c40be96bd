"""What families with experts share: their layers, and their GGUF keys, which are the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..files.checkpoint import Checkpoint
from ..files.fields import Fields
from .blueprint import Attention, Blueprint, Experts, FeedForward, Layer
from .layers import attention_of, blueprint_of, gated, stack
from .sizes import Sizes, gguf_sizes

SCORES = {1: "softmax", 2: "sigmoid", 3: "chosen"}
"""GGUF expert_gating_func. Source: llama.cpp, llama_expert_gating_func_type."""


def with_experts(
    layers: tuple[Layer, ...], experts: Experts, shared_width: int, dense: Callable[[int], bool]
) -> tuple[Layer, ...]:
    """The layers; those for which dense(i) is false with experts, and a shared expert of that width (0: none)."""
    shared = FeedForward(shared_width, layers[0].feed_forward.activation)
    return tuple(x if dense(i) else replace(x, feed_forward=shared, experts=experts) for i, x in enumerate(layers))


def checked_experts(experts: Experts, fields: Fields) -> Experts:
    """Raises: FileError for numbers that cannot be."""
    if not 1 <= experts.n_used <= experts.n_experts <= 4096:
        raise fields.error(
            "num_experts_per_tok",
            f"is {experts.n_used} of {experts.n_experts} experts, expected 1 to all of at most 4096",
        )
    if (
        experts.n_groups < 1
        or experts.n_experts % experts.n_groups
        or not 1 <= experts.n_groups_used <= experts.n_groups
    ):
        raise fields.error(
            "n_group",
            f"is {experts.n_groups} (of which {experts.n_groups_used} are used) for {experts.n_experts} experts",
        )
    return experts


def n_experts_of(config: Fields, default: int) -> int:
    """Old and new spelling."""
    return config.integer("num_local_experts" if "num_local_experts" in config else "num_experts", default, low=1)


GGUF_NORMALISED = {
    "llama": True, "qwen3moe": True, "qwen2moe": False, "olmoe": False, "granitemoe": True, "granitehybrid": True, "lfm2moe": True, "laguna": True,
}  # fmt: skip
GGUF_SCORES = {"lfm2moe": 2, "laguna": 2}
"""Of files that do not say."""


def gguf_experts(checkpoint: Checkpoint, s: Sizes) -> Experts:
    """Experts from the keys "<arch>.expert_*". Raises: FileError."""
    f, arch = s.fields, s.arch
    kind = f.integer(f"{arch}.expert_gating_func", GGUF_SCORES.get(arch, 1))
    if kind not in SCORES:
        raise f.error(f"{arch}.expert_gating_func", f"is {kind}, expected 1, 2 or 3")
    experts = Experts(
        f.integer(f"{arch}.expert_count", low=1), f.integer(f"{arch}.expert_used_count", low=1),
        f.integer(f"{arch}.expert_feed_forward_length", s.ff_widths[0], low=1), SCORES[kind],
        f.flag(f"{arch}.expert_weights_norm", GGUF_NORMALISED.get(arch, False)), f.number(f"{arch}.expert_weights_scale", 1.0) or 1.0,
        f.integer(f"{arch}.expert_group_count", 1) or 1, f.integer(f"{arch}.expert_group_used_count", 1) or 1,
        choice_bias=any(name.endswith("exp_probs_b.bias") for name in checkpoint.tensors),
        shared_gate="blk.0.ffn_gate_inp_shexp.weight" in checkpoint.tensors,
    )  # fmt: skip
    return checked_experts(experts, f)


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From the keys of any architecture of this file. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch, may_have_experts=True)
    f = s.fields
    experts = gguf_experts(checkpoint, s)
    n_shared = f.integer(f"{arch}.expert_shared_count", 0)
    shared = f.integer(f"{arch}.expert_shared_feed_forward_length", experts.width * n_shared if arch == "glm4moe" else 0)
    first = f.integer(f"{arch}.leading_dense_block_count", 0)
    attention = _gguf_attention(checkpoint, s, arch)
    layers = with_experts(stack(s, Layer(attention, gated(s))), experts, shared, lambda i: i < first)
    if arch != "granitemoe":
        return blueprint_of(FAMILY_OF.get(arch, arch), s, layers)
    n = f.number
    layers = tuple(
        replace(x, attention=replace(x.attention, scale=n(f"{arch}.attention.scale", attention.scale))) for x in layers
    )
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
