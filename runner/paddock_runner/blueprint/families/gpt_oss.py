"""gpt-oss: experts in MXFP4 with biases and a clamped activation, attention sinks, every other layer with a window, yarn.

Source: https://github.com/huggingface/transformers, models/gpt_oss/modeling_gpt_oss.py; GGUF as in llama.cpp, models/openai-moe.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Experts, FeedForward, Layer
from ..layers import attention_of, blueprint_of, gguf_local_layers, local_layers, stack, with_windows
from ..rope import yarn_factors
from ..sizes import Sizes, gguf_sizes, hf_sizes

ALPHA, LIMIT = 1.702, 7.0
WINDOW = 128


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """From "gpt-oss.*" keys. Raises: FileError, UnsupportedError."""
    s = gguf_sizes(checkpoint, arch, may_have_experts=True)
    f = s.fields
    if f.text(f"{arch}.rope.scaling.type", "none") == "yarn":  # bounds between whole dimensions, as its authors have them; GGUF does not say
        factor = f.number(f"{arch}.rope.scaling.factor")
        original = f.integer(f"{arch}.rope.scaling.original_context_length", s.max_ctx_tokens, low=1)
        factors = yarn_factors(s.theta, s.rope_width, factor, original, is_rounded=False)
        s = replace(s, scaling=replace(s.scaling, factors=factors))
    width = f.integer(f"{arch}.expert_feed_forward_length", s.ff_widths[0], low=1)
    experts = _experts(f.integer(f"{arch}.expert_count", low=1, high=4096), f.integer(f"{arch}.expert_used_count", low=1), width, LIMIT, ALPHA)
    window = f.integer(f"{arch}.attention.sliding_window", WINDOW)
    return _blueprint(s, experts, gguf_local_layers(s, _even(s)), window)


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type gpt_oss. Raises: FileError, UnsupportedError."""
    s = hf_sizes(checkpoint, config.with_defaults({"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0}))
    n_experts, n_used = config.integer("num_local_experts", low=1, high=4096), config.integer("num_experts_per_tok", 4, low=1)
    limit, alpha = config.number("swiglu_limit", LIMIT), config.number("swiglu_alpha", ALPHA)
    experts = replace(_experts(n_experts, n_used, s.ff_widths[0], limit, alpha), is_interleaved=True)
    return _blueprint(s, experts, local_layers(config, s.n_layers, _even(s)), config.integer("sliding_window", WINDOW))


def _even(s: Sizes) -> list[bool]:
    return [i % 2 == 0 for i in range(s.n_layers)]


def _experts(n_experts: int, n_used: int, width: int, limit: float, alpha: float) -> Experts:
    return Experts(
        n_experts, min(n_used, n_experts), width, "chosen", router_bias=True, bias=True, activation="swiglu_clamp", limit=limit, alpha=alpha
    )


def _blueprint(s: Sizes, experts: Experts, local: list[bool], window: int) -> Blueprint:
    attention = replace(attention_of(s), qkv_bias=True, out_bias=True, sinks=True)
    layers = with_windows(stack(s, Layer(attention, FeedForward(0), experts=experts)), local, window)
    layers = tuple(replace(x, feed_forward=FeedForward(0)) for x in layers)
    return blueprint_of("gpt-oss", s, layers)
