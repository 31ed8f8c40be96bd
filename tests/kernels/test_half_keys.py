"""Keys in F16 whose projections have a bias, large beside what differs from token to token: no step between a product and its page may have fewer bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import Attention
from harness import decode, rounded
from paddock_runner.pack import abi
from paddock_runner.pack.program import Program, Rotation
from paddock_runner.pack.tensor import T
from test_layer import ROWS, SIZES, WIDTH, Layers, compare
from test_ops import attend, attention_bench, positions_of, rotate

BIAS, QUERY = 200.0, 6.0
"""Of keys, in the columns that hardly turn, and how large queries are there. Half a step of BF16 at the first is 0.5, of F16 0.06."""


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    """As a part of all heads."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("rows", [((2, 0, 1),), ((0, 0, 3), (1, 0, 2)), ((3, 0, 150),), ((0, 0, 90), (4, 0, 1), (2, 0, 33))], ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_keys_with_a_large_bias_keep_what_differs(bench, rng, width, rows):
    """150 tokens a slot are written by the same op before. Attention must be that of keys rounded to F16 once: BF16 anywhere on the way gives another."""
    H, K, D = 4, 2, width
    case = Attention(H, K, D, D, tuple((slot, 150, n) for slot, _, n in rows), kv_format=abi.PK_F16)
    b, heads = attention_bench(bench, case)
    b.scatter_pages(rng)
    frequency = (1e6 ** (-np.arange(D // 2) / (D // 2))).astype(np.float32)
    slow = np.concatenate([np.arange(D // 2 - 8, D // 2), np.arange(D - 8, D)])
    bias, queries = np.zeros(D), np.ones(D)
    bias[slow], queries[slow] = BIAS * rng.choice([-1.0, 1.0], 16), QUERY
    rope = Rotation(b.upload(frequency, abi.PK_F32), D, "neox", 1.0)

    def made(n):
        x = rng.normal(size=(n, (H + 2 * K) * D))
        x[:, : H * D] *= np.tile(queries, H)
        x[:, H * D : (H + K) * D] += np.tile(bias, K)
        return x.astype(np.float32).astype(np.float64)

    def turned(x, positions):
        parts = x[:, : H * D].reshape(-1, H, D), x[:, H * D : (H + K) * D].reshape(-1, K, D)
        return *(rotate(p, positions, frequency, D, "neox", 1.0) for p in parts), x[:, (H + K) * D :].reshape(-1, K, D)

    def write(placed, x):
        n = b.set_rows(placed)
        q = b.output(n, H * D, T, 4, format=abi.PK_F16 if b.activation == abi.PK_BF16 else None)
        program = Program()
        program.qkv(b.upload(x, abi.PK_F32, T, 3), q, heads, (None, None), rope, 1e-6)
        b.run(program, n)
        return n, q

    before = {slot: made(150) for slot, _, _ in case.rows}
    for slot, x in before.items():
        write([(slot, 0, 150)], x)
    now = made(sum(n for _, _, n in case.rows))
    n, q = write(list(case.rows), now)
    new_q, new_k, new_v = turned(now, positions_of(case.rows))
    assert error(b.download(q, n).reshape(n, H, D), new_q) < 1e-3
    out, program = b.output(n, H * D, T, 5, format=abi.PK_F32), Program()
    program.attention(q, out, heads, D**-0.5)
    b.run(program, n)
    got, at, half, rough = b.download(out, n).reshape(n, H, D), 0, [], []
    for slot, p, count in case.rows:
        _, old_k, old_v = turned(before[slot], np.arange(150))
        k, v = (np.concatenate([old, new[at : at + count]]) for old, new in ((old_k, new_k), (old_v, new_v)))
        for held, format in ((half, abi.PK_F16), (rough, abi.PK_BF16)):
            held.append(attend(new_q[at : at + count], rounded(k, format), v, p, case, D**-0.5, None))
        at += count
    wanted = np.concatenate(half)
    assert error(got, wanted) < error(np.concatenate(rough), wanted) / 3


@pytest.mark.parametrize("width", [64, 33])
def test_what_lies_beyond_the_range_becomes_the_largest_number(bench, rng, width):
    case = Attention(2, 1, width, width, ((1, 0, 3),), kv_format=abi.PK_F16)
    b, heads = attention_bench(bench, case)
    b.scatter_pages(rng)
    n = b.set_rows(list(case.rows))
    x = rng.normal(size=(n, 4 * width)).astype(np.float32)  # rounded once here and there
    x[:, ::5] = 1e5
    x[:, 1::7] = -7e4
    q = b.output(n, 2 * width, T, format=abi.PK_F16 if b.activation == abi.PK_BF16 else None)
    program = Program()
    program.qkv(b.upload(x, abi.PK_F32, T), q, heads, (None, None), None, 1e-6)
    b.run(program, n)
    wanted = rounded(np.clip(x, -65504, 65504), abi.PK_F16)
    if b.activation == abi.PK_BF16:
        np.testing.assert_array_equal(b.download(q, n), wanted[:, : 2 * width])
    own = b.output(n, 2 * width, T, format=abi.PK_F32)
    program = Program()
    program.attention(b.upload(np.zeros((n, 2 * width)), abi.PK_F32, T), own, heads, 1.0, window=1)
    b.run(program, n)
    np.testing.assert_array_equal(b.download(own, n), np.tile(wanted[:, 3 * width :], 2))
    raw = b.device.read(b.device.kv_address, b.sizes.n_pages * b.page_bytes)
    assert not np.isinf(decode(raw, abi.PK_F16)).any()


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("n_tokens", [1, 8, 40, 128])
@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "q8_0", "q4_k"])
def test_layers_with_keys_in_f16_equal_their_ops_one_by_one(bench, rng, level, name, n_tokens, width):
    if level > 1:
        pytest.skip("levels differ in products, which have tests of their own")
    b = bench(sizes=replace(SIZES, max_step_tokens=128), page_bytes=256 + 2 * 2 * 16 * width * 2)
    if name not in b.pack.description["formats"]:
        pytest.skip(f"this pack has no {name}")
    layers = Layers(b, rng, name, (4, 2, width), rows=n_tokens, kv=abi.PK_F16)
    rows = [(slot, position, 1) for slot, position in ROWS[n_tokens][:7]] if n_tokens <= 8 else [(3, 17, n_tokens - 1), (5, 200, 1)]
    n = b.set_rows(rows)
    start = rng.standard_normal((n, WIDTH))
    compare(layers, start, n, len(rows), 1e-2 if name != "fp8_e4m3" else 4e-2, repeats=3)
