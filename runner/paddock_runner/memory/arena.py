"""The activation arena: which buffers a forward pass needs, where they lie, and how large the pack's own scratch may be.

Buffers that are never alive together share addresses: attention's and the feed-forward's, and the head's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..blueprint.blueprint import Blueprint, Layer
from .state import aligned, has_half_keys


@dataclass(frozen=True, slots=True)
class Buffer:
    """One activation buffer: byte offset in the arena, columns, whether its rows are sampled rows (S) or tokens (T), its elements (none of three: activations)."""

    offset: int
    cols: int
    is_sampled: bool
    is_f32: bool
    is_i32: bool = False
    is_f16: bool = False


@dataclass(frozen=True, slots=True)
class Arena:
    """All buffers of a forward pass and their total size in bytes."""

    buffers: dict[str, Buffer]
    n_bytes: int


def arena(blueprint: Blueprint, max_step_tokens: int, max_step_rows: int, activation_bytes: int, kv_format: str) -> Arena:
    """Buffers for steps of at most max_step_tokens tokens and max_step_rows sampled rows."""
    m, wide = blueprint.model_width, blueprint.n_streams * blueprint.model_width
    qkv = max(1, *(layer.attention.qkv_width for layer in blueprint.layers))
    out = max(_out_width(layer) for layer in blueprint.layers)
    ff = max(1, *(layer.feed_forward.width for layer in blueprint.layers))
    buffers: dict[str, Buffer] = {}

    def place(name: str, at: int, cols: int, is_sampled: bool = False, is_f32: bool = False, is_i32: bool = False, is_f16: bool = False) -> int:
        buffers[name] = Buffer(at, cols, is_sampled, is_f32, is_i32, is_f16)
        rows = max_step_rows if is_sampled else max_step_tokens
        return aligned(at + rows * cols * (4 if is_f32 or is_i32 else activation_bytes))

    at = place("residual", 0, wide, is_f32=True)
    at = place("normed", at, m)
    if experts := [x.experts.n_used for x in blueprint.layers if x.experts is not None]:
        at = place("expected_ids", at, max(experts), is_i32=True)  # read beside what follows
    if blueprint.input_width:
        at = place("layer_inputs", at, blueprint.n_layers * blueprint.input_width)
    shared = place("branch", at, m)
    if blueprint.n_streams > 1:
        shared = place("stream_weights", shared, blueprint.n_streams)
    is_exact = activation_bytes == 2 and has_half_keys(blueprint, kv_format)
    end = place("qkv", shared, qkv, is_f32=is_exact)
    if is_exact:
        end = place("queries", end, max(layer.attention.n_heads * layer.attention.head_width for layer in blueprint.all_layers), is_f16=True)
    ends = [_place_mixers(blueprint, place, place("attention_out", end, out))]
    ends.append(_place_experts(blueprint, place, place("feed_forward", shared, ff)))
    ends.append(_place_inputs(blueprint, place, shared))
    ends.append(_place_streams(blueprint, place, shared))
    if blueprint.draft is not None:
        ends.append(place("draft_pair", shared, 2 * m))
    at = place("last", shared, wide, is_sampled=True, is_f32=True)
    if blueprint.n_streams > 1:
        for name, cols in (("last_streams", wide), ("last_gates", wide), ("last_low", blueprint.stream_rank)):
            at = place(name, at, cols, is_sampled=True)
    if blueprint.pooling is not None:
        at = place("pooled", at, m, is_sampled=True)
        wide = max((x.rows for x in blueprint.pooling.layers), default=0)
        for i in range(2 if wide else 0):
            at = place(f"dense_{i}", at, wide, is_sampled=True)
        ends.append(place("vectors", at, blueprint.vector_width, is_sampled=True, is_f32=True))
        return Arena(buffers, max(ends))
    at = place("last_normed", at, m, is_sampled=True)
    ends.append(place("logits", at, blueprint.n_vocab, is_sampled=True, is_f32=True))
    return Arena(buffers, max(ends))


def _place_mixers(blueprint: Blueprint, place: Callable[..., int], at: int) -> int:
    """The parts of latent attention; the gate on attention's output; the inputs of a delta net, and its two numbers a head."""
    latents = [(x.attention.n_heads, x.attention.latent) for x in blueprint.layers if x.attention.latent is not None]
    if latents:
        at = place("latent_q", at, max(n * x.q_width for n, x in latents))
        at = place("latent_query", at, max(max(x.q_rank, 1) for _, x in latents))
        at = place("latent_kv", at, max(x.rank + x.rope_width for _, x in latents))
        at = place("latent_out", at, max(n * x.rank for n, x in latents))
    gates = [x.attention.gate_width for x in blueprint.layers if x.attention.out_gate]
    if gates:
        at = place("attention_gate", at, max(gates))
    convs = [x.conv for x in blueprint.layers if x.conv is not None]
    if convs:
        at = place("conv_mixed", at, max(3 * x.width for x in convs))
    mambas = [x.mamba for x in blueprint.layers if x.mamba is not None]
    if mambas:
        at = place("mamba_mixed", at, max(x.n_channels + x.n_values for x in mambas))
        at = place("mamba_steps", at, max(x.n_heads for x in mambas), is_f32=True)
    indexes = [x.attention.index for x in blueprint.layers if x.attention.index is not None]
    if indexes:
        at = place("index", at, max((x.n_heads + 1) * x.width for x in indexes))
    deltas = [x.delta for x in blueprint.layers if x.delta is not None]
    if deltas:
        at = place("delta_mixed", at, max(x.n_channels + x.n_values for x in deltas))
        at = place("delta_numbers", at, max(2 * x.n_v_heads for x in deltas), is_f32=True)
    return at


def _place_inputs(blueprint: Blueprint, place: Callable[..., int], at: int) -> int:
    """The projection of the embedding for every layer's input, and a layer's small branch."""
    width = blueprint.input_width
    if not width:
        return at
    projected = place("input_projected", at, blueprint.n_layers * width)
    return max(projected, place("input_hidden", place("input_pair", at, 2 * width), width))


def _place_streams(blueprint: Blueprint, place: Callable[..., int], at: int) -> int:
    """The streams, normed, and what weighs them; a branch's output as one of them takes it; what n-grams say."""
    if blueprint.n_streams == 1:
        return at
    wide = blueprint.n_streams * blueprint.model_width
    for name, cols in (("streams", wide), ("stream_gates", wide), ("stream_low", blueprint.stream_rank), ("stream_part", blueprint.model_width)):
        at = place(name, at, cols)
    ngrams = [x.ngram for x in blueprint.layers if x.ngram is not None]
    if ngrams:
        at = place("ngram", at, max(x.embedding_width for x in ngrams))
        at = place("ngram_value", at, blueprint.model_width)
    return at


def _place_experts(blueprint: Blueprint, place: Callable[..., int], at: int) -> int:
    """The router's logits, the chosen experts and their weights, and the shared expert's gate."""
    experts = [layer.experts for layer in blueprint.layers if layer.experts is not None]
    if not experts:
        return at
    n_used = max(x.n_used for x in experts)
    at = place("router", at, max(x.n_experts for x in experts), is_f32=True)
    at = place("expert_ids", at, n_used, is_i32=True)
    at = place("expert_weights", at, n_used, is_f32=True)
    at = place("expected_weights", at, n_used, is_f32=True)
    if any(x.is_beside for x in experts):
        at = place("experts_out", at, blueprint.model_width)
    return place("shared_gate", at, 1)


def pack_scratch_bytes(
    blueprint: Blueprint, max_step_tokens: int, max_step_rows: int, n_processors: int, max_ctx_tokens: int = 0, is_host: bool = True
) -> int:
    """What a pack's kernels may use beside the arena: converted activations, split-KV partials, sampling. The loader refuses a pack that asks for more."""
    widest = max(blueprint.model_width, *(max(x.feed_forward.width, _mixer_width(x)) for x in blueprint.layers))
    heads = max(x.attention.n_heads * x.attention.values_width for x in blueprint.layers)
    converted = max(4 * max_step_tokens, 5 * min(max_step_tokens + 16, 528)) * widest
    partials = 4 * (heads + 2 * blueprint.model_width) * (max_step_rows + n_processors) * 16
    sampling = (20 * blueprint.n_vocab + 32 * max_ctx_tokens + 4096) * min(n_processors, max_step_rows)
    experts = max(0, *(_expert_scratch(blueprint, x, max_step_tokens) for x in blueprint.layers), 0)
    experts += max(0, *(_index_scratch(x, max_ctx_tokens, n_processors, 0 if is_host else max_step_rows) for x in blueprint.layers), 0)
    return aligned(experts) + aligned(converted) + aligned(partials) + aligned(sampling) + n_processors * _attention_scratch(blueprint)


def _attention_scratch(blueprint: Blueprint) -> int:
    """Of one thread: a block of queries with their sums, and a block of keys and values. A mebibyte is enough for heads of up to 256."""
    most = 1 << 20
    for a in (x.attention for x in blueprint.layers):
        width = -(-a.head_width // 64) * 64 + -(-a.values_width // 64) * 64
        queries = max(256, a.n_heads // max(a.n_kv_heads, 1) + 31)
        most = max(most, 4 * (queries * (width + 132) + 128 * (width + 128)) + 8192)
    return most


def _expert_scratch(blueprint: Blueprint, layer: Layer, max_step_tokens: int) -> int:
    """Rows gathered for one expert, its hidden rows and its results, and the sorted choices; or the rows and hidden rows of all pairs."""
    x = layer.experts
    if x is None:
        return 0
    row = 4 * (3 * max(blueprint.model_width, x.width) + 2 * x.width + 2 * x.n_used + 64)
    pairs = (max_step_tokens * x.n_used + 4 * x.n_experts + 128) * 2 * (max(blueprint.model_width, 256) + x.width + 256)
    return max(max_step_tokens * row, pairs) + 8 * x.n_experts + 4096


def _index_scratch(layer: Layer, max_ctx_tokens: int, n_processors: int, n_rows: int) -> int:
    """On the host (n_rows 0) keys of all blocks of a row, and what a thread notes of blocks and tokens; on a GPU keys of all rows, and scores of the
    four tokens that a multiprocessor has in hand."""
    x = layer.attention.index
    if x is not None and n_rows:
        return 4 * (max_ctx_tokens // x.block_tokens + 1) * (x.width * n_rows + 4 * n_processors)
    return 4 * (max_ctx_tokens // x.block_tokens + 2) * x.width + 16 * n_processors * (max_ctx_tokens + 64) if x is not None else 0


def _out_width(layer: Layer) -> int:
    a = layer.attention
    if layer.conv is not None:
        return layer.conv.width
    if layer.mamba is not None:
        return layer.mamba.n_values
    return layer.delta.n_values if layer.delta is not None else a.out_width


def _mixer_width(layer: Layer) -> int:
    if layer.conv is not None:
        return 3 * layer.conv.width
    if layer.mamba is not None:
        return layer.mamba.n_channels + layer.mamba.n_values
    return layer.delta.n_channels + layer.delta.n_values if layer.delta is not None else layer.attention.qkv_width
