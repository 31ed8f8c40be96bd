"""olmoe: OLMoE. Norms of q and k over all heads together, experts in every layer.

Source: https://github.com/huggingface/transformers, models/olmoe; GGUF: blueprint/mixture.py.
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
    """From config.json with model_type olmoe. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    if config.get("clip_qkv") is not None:
        raise UnsupportedError(f"{config.where}: clip_qkv is not supported", what="clip_qkv")
    s = hf_sizes(checkpoint, config)
    experts = Experts(
        n_experts_of(config, 64), config.integer("num_experts_per_tok", 8, low=1), s.ff_widths[0],
        is_normalised=config.flag("norm_topk_prob", False),
    )  # fmt: skip
    bias = config.flag("attention_bias", False)
    attention = replace(attention_of(s), qk_norm_all=True, qkv_bias=bias, out_bias=bias)
    return blueprint_of(
        "olmoe",
        s,
        with_experts(stack(s, Layer(attention, gated(s))), checked_experts(experts, config), 0, lambda i: False),
    )
