"""qwen4-exp: Qwen 3.8 Flash Next: qwen35's layers with experts, several residual streams, n-gram embeddings, and attention to the tokens an index chooses.

Source: https://github.com/huggingface/transformers, models/qwen4_exp.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import UnsupportedError
from ...files.checkpoint import Checkpoint
from ...files.fields import Fields
from ..blueprint import Blueprint, Index, Layer, Ngram
from ..layers import attention_of, blueprint_of, gated, stack
from ..sizes import Sizes, hf_sizes
from ..streams import ngram_multipliers, ngram_piece, ngram_sizes
from .qwen35 import DEFAULTS, delta_layers, delta_of, mixed, with_shared_experts

GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
"""output_gate_type -> what gates the delta nets' output."""


def from_gguf(checkpoint: Checkpoint, arch: str) -> Blueprint:
    """Raises: UnsupportedError."""
    raise UnsupportedError(f"{checkpoint.path}: {arch} from GGUF is not supported; its safetensors folder is", what=f"{arch} GGUF")


def from_hf(checkpoint: Checkpoint, config: Fields) -> Blueprint:
    """From config.json with model_type qwen4_exp or qwen4_exp_text. Raises: FileError, UnsupportedError."""
    config.choice("hidden_act", "silu", ("silu",))
    rope = config.section("rope_parameters") if "rope_parameters" in config else None
    defaults = DEFAULTS if rope is None or "partial_rotary_factor" not in rope else {"head_dim": 256}
    s = hf_sizes(checkpoint, config.with_defaults({**defaults, "intermediate_size": config.get("moe_intermediate_size", 512)}))
    n_streams = config.integer("hc_count", 4, low=2, high=64)
    gate = config.choice("output_gate_type", "silu", tuple(GATES))
    delta = replace(delta_of(config), gate_act=GATES[gate])
    attention = replace(attention_of(s), qk_norm=True, out_gate=True, qkv_bias=config.flag("attention_bias", False), index=_index(config, s))
    layers = stack(s, Layer(attention, gated(s), pre_norms=False, has_streams=True))
    layers = mixed(with_shared_experts(layers, config), delta, delta_layers(config, s))
    layers = _with_ngrams(layers, checkpoint, config, s)
    return blueprint_of(
        "qwen4-exp", s, layers, norm_offset=1.0, n_streams=n_streams, stream_rank=config.integer("hc_lowrank", 320, low=1)
    )


def _index(config: Fields, s: Sizes) -> Index | None:
    """What chooses attention's tokens. Raises: FileError."""
    if "indexer_n_heads" not in config:
        return None
    if config.integer("indexer_kv_heads", 1) != 1:
        raise config.error("indexer_kv_heads", f"is {config['indexer_kv_heads']}, expected 1")
    width, block = config.integer("indexer_head_dim", low=s.rope_width, high=4096), config.integer("indexer_compress_ratio", low=1, high=4096)
    budget = config.integer("indexer_budget", low=block)
    if budget % block:
        raise config.error("indexer_budget", f"is {budget}, expected a multiple of {block} (indexer_compress_ratio)")
    return Index(config.integer("indexer_n_heads", low=1, high=4096), width, block, budget // block)


def _with_ngrams(layers: tuple[Layer, ...], checkpoint: Checkpoint, config: Fields, s: Sizes) -> tuple[Layer, ...]:
    """The layers, those that ple_layer_ids counts from 1 on with n-grams. Raises: FileError."""
    ids = config.get("ple_layer_ids") or []
    if not isinstance(ids, list) or any(not isinstance(i, int) or not 1 <= i <= len(layers) for i in ids):
        raise config.error("ple_layer_ids", f"is no list of layers from 1 to {len(layers)}")
    out = list(layers)
    for number, i in enumerate(sorted(set(ids))):
        if out[i - 1].delta is None:
            raise config.error("ple_layer_ids", f"names layer {i}, which is no gated delta net")
        out[i - 1] = replace(out[i - 1], ngram=_ngram(checkpoint, config, s, i - 1, number))
    return tuple(out)


def _ngram(checkpoint: Checkpoint, config: Fields, s: Sizes, layer: int, number: int) -> Ngram:
    n_tokens, n_each = config.integer("ngram_size", 3, low=2, high=8), config.integer("heads_per_ngram", 8, low=1)
    n, width = (n_tokens - 1) * n_each, config.integer("ple_embed_dim", s.model_width, low=1)
    if n > 64 or width % n:
        raise config.error("ple_embed_dim", f"is {width}, expected a multiple of {n} parts, of which there may be 64")
    sizes = ngram_sizes(config.integer("ngram_vocab_size_base", 20_000_000, low=2, high=1 << 30), n, number)
    unit = config.integer("make_ngram_vocab_size_divisible_by", 128, low=1)
    n_rows = -(-sum(sizes) // unit) * unit
    pieces = {piece for name in checkpoint.tensors if f"layers.{layer}." in name and (piece := ngram_piece(name.partition(f"layers.{layer}.")[2].removesuffix(".weight"))) is not None}
    n_pieces = max(len(pieces), 1)
    if n_rows % n_pieces:
        raise config.error("split_ngram_parts", f"is {n_pieces} for a table of {n_rows} rows, expected equal parts")
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int) or not 0 <= end < s.n_vocab:
        raise config.error("eos_token_id", "is no token, and n-grams need one")
    multipliers = ngram_multipliers(s.n_vocab, n_tokens, number, config.integer("seed", 1234))
    return Ngram(multipliers, sizes, n_each, width // n, end, config.integer("ple_conv_kernel_size", 4, low=2, high=16), n_pieces, n_rows // n_pieces)
