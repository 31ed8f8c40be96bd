"""Formulas of layer kinds against published figures (V1 to V14 of the research notes): all give the published digits."""

from __future__ import annotations

import pytest
from paddock_runner.memory.kinds import (
    StateBytes,
    delta_net_bytes,
    kv_token_bytes,
    latent_token_bytes,
    llama_cpp_cells,
    mamba2_bytes,
    short_conv_bytes,
    stored_bytes,
    window_tokens,
)

MIB = 1 << 20
GEMMA_CELL = kv_token_bytes(1, 256, 256, "f16")


def test_v1_hybrid_of_27b_keeps_64_kib_a_token():
    token = 16 * kv_token_bytes(4, 256, 256, "f16")
    assert token == 64 << 10 and token * 262144 == 16384 * MIB


def test_v2_recurrent_state_of_27b_is_149_6_mib_a_sequence():
    layer = delta_net_bytes(16, 48, 128, 128, 4)
    assert (48 * layer.state / MIB, 48 * layer.tail / MIB) == (144, 5.625)
    assert 4 * 48 * layer.total / MIB == 598.5


def test_v3_keys_of_35b_a3b():
    assert 10 * stored_bytes(2 * 256, "f16") * 65536 == 640 * MIB


def test_v4_state_with_two_rollback_copies():
    layer = delta_net_bytes(16, 32, 128, 128, 4)
    assert 3 * 30 * layer.state == 180 * MIB and round(3 * 30 * layer.tail / MIB, 2) == 8.44


def test_v5_latent_attention_in_q8_0():
    assert 61 * latent_token_bytes(512, 64, "q8_0") * 32768 / MIB == 1166.625


def gemma_270m(n_ctx, n_seqs):
    """f16 KV of Gemma 3 270M as llama.cpp allocates it: 3 global layers, 15 with a window of 512."""
    return (3 * llama_cpp_cells(n_ctx, n_seqs) + 15 * llama_cpp_cells(n_ctx, n_seqs, 512)) * GEMMA_CELL / MIB


@pytest.mark.parametrize("n_seqs, mib", [(1, 27), (2, 42), (4, 72), (8, 72)])
def test_v6_sliding_windows_at_4096(n_seqs, mib):
    assert gemma_270m(4096, n_seqs) == mib


@pytest.mark.parametrize("n_seqs", [1, 2])
def test_v7_sliding_windows_at_8192(n_seqs):
    assert gemma_270m(8192, n_seqs) == 24 + 15 * n_seqs


@pytest.mark.parametrize("n_seqs, cells, mib", [(3, 1536, 27.0), (4, 1024, 18.0)])
def test_v8_cells_are_rounded_up_per_slot(n_seqs, cells, mib):
    assert llama_cpp_cells(1024, n_seqs) == cells and gemma_270m(1024, n_seqs) == mib


def test_v9_quantised_kv_of_27b():
    assert round(16 * kv_token_bytes(4, 256, 256, "q4_0") * 262144 / 1e9, 2) == 4.83


def test_v10_two_gpus_and_a_draft_layer():
    token = kv_token_bytes(4, 256, 256, "f16")
    assert round(16 * token * 138_000 / 2 / (1 << 30), 2) == 4.21
    assert round(17 * token * 138_000 / 2 / (1 << 30), 2) == 4.47


def test_v11_layers_without_kv_cost_nothing():
    heads = [2 if i % 11 == 5 else 0 for i in range(88)]
    assert sum(kv_token_bytes(n, 128, 128, "f16") for n in heads) * 32768 / (1 << 30) == 0.25


@pytest.mark.parametrize("gib, tokens", [(64.68, 626_949), (103.92, 1_007_303)])
def test_v12_windows_of_gemma_4_31b(gib, tokens):
    """vLLM on an H200 at the model's 262,144 tokens: 10 global layers (4 heads x 512), 50 of a window of 1,024 (16 heads x 256) that hold a step of
    8,192 tokens and one page for a window that begins within one. Source: github.com/redhat-performance/configiq/issues/112."""
    ctx, page = 262_144, 16
    whole, narrow = 10 * kv_token_bytes(4, 512, 512, "bf16"), 50 * kv_token_bytes(16, 256, 256, "bf16")
    assert (whole + narrow) / 1024 == 880
    token_kib = (whole * ctx + narrow * (window_tokens(1024 - 1, ctx, 8192, page) + page)) / ctx / 1024
    assert round(token_kib, 1) == 108.2 and abs(gib * 2**20 / token_kib - tokens) < 0.005 * 2**20 / token_kib


def test_v13_context_is_whole_pages_of_what_is_available():
    page = 1600 * 16 * kv_token_bytes(4, 256, 256, "fp8")
    rest = 9.29 * (1 << 30) - -(-262144 // 1600) * page
    assert int((9.28 * (1 << 30) - rest) // page) * 1600 == 260_800


def test_v14_fp8_kv_of_flash_next_with_scales_and_an_index():
    """12 of 48 layers attend. A head's row of keys, and of values, is 256 codes and one f32 scale; an index key of 128 in bf16 stands for four tokens; a sequence
    in flight and a spare one have a ring of four keys and a row to write to. 13,248 bytes a token: 3.1973 GiB. Source: github.com/FlashML-org/FreeToken/pull/354,
    python/freetoken/kvcache/qsa_pool.py and base.py at 28652537: "K + V" there is the whole pool."""
    n_layers, n_heads, width, index, n_tokens = 12, 2, 256, stored_bytes(128, "bf16"), 4
    token = n_layers * (kv_token_bytes(n_heads, width, width, "fp8") + 2 * n_heads * 4 + index // n_tokens)
    assert token == 13_248
    assert round((token * 259_136 + 2 * n_layers * index * (n_tokens + 1)) / (1 << 30), 2) == 3.20


def test_unified_cache_shares_one_window_pool():
    assert llama_cpp_cells(32768, 4, 512, 512, is_unified=True) == 4 * 512 + 512
    assert llama_cpp_cells(32768, 4, is_unified=True) == 32768


def test_paged_window_holds_the_chunk_and_whole_pages():
    assert window_tokens(512, 8192, 256, 32) == 768 and window_tokens(512, 600, 256, 32) == 608 and window_tokens(0, 100, 256, 32) == 128


def test_state_of_other_recurrent_layers():
    assert mamba2_bytes(8, 64, 128, 1, 4) == StateBytes(8 * 64 * 128 * 4, 3 * (512 + 256) * 4)
    assert short_conv_bytes(1024, 3) == StateBytes(0, 8192)
