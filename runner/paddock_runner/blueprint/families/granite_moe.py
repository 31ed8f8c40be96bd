"""granite-moe: Granite 3 with experts: granite's multipliers, softmax over the chosen experts.

Source: https://github.com/huggingface/transformers, models/granitemoe; GGUF: blueprint/mixture.py.
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
    """From config.json with model_type granitemoe or granitemoeshared. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    s, n = hf_sizes(checkpoint, config), config.number
    experts = Experts(
        config.integer("num_local_experts", 8, low=1),
        config.integer("num_experts_per_tok", 2, low=1),
        s.ff_widths[0],
        "chosen",
    )
    bias = config.flag("attention_bias", False)
    attention = replace(attention_of(s), scale=n("attention_multiplier", 1.0), qkv_bias=bias, out_bias=bias)
    shared = config.integer("shared_intermediate_size", 0)
    layers = with_experts(
        stack(s, Layer(attention, gated(s))), checked_experts(experts, config), shared, lambda i: False
    )
    divisor = n("logits_scaling", 1.0)
    if divisor == 0:
        raise config.error("logits_scaling", "is 0, expected another number")
    return blueprint_of(
        "granite",
        s,
        layers,
        embed_scale=n("embedding_multiplier", 1.0),
        residual_scale=n("residual_multiplier", 1.0),
        logit_scale=1 / divisor,
    )
