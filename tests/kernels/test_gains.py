"""Keys and values in FP8, kept apart by a gain of every head, against float64 numpy: heads of very unlike sizes, every shape of attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import CHUNK, DECODE, LONG, MIXED, PREFILL, Attention
from harness import rounded
from paddock_runner.formats.fp8 import E4M3
from paddock_runner.pack import abi
from paddock_runner.pack.program import Program
from paddock_runner.pack.tensor import T
from test_ops import attend, attention_bench, close

FP8 = abi.PK_FP8_E4M3
CASES = [
    Attention(9, 3, 64, 64, DECODE),
    Attention(9, 3, 64, 64, MIXED, page_tokens=32),
    Attention(8, 2, 128, 128, MIXED, page_tokens=32),
    Attention(8, 2, 128, 128, PREFILL),
    Attention(8, 1, 128, 128, CHUNK, window=70, page_tokens=32),
    Attention(32, 8, 128, 128, DECODE, page_tokens=32),
    Attention(14, 2, 64, 64, LONG, page_tokens=32),
    Attention(4, 1, 256, 256, CHUNK, window=70),
    Attention(16, 2, 256, 256, ((1, 129, 1),)),
    Attention(8, 1, 256, 256, ((1, 590, 40),)),
    Attention(4, 2, 32, 32, MIXED, softcap=5.0),
    Attention(4, 2, 128, 128, MIXED, has_sinks=True, window=16),
    Attention(2, 2, 33, 17, MIXED, page_tokens=5),
    Attention(2, 1, 80, 96, CHUNK, softcap=8.0, page_tokens=7),
    Attention(5, 1, 96, 96, PREFILL, has_sinks=True, softcap=3.0, window=50),
    Attention(3, 3, 1, 1, MIXED, page_tokens=1),
    Attention(8, 2, 512, 512, MIXED),
]  # fmt: skip
CASES = [replace(case, kv_format=FP8) for case in CASES]


def gained(b, case, rng):
    """(scales of keys [K], of values [K], both as gains of the ops): powers of two, as unlike as 1 and 4096."""
    k, v = (2.0 ** rng.integers(-6, 7, case.n_kv_heads) for _ in range(2))
    group = case.n_heads // case.n_kv_heads
    stored = np.concatenate([np.repeat(k, group), 1 / k, 1 / v])[None]
    return k, v, (b.upload(stored, abi.PK_F32), b.upload(np.repeat(v, group)[None], abi.PK_F32))


def poison_pages(b):
    """Every byte of every page: 448."""
    b.device.fill(b.device.kv_address, 0x7E, b.sizes.n_pages * b.page_bytes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_fp8_with_gains_equals_numpy(bench, rng, case, level):
    b, heads = attention_bench(bench, case, case.n_threads)
    b.scatter_pages(rng)
    poison_pages(b)
    H, K, D, Dv = case.n_heads, case.n_kv_heads, case.width, case.v_width
    scale_k, scale_v, gains = gained(b, case, rng)
    heads = replace(heads, gains=gains)
    k, v = ([], [])
    for slot, p, n in case.rows:
        k.append(rounded(rng.normal(size=(p + n, K, D)) * 20 * scale_k[:, None], b.activation))
        v.append(rounded(rng.normal(size=(p + n, K, Dv)) * 90 * scale_v[:, None], b.activation))
        for at in range(0, p + n, 256):
            piece = slice(at, min(p + n, at + 256))
            rows = b.set_rows([(slot, at, piece.stop - at)])
            x, _ = b.activations(np.concatenate([np.zeros((rows, H * D)), k[-1][piece].reshape(rows, -1), v[-1][piece].reshape(rows, -1)], 1), T)
            program = Program()
            program.qkv(x, b.output(rows, H * D, T), heads, (None, None), None, 1e-6)
            b.run(program, rows)
    n_tokens = b.set_rows(list(case.rows))
    group = H // K
    size = 1 / (20 * np.repeat(scale_k, group)[:, None] * D**0.5)  # logits of a few
    q64 = rounded(rng.normal(size=(n_tokens, H, D)) * 2 * size, b.activation)
    pages = b.device.read(b.device.kv_address, b.sizes.n_pages * b.page_bytes)
    x, _ = b.activations(np.concatenate([q64.reshape(n_tokens, -1), np.ones((n_tokens, K * (D + Dv)))], 1), T)
    q, out = b.output(n_tokens, H * D, T, 3), b.output(n_tokens, H * Dv, T, 5)
    sinks64 = rounded(rng.normal(size=H) * 2, abi.PK_F32) if case.has_sinks else None
    program = Program()
    program.qkv(x, q, heads, (None, None), None, 1e-6)
    b.run(program, n_tokens)
    close(b.download(q, n_tokens), (q64 * np.repeat(scale_k, group)[:, None]).reshape(n_tokens, -1), b.activation, 5)
    b.device.write(b.device.kv_address, pages)
    program = Program()
    program.attention(q, out, heads, 1.0, case.window, case.softcap, b.upload(sinks64, abi.PK_F32) if sinks64 is not None else None)
    b.run(program, n_tokens)
    got, at = b.download(out, n_tokens).reshape(n_tokens, H, Dv), 0
    for i, (_, p, n) in enumerate(case.rows):
        kept_k, kept_v = (rounded(x / s[:, None], FP8) * s[:, None] for x, s in ((k[i], scale_k), (v[i], scale_v)))
        wanted = attend(q64[at : at + n], kept_k, kept_v, p, case, 1.0, sinks64)
        size = 90 * np.repeat(scale_v, group)[:, None]
        close(got[at : at + n] / size, wanted / size, b.activation, 50 if level == 3 else 10)
        at += n


def stored_and_read(b, heads, values, **seen):
    """What attention of one head with queries of zeros gives for [queries, keys, values] a token; seen: as Program.attention takes it."""
    n = len(values)
    x, _ = b.activations(values, T)
    program = Program()
    program.qkv(x, b.output(n, 32, T), heads, (None, None), None, 1e-6)
    b.run(program, n)
    q, _ = b.activations(np.zeros((n, 32)), T)
    out = b.output(n, 32, T)
    program = Program()
    program.attention(q, out, heads, 1.0, **seen)
    b.run(program, n)
    return b.download(out, n)


def test_every_code_is_stored_and_read(bench, rng):
    """All finite codes, ties between neighbours, numbers beyond the largest and below the smallest."""
    case = Attention(1, 1, 32, 32, ((0, 0, 16),), kv_format=FP8)
    b, heads = attention_bench(bench, case)
    n = b.set_rows(list(case.rows))
    finite = E4M3[:127].astype(np.float64)
    edges = np.concatenate([finite, -finite, (finite[1:] + finite[:-1]) / 2, [464, 1e4, -1e6, 2.0**-10, -(2.0**-11), 0.0]])
    values = rounded(np.resize(edges, (n, 32)), b.activation)
    got = stored_and_read(b, heads, np.concatenate([np.zeros((n, 64)), values], 1), window=1)
    np.testing.assert_allclose(got, rounded(values, FP8), rtol=1e-5, atol=0)  # a weight of AMX is 1 within 3e-6


def test_nan_stays_nan(bench):
    case = Attention(1, 1, 32, 32, ((0, 0, 2),), kv_format=FP8)
    b, heads = attention_bench(bench, case)
    n = b.set_rows(list(case.rows))
    values = np.ones((n, 96))
    values[0, 64] = np.nan
    got = stored_and_read(b, heads, values)
    assert np.isnan(got[:, 0]).all() and np.isfinite(got[:, 1:]).all()
