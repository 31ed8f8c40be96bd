"""Qwen 3.8 Flash Next's config, at its published sizes: streams, n-grams, the index, and what of these a plan counts."""

from __future__ import annotations

import math

import pytest
from paddock_runner.blueprint.names import expected_shapes
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.blueprint.streams import ngram_multipliers, ngram_sizes
from paddock_runner.errors import FileError, UnsupportedError
from paddock_runner.memory.plan import PlanRequest, cpu_facts, state_sizes
from paddock_runner.memory.state import page_layout, state_layout

from tests.checkpoint_bytes import checkpoint, safetensors

FLASH = {
    "model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 4, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256,
    "max_position_embeddings": 262144, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320, "ple_layer_ids": [2], "ple_embed_dim": 2560, "ngram_size": 3, "heads_per_ngram": 8,
    "output_gate_type": "sigmoid", "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4, "eos_token_id": 248044,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}  # fmt: skip


def read(n_pieces=1, **more):
    names = [f"model.layers.1.ple.ple_embedding.ngram_embedding.shard_{i}.weight" for i in range(n_pieces)]
    entries = {n: {"dtype": "BF16", "shape": [1], "data_offsets": [2 * i, 2 * i + 2]} for i, n in enumerate(names)}
    return read_blueprint(checkpoint(safetensors(entries, 2 * n_pieces), "m.safetensors", {**FLASH, **more}))


def test_published_sizes_are_read():
    b = read(128)
    assert (b.n_streams, b.stream_rank, b.lookback_tokens) == (4, 320, 2) and [x.kind for x in b.layers] == ["delta"] * 3 + ["attention"]
    assert b.layers[0].delta.gate_act == "sigmoid" and b.layers[3].attention.index.n_blocks == 512 and b.layers[3].attention.index.block_tokens == 4
    x = b.layers[1].ngram
    assert (x.n_tokens, x.n_each, x.width, x.embedding_width, x.n_pieces) == (3, 8, 160, 2560, 128) and len(set(x.sizes)) == 16 and min(x.sizes) > 20_000_000
    assert x.piece_rows * 128 >= sum(x.sizes) > x.piece_rows * 128 - 128
    shapes = expected_shapes(b)
    assert shapes["layers.1.ngram.127.weight"] == (x.piece_rows, 160) and "out_norm.weight" not in shapes and "layers.0.attn_norm.weight" not in shapes


def test_the_published_model_has_as_many_parameters_as_its_makers_say():
    """125B, and 51B of n-grams."""
    shapes = expected_shapes(read(128, num_hidden_layers=48, layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(48)]))
    sizes = {name: math.prod(shape) / 1e9 for name, shape in shapes.items()}
    ngrams = sum(n for name, n in sizes.items() if ".ngram." in name)
    assert round(ngrams) == 51 and 125 < sum(sizes.values()) - ngrams < 126


def test_a_page_holds_index_keys_and_a_slot_the_convolution_s_tail():
    b = read(128)
    assert page_layout(b, "bf16", 16).page_bytes == 16 * 2 * (2 * 2 * 256 + 128) and page_layout(b, "bf16", 16).index_offsets[3] == 16 * 2 * 2 * 2 * 256
    without = state_layout(read(1, ple_layer_ids=None)).slot_bytes
    assert state_layout(b).slot_bytes - without == 4 * 9 * 4 * 2560
    assert state_sizes(b, PlanRequest(4096, 2, cpu_facts(2))).lookback_tokens == 2


def test_multipliers_and_primes_are_those_of_the_authors():
    """Reference: transformers 5.24, on a vocabulary of 128 with primes from 50 on."""
    assert ngram_multipliers(128, 3, 0, 1234) == (40323955908725927, 35454616657218691, 55314113489879455)
    assert ngram_multipliers(128, 3, 1, 1234) == (53266542685384603, 2619768721781425, 33105235034842189)
    assert ngram_sizes(50, 4, 0) == (53, 59, 61, 67) and ngram_sizes(50, 4, 1) == (71, 73, 79, 83)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"ple_layer_ids": [4]}, r"names layer 4, which is no gated delta net"),
        ({"ple_layer_ids": [5]}, r"no list of layers from 1 to 4"),
        ({"ple_embed_dim": 2561}, r"expected a multiple of 16 parts"),
        ({"eos_token_id": None}, r"eos_token_id"),
        ({"indexer_budget": 2047}, r"indexer_budget is 2047, expected a multiple of 4"),
        ({"indexer_kv_heads": 2}, r"indexer_kv_heads is 2, expected 1"),
        ({"output_gate_type": "tanh"}, r"output_gate_type"),
        ({"n_pieces": 3}, r"split_ngram_parts is 3"),
    ],
)
def test_what_cannot_be_is_one_sentence(more, sentence):
    with pytest.raises((FileError, UnsupportedError), match=sentence):
        read(**more)
