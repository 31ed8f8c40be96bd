"""mixtral: Mixtral. The llama graph with experts; its GGUF files call themselves llama.

Source: https://github.com/huggingface/transformers, models/mixtral; GGUF: blueprint/mixture.py.
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
    """From config.json with model_type mixtral. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    s = hf_sizes(checkpoint, config)
    experts = Experts(
        config.integer("num_local_experts", 8, low=1), config.integer("num_experts_per_tok", 2, low=1), s.ff_widths[0]
    )
    layers = stack(s, Layer(replace(attention_of(s), window=config.integer("sliding_window", 0)), gated(s)))
    return blueprint_of("mixtral", s, with_experts(layers, checked_experts(experts, config), 0, lambda i: False))
