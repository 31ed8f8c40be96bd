"""Gated short convolution against float64 numpy: new, continued and dead rows side by side."""

from __future__ import annotations

import numpy as np
import pytest
from harness import POISON, rounded
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Program
from paddock_runner.pack.tensor import T
from test_ops import close

M, W, OFFSET = 21, 3, 64
SLOT_BYTES = OFFSET + -(-4 * M * (W - 1) // 64) * 64
SIZES = StateSizes(8, 256, 16, 64, 100, 256, 16, 8, 5, 3, SLOT_BYTES)


@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_begin_continue_and_decode_side_by_side(bench, rng, has_bias):
    b = bench(sizes=SIZES)
    b.state.recurrent_stride = SLOT_BYTES
    b.device.fill(b.state.recurrent, POISON, SIZES.n_slots * SLOT_BYTES)
    w, bias = rounded(rng.normal(size=(M, W)), abi.PK_F32), rounded(rng.normal(size=M) * has_bias, abi.PK_F32)
    weights = (b.upload(w.reshape(1, -1), abi.PK_F32), b.upload(bias, abi.PK_F32) if has_bias else None)
    tails = np.full((SIZES.n_slots, W - 1, M), np.nan)
    for rows, dead in ([[(3, 0, 1), (1, 0, 2), (5, 0, 30)], ()], [[(5, 30, 1), (3, 1, 4), (1, 2, 1)], (2,)], [[(1, 2, 1), (3, 0, 3), (5, 31, 2)], ()]):
        n = b.set_rows(rows, dead=dead)
        x, x64 = b.activations(rng.normal(size=(n, 3 * M)), T, 4)
        out = b.output(n, M, T, 3)
        program = Program()
        program.conv(x, weights, out, W, OFFSET)
        b.run(program, n)
        got, at = b.download(out, n), 0
        for r, (slot, position, count) in enumerate(rows):
            part, at = slice(at, at + count), at + count
            if r in dead:
                continue
            first, second, v = np.split(x64[part], 3, axis=1)
            seen = np.concatenate([tails[slot] if position else np.zeros((W - 1, M)), first * v])
            want = second * (bias + np.stack([np.einsum("ci,ic->c", w, seen[t : t + W]) for t in range(count)]))
            tails[slot] = seen[count:]
            close(got[part], want, b.activation, 10)
