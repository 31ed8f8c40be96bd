"""glm4-moe: GLM 4.5 to 4.7. Sigmoid routing with groups and a bias on the choice, a shared expert, dense first layers.

Source: https://github.com/huggingface/transformers, models/glm4_moe; GGUF: blueprint/mixture.py.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Experts, Layer
from ..layers import attention_of, blueprint_of, gated, stack
from ..mixture import checked_experts, with_experts
from ..sizes import hf_sizes


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type glm4_moe. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    s = hf_sizes(
        checkpoint, config.with_defaults({"partial_rotary_factor": 0.5}) if "rope_parameters" not in config else config
    )
    width = config.integer("moe_intermediate_size", low=1)
    experts = Experts(
        config.integer("n_routed_experts", low=1), config.integer("num_experts_per_tok", low=1), width, "sigmoid",
        config.flag("norm_topk_prob", True), config.number("routed_scaling_factor", 1.0),
        config.integer("n_group", 1, low=1), config.integer("topk_group", 1, low=1), choice_bias=True,
    )  # fmt: skip
    attention = replace(
        attention_of(s), qk_norm=config.flag("use_qk_norm", False), qkv_bias=config.flag("attention_bias", False)
    )
    first = config.integer("first_k_dense_replace", 1)
    shared = width * config.integer("n_shared_experts", 1)
    return blueprint_of(
        "glm4",
        s,
        with_experts(
            stack(s, Layer(attention, gated(s))), checked_experts(experts, config), shared, lambda i: i < first
        ),
    )
