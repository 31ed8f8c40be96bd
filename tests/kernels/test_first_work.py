"""Steps of single tokens that begin with an embedding, as a model's do: what attention takes first may be found there once for all layers. Against float64, with other rows in between."""

from dataclasses import replace

import numpy as np
import pytest
from cases import Attention
from harness import encode, rounded
from paddock_runner.pack import abi
from paddock_runner.pack.program import Program
from paddock_runner.pack.tensor import T
from test_ops import attend, close, store, store_from_first
from test_pieces import long_bench, numbers
from weights import random_weight

MOST = 640
ROWS = tuple((slot, 20 + slot * 97 % 230, 1) for slot in range(128))
WIDE = Attention(32, 8, 128, 128, ROWS, kv_format=abi.PK_BF16)
CASES = [
    WIDE,
    replace(WIDE, rows=ROWS[:96], kv_format=abi.PK_F16, has_sinks=True),
    replace(WIDE, rows=ROWS[:64]),
    replace(WIDE, rows=ROWS[:2]),
    replace(WIDE, n_heads=10, n_kv_heads=2, rows=(*ROWS[:100], (100, 0, 1), (101, 15, 1), (102, 16, 1)), softcap=20.0),
    replace(WIDE, n_heads=8, rows=(*ROWS[:50], (50, 600, 1), (51, 639, 1))),
    replace(WIDE, rows=(*ROWS[:19], (50, 630, 1)), window=100),
]


def store_all(b, heads, rows, old, rng):
    """The rows' keys and values, as many of them at once as a step has room for."""
    together, n = [], 0
    for i, (slot, p, _) in enumerate(rows):
        if p > 512:
            store_from_first(b, heads, slot, *old[i], rng, 512)
            continue
        if n + p > 512:
            store(b, heads, [(rows[j][0], 0, rows[j][1]) for j in together], *(np.concatenate([old[j][part] for j in together]) for part in (0, 1)), rng)
            together, n = [], 0
        if p > 0:
            together.append(i)
            n += p
    if together:
        store(b, heads, [(rows[j][0], 0, rows[j][1]) for j in together], *(np.concatenate([old[j][part] for j in together]) for part in (0, 1)), rng)


@pytest.mark.parametrize("case", CASES, ids=["wide", "f16", "64", "two", "narrow", "unlike", "window"])
def test_single_tokens_behind_an_embedding(bench, rng, case, level):
    b, heads = long_bench(bench, case, rng, 128, MOST, 128)
    H, K, D, Dv = case.n_heads, case.n_kv_heads, case.width, case.v_width
    old = [tuple(numbers(rng, (p, K, w), b.activation, case.kv_format) for w in (D, Dv)) for _, p, _ in case.rows]
    store_all(b, heads, case.rows, old, rng)
    n = b.set_rows(list(case.rows))
    x, q = b.output(n, H * D + K * (D + Dv), T), b.output(n, H * D, T)
    outs = [b.output(n, H * Dv, T, 5) for _ in range(3)]
    embedded, table = b.output(n, 64, T), random_weight("bf16", 100, 64, rng).upload(b)
    sinks64 = rounded(rng.normal(size=H) * 2, abi.PK_F32) if case.has_sinks else None
    sinks = b.upload(sinks64, abi.PK_F32) if sinks64 is not None else None
    program = Program()
    program.embed(table, embedded)
    program.qkv(x, q, heads, (None, None), None, 1e-6)
    # The last one sees other positions than the others.
    windows = [case.window, case.window, 50]
    for out, window in zip(outs, windows, strict=True):
        program.attention(q, out, heads, D**-0.5, window, case.softcap, sinks)
    rows = list(case.rows)
    for turn in range(4):
        dead = (1,) if turn == 2 else ()
        b.set_rows(rows, dead=dead)
        new = [numbers(rng, (n, *shape), b.activation, case.kv_format if shape[0] == K else b.activation) for shape in ((H, D), (K, D), (K, Dv))]
        b.device.write(x.data, encode(np.concatenate([a.reshape(n, -1) for a in new], 1), b.activation).tobytes())
        if turn == 0:
            b.run(program, n)
        else:
            b.device.run(n, 0)
        for out, window in zip(outs, windows, strict=True):
            got, seen = b.download(out, n).reshape(n, H, Dv), replace(case, window=window)
            for r, ((_, p, _), (k, v)) in enumerate(zip(rows, old, strict=True)):
                if r in dead:
                    assert not got[r].any()
                    continue
                keys, values = (np.concatenate([before[:p], a[r : r + 1]]) for before, a in ((k, new[1]), (v, new[2])))
                close(got[r : r + 1], attend(new[0][r : r + 1], keys, values, p, seen, D**-0.5, sinks64), b.activation, 50 if level == 3 else 10)
        # Other lengths, other rows first; what was written at a place that is passed again is written anew.
        order = rng.permutation(n)
        rows = [(rows[i][0], int(rng.integers(0, rows[i][1] + 1)), 1) for i in order]
        old = [old[i] for i in order]
