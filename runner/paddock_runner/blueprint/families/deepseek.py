"""deepseek: DeepSeek V2 and V3, and what shares their graph: latent attention, many small experts beside a shared one, dense first layers.

Source: https://github.com/huggingface/transformers, models/deepseek_v2 and models/deepseek_v3.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...errors import UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Attention, Blueprint, Experts, Latent, Layer
from ..layers import blueprint_of, gated, stack
from ..mixture import checked_experts, gguf_experts, with_experts
from ..rope import yarn_magnitude
from ..sizes import Sizes, gguf_sizes, hf_sizes

GROUP_BEST = {"greedy": 2, "group_limited_greedy": 1, "noaux_tc": 2}
"""topk_method -> how many of a group's scores make the group's."""


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "deepseek2.*" keys. Files that store whole keys and values (made before latent attention was known there) have no key for
    the widths of a head. cos and sin are not stretched: all published models have mscale equal to mscale_all_dim.

    Raises: FileError, UnsupportedError.
    """
    f = checkpoint.fields
    rank, q_rank = f.integer(f"{arch}.attention.kv_lora_rank", low=1, high=1 << 16), f.integer(f"{arch}.attention.q_lora_rank", 0, high=1 << 20)
    rope_width = f.integer(f"{arch}.rope.dimension_count", low=2, high=1024)
    keys = [f"{arch}.attention.{name}_length" + ("_mla" if f"{arch}.attention.key_length_mla" in f else "") for name in ("key", "value")]
    q_width, v_width = f.integer(keys[0], low=rope_width + 1, high=4096), f.integer(keys[1], low=1, high=4096)
    s = gguf_sizes(checkpoint, arch, may_have_experts=True)
    latent = Latent(rank, rope_width, q_width - rope_width, v_width, q_rank)
    stretched = 1.0 + f.number(f"{arch}.rope.scaling.yarn_log_multiplier", 0.0) * math.log(max(f.number(f"{arch}.rope.scaling.factor", 1.0), 1.0))
    rope = replace(s.rope("interleaved"), width=rope_width, magnitude=1.0)
    attention = Attention(s.n_heads, 1, rank + rope_width, float(q_width) ** -0.5 * stretched**2, rope, rank, latent=latent)
    layers = tuple(replace(x, attention=attention) for x in stack(s, Layer(attention, gated(s))))
    if f.integer(f"{arch}.expert_count", 0):
        experts = gguf_experts(checkpoint, s)
        experts = replace(experts, n_group_best=2 if experts.score == "sigmoid" else 1)
        first, n_shared = f.integer(f"{arch}.leading_dense_block_count", 0), f.integer(f"{arch}.expert_shared_count", 0)
        layers = with_experts(layers, experts, experts.width * n_shared, lambda i: i < first)
    return blueprint_of("deepseek", s, layers)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type deepseek_v2 or deepseek_v3. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    for key in ("attention_bias", "mlp_bias"):
        if config.flag(key, False):
            raise UnsupportedError(f"{config.where}: {key} is not supported in deepseek", what=key)
    is_new = config.text("model_type", "") == "deepseek_v3"
    rope_width = config.integer("qk_rope_head_dim", 64, low=2, high=1024)
    s = hf_sizes(checkpoint, Fields({**config, "head_dim": rope_width, "num_key_value_heads": 1}, config.where, "field"))
    layers = stack(s, Layer(_attention(s, config, rope_width, is_new), gated(s)))
    if "n_routed_experts" in config:
        layers = _with_experts(layers, config, is_new)
    return blueprint_of("deepseek", s, layers)


def _attention(s: Sizes, config: Fields, rope_width: int, is_new: bool) -> Attention:
    q_rank = config.integer("q_lora_rank", 0 if "q_lora_rank" in config or config.get("q_lora_rank", 1) is None else 1536, high=1 << 20)
    nope, v = config.integer("qk_nope_head_dim", 128, low=1, high=4096), config.integer("v_head_dim", 128, low=1, high=4096)
    latent = Latent(config.integer("kv_lora_rank", 512, low=1, high=1 << 16), rope_width, nope, v, q_rank)
    rope = s.rope("interleaved" if config.flag("rope_interleave", True) or not is_new else "neox")
    scale = float(latent.q_width) ** -0.5
    for key in ("rope_parameters", "rope_scaling"):
        if key in config:
            scaling = config.section(key)
            if scaling.number("mscale_all_dim", 0.0):
                scale *= yarn_magnitude(scaling.number("factor", 1.0), scaling.number("mscale_all_dim")) ** 2
            break
    return Attention(s.n_heads, 1, latent.rank + rope_width, scale, rope, latent.rank, latent=latent)


def _with_experts(layers: tuple[Layer, ...], config: Fields, is_new: bool) -> tuple[Layer, ...]:
    width = config.integer("moe_intermediate_size", low=1)
    method = config.choice("topk_method", "noaux_tc" if is_new else "greedy", tuple(GROUP_BEST))
    score = config.choice("scoring_func", "sigmoid" if is_new else "softmax", ("sigmoid", "softmax"))
    has_groups = method != "greedy"
    experts = Experts(
        config.integer("n_routed_experts", low=1), config.integer("num_experts_per_tok", low=1), width, score,
        config.flag("norm_topk_prob", is_new) and is_new, config.number("routed_scaling_factor", 2.5 if is_new else 1.0),
        config.integer("n_group", 1, low=1) if has_groups else 1, config.integer("topk_group", 1, low=1) if has_groups else 1,
        n_group_best=GROUP_BEST[method], choice_bias=method == "noaux_tc",
    )  # fmt: skip
    if config.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedError(f"{config.where}: moe_layer_freq other than 1 is not supported", what="moe_layer_freq")
    first = config.integer("first_k_dense_replace", 3 if is_new else 0)
    return with_experts(layers, checked_experts(experts, config), width * config.integer("n_shared_experts", 1 if is_new else 2), lambda i: i < first)

