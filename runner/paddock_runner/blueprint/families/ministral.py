"""ministral: Ministral (windows on some layers), and the text part of Mistral 3 and Ministral 3 (yarn).

Source: https://github.com/huggingface/transformers, models/ministral and models/ministral3; GGUF keys as in llama.cpp, models/mistral3.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Layer
from ..layers import attention_of, blueprint_of, gated, local_layers, stack, with_windows
from ..sizes import gguf_sizes, hf_sizes


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "mistral3.*" keys; cos and sin are not enlarged there. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch)
    s = replace(s, scaling=replace(s.scaling, magnitude=1.0))
    blueprint = blueprint_of("ministral", s, stack(s, Layer(attention_of(s, "interleaved"), gated(s))))
    beta = s.fields.number(f"{arch}.attention.temperature_scale", 0.0)
    return _within(
        blueprint, beta, s.fields.integer(f"{arch}.rope.scaling.original_context_length", s.max_ctx_tokens, low=1)
    )


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type ministral or ministral3. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    s = hf_sizes(checkpoint, config)
    layers = stack(s, Layer(attention_of(s), gated(s)))
    window = config.integer("sliding_window", 0)
    blueprint = blueprint_of(
        "ministral", s, with_windows(layers, local_layers(config, s.n_layers, [bool(window)] * s.n_layers), window)
    )
    if "rope_parameters" not in config:
        return blueprint
    rope = config.section("rope_parameters")
    original = rope.integer("original_max_position_embeddings", s.max_ctx_tokens, low=1)
    return _within(blueprint, rope.number("llama_4_scaling_beta", 0.0), original)


def _within(blueprint: Blueprint, beta: float, original: int) -> Blueprint:
    """Queries of positions past the original context are scaled by 1 + beta log(1 + floor(p / original)), which no op does:
    the context ends where that factor is still 1."""
    if not beta or original >= blueprint.max_ctx_tokens:
        return blueprint
    note = f"the context is limited to {original} tokens: queries of later positions need a scale that is not supported"
    return replace(blueprint, max_ctx_tokens=original, notes=(*blueprint.notes, note))
