"""The activation arena: which buffers a forward pass needs, where they lie, and how large the pack's own scratch may be.

Buffers that are never alive together share addresses: attention's and the feed-forward's, and the head's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..blueprint.blueprint import Attention, Blueprint
from .state import aligned


@dataclass(frozen=True, slots=True)
class Buffer:
    """One activation buffer: byte offset in the arena, columns, whether its rows are sampled rows (S) or tokens (T)."""

    offset: int
    cols: int
    is_sampled: bool
    is_f32: bool


@dataclass(frozen=True, slots=True)
class Arena:
    """All buffers of a forward pass and their total size in bytes."""

    buffers: dict[str, Buffer]
    n_bytes: int


def arena(blueprint: Blueprint, max_step_tokens: int, max_step_rows: int, activation_bytes: int) -> Arena:
    """Buffers for steps of at most max_step_tokens tokens and max_step_rows sampled rows."""
    m = blueprint.model_width
    qkv = max(_qkv_width(layer.attention) for layer in blueprint.layers)
    out = max(
        layer.attention.n_heads * (layer.attention.v_width or layer.attention.head_width) for layer in blueprint.layers
    )
    ff = max(layer.feed_forward.width for layer in blueprint.layers)
    buffers: dict[str, Buffer] = {}

    def place(name: str, at: int, cols: int, is_sampled: bool = False, is_f32: bool = False) -> int:
        buffers[name] = Buffer(at, cols, is_sampled, is_f32)
        rows = max_step_rows if is_sampled else max_step_tokens
        return aligned(at + rows * cols * (4 if is_f32 else activation_bytes))

    at = place("residual", 0, m, is_f32=True)
    at = place("normed", at, m)
    shared = place("branch", at, m)
    ends = [place("attention_out", place("qkv", shared, qkv), out)]
    ends.append(place("feed_forward", shared, ff))
    at = place("last", shared, m, is_sampled=True, is_f32=True)
    at = place("last_normed", at, m, is_sampled=True)
    ends.append(place("logits", at, blueprint.n_vocab, is_sampled=True, is_f32=True))
    return Arena(buffers, max(ends))


def pack_scratch_bytes(
    blueprint: Blueprint, max_step_tokens: int, max_step_rows: int, n_processors: int, max_ctx_tokens: int = 0
) -> int:
    """What a pack's kernels may use beside the arena: converted activations, split-KV partials, sampling. The loader refuses a pack that asks for more."""
    widest = max(blueprint.model_width, *(max(x.feed_forward.width, _qkv_width(x.attention)) for x in blueprint.layers))
    heads = max(x.attention.n_heads * (x.attention.v_width or x.attention.head_width) for x in blueprint.layers)
    converted = 4 * max_step_tokens * widest
    partials = 4 * (heads + 2 * blueprint.model_width) * (max_step_rows + n_processors) * 16
    sampling = (20 * blueprint.n_vocab + 32 * max_ctx_tokens + 4096) * min(n_processors, max_step_rows)
    return aligned(converted) + aligned(partials) + aligned(sampling) + n_processors * (1 << 20)


def _qkv_width(a: Attention) -> int:
    return (a.n_heads + a.n_kv_heads) * a.head_width + a.n_kv_heads * (a.v_width or a.head_width)
