"""Chunks of few tokens behind contexts long enough to be cut along the positions, against float64; the same bits every time."""

from dataclasses import replace

import numpy as np
import pytest
from cases import Attention
from harness import rounded
from paddock_runner.formats.fp8 import dequantize_fp8_e4m3
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Heads, Program
from paddock_runner.pack.tensor import ELEMENT_BYTES, T
from test_ops import attend, close, store_from_first

ALONE = ((0, 5000, 40),)
AMONG = ((0, 3333, 37), (1, 0, 90), (2, 2777, 1), (3, 2047, 130), (4, 4800, 5), (5, 6, 3))
SMALL = Attention(8, 2, 128, 128, ALONE, kv_format=abi.PK_BF16)
CASES = [
    SMALL,
    replace(SMALL, rows=AMONG, has_sinks=True),
    replace(SMALL, rows=((0, 4096, 256),)),
    replace(SMALL, rows=((0, 4095, 300), (1, 100, 64)), softcap=30.0),
    Attention(12, 4, 64, 64, AMONG, kv_format=abi.PK_F16, has_sinks=True),
    Attention(9, 3, 64, 64, ALONE, kv_format=abi.PK_F32, page_tokens=32),
    Attention(6, 1, 256, 256, ALONE, kv_format=abi.PK_BF16),
    Attention(16, 2, 256, 256, AMONG, kv_format=abi.PK_F16),
    Attention(8, 4, 192, 128, AMONG, kv_format=abi.PK_BF16),
    Attention(8, 2, 128, 128, AMONG, kv_format=abi.PK_FP8_E4M3),
    Attention(4, 2, 64, 64, AMONG, kv_format=abi.PK_FP8_E4M3, page_tokens=32, has_sinks=True),
    Attention(8, 2, 128, 128, ((0, 0, 300), (1, 700, 64), (2, 4100, 48)), kv_format=abi.PK_FP8_E4M3, page_tokens=64),
    Attention(8, 2, 128, 128, ((0, 2000, 200),), window=300, kv_format=abi.PK_FP8_E4M3),
    Attention(4, 2, 96, 96, ((1, 4000, 33),), kv_format=abi.PK_BF16, page_tokens=24),
    Attention(8, 2, 128, 128, AMONG, window=1500, kv_format=abi.PK_BF16),
]


def numbers(rng, shape, activation, kv_format):
    """Random numbers that activations and pages hold as they are."""
    if kv_format != abi.PK_FP8_E4M3:
        return rounded(rounded(rng.normal(size=shape), activation), kv_format)
    raw = rng.integers(0, 0x40, (1, int(np.prod(shape)))) | rng.integers(0, 2, (1, int(np.prod(shape)))) << 7
    return dequantize_fp8_e4m3(raw.astype(np.uint8)).reshape(shape).astype(np.float64)


def long_bench(bench, case, rng, n_slots, n_tokens, max_rows):
    """A bench whose slots have room for so many tokens on scattered pages, and the op's description of one layer."""
    element, pages = ELEMENT_BYTES[case.kv_format], n_tokens // case.page_tokens
    half = case.n_kv_heads * case.page_tokens * max(case.width, case.v_width) * element
    b = bench(sizes=StateSizes(n_slots, pages * case.page_tokens, case.page_tokens, n_slots * pages + 1, 100, 512, max_rows, 8, 5, 3), page_bytes=2 * half)
    if case.kv_format == abi.PK_FP8_E4M3 and "fp8_e4m3" not in b.pack.description["kv_formats"]:
        pytest.skip("this pack has no keys in fp8_e4m3")
    b.scatter_pages(rng)
    return b, Heads(case.n_heads, case.n_kv_heads, case.width, case.v_width, 0, half, case.kv_format)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_tokens_behind_a_long_context(bench, rng, case, level):
    b, heads = long_bench(bench, case, rng, 6, 5312, 8)
    H, K, D, Dv = case.n_heads, case.n_kv_heads, case.width, case.v_width
    k, v = ([numbers(rng, (p + n, K, w), b.activation, case.kv_format) for _, p, n in case.rows] for w in (D, Dv))
    for i, (slot, _, _) in enumerate(case.rows):
        store_from_first(b, heads, slot, k[i], v[i], rng, 512)
    n_tokens = b.set_rows(list(case.rows))
    q, q64 = b.activations(rng.normal(size=(n_tokens, H * D)) * 2, T, 3)
    out = b.output(n_tokens, H * Dv, T, 5)
    sinks64 = rounded(rng.normal(size=H) * 2, abi.PK_F32) if case.has_sinks else None
    program = Program()
    program.attention(q, out, heads, D**-0.5, case.window, case.softcap, b.upload(sinks64, abi.PK_F32) if sinks64 is not None else None)
    b.run(program, n_tokens)
    got, at = b.download(out, n_tokens), 0
    for _ in range(2):
        b.device.run(n_tokens, 0)
        np.testing.assert_array_equal(b.download(out, n_tokens), got)
    got = got.reshape(n_tokens, H, Dv)
    for i, (_, p, n) in enumerate(case.rows):
        wanted = attend(q64[at : at + n].reshape(n, H, D), k[i], v[i], p, case, D**-0.5, sinks64)
        close(got[at : at + n], wanted, b.activation, 50 if level == 3 else 10)
        at += n
