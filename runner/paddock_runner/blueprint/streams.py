"""Residual streams (hyper-connections), n-gram embeddings and indexed attention: their tensors, and the numbers that choose an n-gram's rows.

Source: https://github.com/huggingface/transformers, models/qwen4_exp; streams: Zhu et al. 2024, Hyper-Connections.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ..files.view import TensorView
from .blueprint import Blueprint, Index, Ngram

PARTS = {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up", "block_inject_weight": "inject"}
HF = {f"hyper_connection_mixer.{theirs}": f"out_hyper_{ours}" for theirs, ours in PARTS.items()}
HF_LAYER = {
    **{f"{branch}_hyper_connection.{theirs}": f"{name}_hyper_{ours}" for branch, name in (("attn", "attn"), ("mlp", "ffn")) for theirs, ours in PARTS.items()},
    "ple.key_proj": "ngram_key", "ple.value_proj": "ngram_value", "ple.norm_key": "ngram_key_norm", "ple.norm_query": "ngram_query_norm",
    "ple.norm_conv": "ngram_conv_norm", "ple.conv1d": "ngram_conv", "ple.ple_embedding.ngram_embedding": "ngram.0",
    "self_attn.indexer.index_qk_proj": "index_qk", "self_attn.indexer.q_layernorm": "index_q_norm", "self_attn.indexer.k_layernorm": "index_k_norm",
}  # fmt: skip
DERIVED = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
PIECE = re.compile(r"ple\.ple_embedding\.ngram_embedding\.shard_(\d+)")
GOLDEN, PRIME = 0x9E3779B97F4A7C15, 10007
BITS = (1 << 64) - 1


def is_derived(name: str) -> bool:
    """Whether a tensor holds what follows from the config."""
    return ".ple_embedding." in name and name.endswith(DERIVED)


def ngram_piece(stem: str) -> int | None:
    """Which piece of an n-gram table a module of a layer is; None: none."""
    match = PIECE.fullmatch(stem)
    return int(match[1]) if match else None


def with_shared_scales(ours: Mapping[str, TensorView]) -> dict[str, TensorView]:
    """The same tensors; an n-gram table in pieces that has one scale for all of them has it beside every piece."""
    out = dict(ours)
    for name, scale in ours.items():
        table = name.removesuffix("0.weight_scale")
        if table != name and table.endswith(".ngram.") and f"{table}1.weight_scale" not in ours:
            pieces = [piece for piece in ours if piece.startswith(table) and piece.endswith(".weight")]
            out.update({f"{piece}_scale": scale for piece in pieces})
    return out


def stream_shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of what the streams are mixed with, and of the layers' n-grams and indexes."""
    want: dict[str, tuple[int, ...]] = {}
    if blueprint.n_streams > 1:
        want.update(_mixer("out", blueprint, has_inject=False))
    for i, layer in enumerate(blueprint.layers):
        at = f"layers.{i}."
        for name in ("attn", "ffn") if layer.has_streams else ():
            want.update(_mixer(f"{at}{name}", blueprint, has_inject=True))
        if layer.ngram is not None:
            want.update({at + name: shape for name, shape in _ngram(layer.ngram, blueprint).items()})
        if layer.attention.index is not None:
            want.update({at + name: shape for name, shape in _index(layer.attention.index, blueprint.model_width).items()})
    return want


def _mixer(at: str, blueprint: Blueprint, has_inject: bool) -> dict[str, tuple[int, ...]]:
    wide, rank = blueprint.n_streams * blueprint.model_width, blueprint.stream_rank
    found: dict[str, tuple[int, ...]] = {f"{at}_hyper_norm.weight": (wide,), f"{at}_hyper_down.weight": (rank, wide), f"{at}_hyper_up.weight": (wide, rank)}
    return {**found, **({f"{at}_hyper_inject.weight": (blueprint.n_streams, wide)} if has_inject else {})}


def _ngram(x: Ngram, blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    wide, width = blueprint.n_streams * blueprint.model_width, x.embedding_width
    want: dict[str, tuple[int, ...]] = {f"ngram.{i}.weight": (x.piece_rows, x.width) for i in range(x.n_pieces)}
    want |= {"ngram_key.weight": (wide, width), "ngram_value.weight": (blueprint.model_width, width), "ngram_conv.weight": (wide, 1, x.conv_width)}
    return {**want, **{f"ngram_{name}_norm.weight": (wide,) for name in ("key", "query", "conv")}}


def _index(x: Index, model_width: int) -> dict[str, tuple[int, ...]]:
    return {"index_qk.weight": ((x.n_heads + 1) * x.width, model_width), "index_q_norm.weight": (x.width,), "index_k_norm.weight": (x.width,)}


def ngram_multipliers(n_vocab: int, n_tokens: int, number: int, seed: int) -> tuple[int, ...]:
    """Odd numbers that no token's product with overflows 63 bits: of the number-th layer with n-grams. Source: splitmix64 (Steele et al. 2014)."""
    half = max(1, ((1 << 63) - 1) // max(n_vocab, 1) // 2)
    found = []
    for i in range(n_tokens):
        value = (seed + PRIME * number + GOLDEN * (i + 2)) & BITS
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & BITS
        value = (value ^ value >> 27) * 0x94D049BB133111EB & BITS
        found.append(2 * ((value ^ value >> 31) % half) + 1)
    return tuple(found)


def ngram_sizes(least: int, n: int, number: int) -> tuple[int, ...]:
    """Primes from `least` on: the parts of the number-th layer take n of them, after those of the layers before."""
    found: list[int] = []
    candidate = least
    while len(found) < n * (number + 1):
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return tuple(found[n * number :])


def _is_prime(value: int) -> bool:
    if value < 4:
        return value > 1
    return value % 2 == 1 and all(value % divisor for divisor in range(3, math.isqrt(value) + 1, 2))
