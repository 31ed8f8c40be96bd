"""qwen-moe: Qwen 1.5, 2 and 3 with experts; the older ones with a gated shared expert.

Source: https://github.com/huggingface/transformers, models/qwen2_moe, models/qwen3_moe; GGUF: blueprint/mixture.py.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Experts, Layer
from ..layers import attention_of, blueprint_of, gated, stack
from ..mixture import checked_experts, n_experts_of, with_experts
from ..sizes import hf_sizes


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type qwen2_moe or qwen3_moe. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    is_three = config.text("model_type", "qwen3_moe") == "qwen3_moe"
    s = hf_sizes(checkpoint, config.with_defaults({"head_dim": 128}) if is_three else config)
    experts = Experts(
        n_experts_of(config, 128 if is_three else 60),
        config.integer("num_experts_per_tok", 8 if is_three else 4, low=1),
        config.integer("moe_intermediate_size", low=1),
        is_normalised=config.flag("norm_topk_prob", False),
        shared_gate=not is_three,
    )
    if config.flag("use_sliding_window", False):
        raise UnsupportedError(
            f"{config.where}: sliding windows of {config['model_type']} are not supported", what="qwen moe window"
        )
    attention = replace(
        attention_of(s),
        qk_norm=is_three,
        qkv_bias=config.flag("attention_bias" if is_three else "qkv_bias", not is_three),
    )
    step, only = config.integer("decoder_sparse_step", 1, low=1), config.get("mlp_only_layers") or []
    shared = 0 if is_three else config.integer("shared_expert_intermediate_size", low=1)
    layers = with_experts(
        stack(s, Layer(attention, gated(s))),
        checked_experts(experts, config),
        shared,
        lambda i: i in only or (i + 1) % step != 0,
    )
    return blueprint_of("qwen3" if is_three else "qwen2", s, layers)
