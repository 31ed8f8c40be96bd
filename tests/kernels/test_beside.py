"""Rows of one token beside prompts, and by themselves, whose queries, keys and values an op in front has just written: against float64, again with other numbers."""

from dataclasses import replace

import numpy as np
import pytest
from cases import Attention
from harness import encode, rounded
from paddock_runner.pack import abi
from paddock_runner.pack.program import Program
from paddock_runner.pack.tensor import T
from test_ops import attend, close, store_from_first
from test_pieces import long_bench, numbers

SHORT = tuple((slot, 60 + slot * 7, 1) for slot in range(40))
MANY = Attention(8, 2, 128, 128, (*SHORT, (40, 0, 128), (41, 0, 61)), kv_format=abi.PK_BF16)
CASES = [
    MANY,
    replace(MANY, rows=(*SHORT[:12], (12, 33, 2), (13, 61, 4), (40, 0, 128))),
    replace(MANY, n_heads=32, n_kv_heads=8, kv_format=abi.PK_F16, rows=(*SHORT[:39], (39, 1290, 1), (40, 0, 128), (41, 0, 128))),
    replace(MANY, n_heads=2, rows=(*SHORT[:5], (20, 1200, 1), (40, 0, 128))),
    replace(MANY, rows=((0, 0, 100), *((slot, 130, 1) for slot in range(1, 13)), (13, 7, 40))),
    replace(MANY, n_heads=32, n_kv_heads=8, rows=(*SHORT[:20], (40, 0, 128))),
    replace(MANY, rows=(*((slot, 900 - slot, 1) for slot in range(6)), (6, 1200, 90)), has_sinks=True),
    replace(MANY, rows=(*SHORT[:30], (40, 0, 400)), window=100),
    replace(MANY, kv_format=abi.PK_F16, rows=(*SHORT[:3], (40, 0, 5), (41, 300, 17))),
    replace(MANY, kv_format=abi.PK_F32, rows=(*SHORT[:9], (40, 0, 80))),
    replace(MANY, kv_format=abi.PK_FP8_E4M3),
    Attention(12, 4, 64, 64, (*SHORT, (40, 0, 200)), kv_format=abi.PK_F16, softcap=20.0),
    Attention(6, 1, 256, 256, (*SHORT, (40, 0, 90)), kv_format=abi.PK_BF16),
    Attention(8, 4, 192, 128, (*SHORT[:25], (40, 0, 33)), kv_format=abi.PK_BF16),
    replace(MANY, n_heads=32, n_kv_heads=8, rows=SHORT),
    replace(MANY, n_heads=16, rows=SHORT[:31], has_sinks=True, softcap=20.0),
    replace(MANY, n_heads=10, rows=(*SHORT[:7], (20, 1200, 1), (21, 0, 1), (22, 15, 1), (23, 16, 1))),
    replace(MANY, n_heads=2, rows=((3, 1290, 1),), kv_format=abi.PK_F16),
    replace(MANY, rows=(*SHORT, (40, 700, 1)), window=100, kv_format=abi.PK_F16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_one_token_beside_prompts(bench, rng, case, level):
    b, heads = long_bench(bench, case, rng, 42, 1312, 64)
    H, K, D, Dv = case.n_heads, case.n_kv_heads, case.width, case.v_width
    old = [tuple(numbers(rng, (p, K, w), b.activation, case.kv_format) for w in (D, Dv)) for _, p, _ in case.rows]
    for (slot, _, _), (k, v) in zip(case.rows, old, strict=True):
        store_from_first(b, heads, slot, k, v, rng, 512)
    n_tokens = b.set_rows(list(case.rows))
    x, q = b.output(n_tokens, H * D + K * (D + Dv), T), b.output(n_tokens, H * D, T)
    out = b.output(n_tokens, H * Dv, T, 5)
    sinks64 = rounded(rng.normal(size=H) * 2, abi.PK_F32) if case.has_sinks else None
    program = Program()
    program.qkv(x, q, heads, (None, None), None, 1e-6)
    program.attention(q, out, heads, D**-0.5, case.window, case.softcap, b.upload(sinks64, abi.PK_F32) if sinks64 is not None else None)
    for turn in range(3):
        new = [numbers(rng, (n_tokens, *shape), b.activation, case.kv_format if shape[0] == K else b.activation) for shape in ((H, D), (K, D), (K, Dv))]
        b.device.write(x.data, encode(np.concatenate([a.reshape(n_tokens, -1) for a in new], 1), b.activation).tobytes())
        if turn == 0:
            b.run(program, n_tokens)
        else:
            b.device.run(n_tokens, 0)
        got, at = b.download(out, n_tokens).reshape(n_tokens, H, Dv), 0
        for (_, p, n), (k, v) in zip(case.rows, old, strict=True):
            keys, values = (np.concatenate([before, a[at : at + n]]) for before, a in ((k, new[1]), (v, new[2])))
            wanted = attend(new[0][at : at + n], keys, values, p, case, D**-0.5, sinks64)
            close(got[at : at + n], wanted, b.activation, 50 if level == 3 else 10)
            at += n
