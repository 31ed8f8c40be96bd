"""kolibri: Aleph Alpha's Kolibri 1. Four norms a layer, windows with rope between full layers without, many small experts chosen by biased logits.

Source: https://github.com/huggingface/transformers, models/kolibri1.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Experts, Layer
from ..layers import attention_of, blueprint_of, gated, local_layers, stack
from ..mixture import checked_experts, n_experts_of, with_experts
from ..sizes import hf_sizes

DEFAULTS = {
    "vocab_size": 128000, "hidden_size": 2560, "num_hidden_layers": 50, "num_attention_heads": 48, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 262144, "shared_expert_intermediate_size": 512,
}  # fmt: skip
"""Fields that published configs leave out. Source: transformers, configuration_kolibri1.py."""
PERIOD = 5


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type kolibri1. Raises: FileError, UnsupportedError."""
    config = config.with_defaults(DEFAULTS)
    config.choice("hidden_act", "silu", ("silu",))
    shared = config.integer("shared_expert_intermediate_size", low=1)
    s = hf_sizes(checkpoint, config.with_defaults({"intermediate_size": shared}))
    n = config.integer
    experts = Experts(
        n_experts_of(config, 384), n("num_experts_per_tok", 6, low=1), n("moe_intermediate_size", 512, low=1), "sigmoid",
        config.flag("norm_topk_prob", False), choice_bias=True, choice_by_logit=True,
    )  # fmt: skip
    has_windows = config.get("sliding_window", 513) is not None
    is_local = local_layers(config, s.n_layers, [has_windows and (i + 1) % PERIOD != 0 for i in range(s.n_layers)])
    window = n("sliding_window", 513, low=1) if has_windows else 0
    layers = stack(s, Layer(replace(attention_of(s), qk_norm=True), gated(s), post_norms=True))
    layers = with_experts(layers, checked_experts(experts, config), shared, lambda i: False)
    return blueprint_of(
        "kolibri",
        s,
        tuple(
            replace(x, attention=replace(x.attention, window=window if local else 0, rope=x.attention.rope if local or not has_windows else None))
            for x, local in zip(layers, is_local, strict=True)
        ),
    )
