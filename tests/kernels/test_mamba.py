"""Mamba 2 against float64 numpy: new, continued and dead rows side by side, chunks of every length."""

from __future__ import annotations

import numpy as np
import pytest
from harness import POISON, rounded
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import MambaShape, MambaWeights, Program
from paddock_runner.pack.tensor import T
from test_ops import close

H, P, G, N, W, EPS = 6, 12, 2, 20, 4, 1e-5
C = H * P + 2 * G * N
STATE, TAIL = 4 * H * P * N, 4 * C * (W - 1)
OFFSETS = (64, 64 + -(-STATE // 64) * 64)
SLOT_BYTES = OFFSETS[1] + -(-TAIL // 64) * 64 + 64
SIZES = StateSizes(8, 256, 16, 64, 100, 256, 16, 8, 5, 3, SLOT_BYTES)


def silu(x):
    return x / (1 + np.exp(-x))


def reference(w, xbc, z, dt, state, tail, n_norms, limits):
    """One row's tokens in order: outputs [n, H*P], the state after, the tail after."""
    seen, state, out = np.concatenate([tail, xbc]), state.copy(), []
    for t in range(len(xbc)):
        u = silu(w["bias"] + np.einsum("ci,ic->c", w["conv"].reshape(C, W), seen[t : t + W]))
        x, B, c = u[: H * P].reshape(H, P), u[H * P : H * P + G * N].reshape(G, N), u[H * P + G * N :].reshape(G, N)
        step = np.clip(np.log1p(np.exp(dt[t] + w["dt_bias"])), *limits)
        y = np.zeros((H, P))
        for h in range(H):
            g = h // (H // G)
            state[h] = np.exp(-np.exp(w["a_log"][h]) * step[h]) * state[h] + np.outer(B[g], step[h] * x[h])
            y[h] = state[h].T @ c[g] + w["d"][h] * x[h]
        y = (y.reshape(-1) * silu(z[t])).reshape(n_norms, -1)
        out.append((y / np.sqrt((y * y).mean(-1, keepdims=True) + EPS)).reshape(-1) * w["scale"])
    return np.array(out), state, seen[len(xbc) :]


@pytest.mark.parametrize(("n_norms", "limits", "has_bias"), [(1, (0.0, float("inf")), True), (2, (0.4, 0.9), False)])
def test_rows_begin_continue_and_decode_side_by_side(bench, rng, n_norms, limits, has_bias):
    b = bench(sizes=SIZES)
    b.state.recurrent_stride = SLOT_BYTES
    b.device.fill(b.state.recurrent, POISON, SIZES.n_slots * SLOT_BYTES)
    sizes = {"conv": C * W, "bias": C, "a_log": H, "dt_bias": H, "d": H, "scale": H * P}
    w = {name: rounded(rng.normal(size=n) * 0.6 * (has_bias or name != "bias"), abi.PK_F32) for name, n in sizes.items()}
    on_device = {name: b.upload(w[name], abi.PK_F32) if has_bias or name != "bias" else None for name in sizes}
    shape = MambaShape(H, P, G, N, W, n_norms, *OFFSETS, *limits)
    states, tails = np.zeros((8, H, N, P)), np.zeros((8, W - 1, C))
    for rows, dead in ([[(3, 0, 1), (1, 0, 2), (5, 0, 30)], ()], [[(5, 30, 1), (3, 1, 4), (1, 2, 1)], (2,)], [[(1, 2, 1), (3, 0, 3), (5, 31, 17)], ()]):
        n = b.set_rows(rows, dead=dead)
        (xbc, xbc64), (z, z64) = (b.activations(rng.normal(size=(n, width)), T, 4) for width in (C, H * P))
        dt64 = rounded(rng.normal(size=(n, H)), abi.PK_F32)
        out = b.output(n, H * P, T, 3)
        program = Program()
        program.mamba((xbc, z, b.upload(dt64, abi.PK_F32, T, 1)), MambaWeights(**on_device), out, shape, EPS)
        b.run(program, n)
        got, at = b.download(out, n), 0
        for r, (slot, position, count) in enumerate(rows):
            part, at = slice(at, at + count), at + count
            if r in dead:
                assert not got[part].any()
                continue
            zero = 0.0 if position == 0 else 1.0
            want, states[slot], tails[slot] = reference(w, xbc64[part], z64[part], dt64[part], states[slot] * zero, tails[slot] * zero, n_norms, limits)
            close(got[part], want, b.activation, 50)
            raw = b.device.read(b.state.recurrent + slot * SLOT_BYTES + OFFSETS[0], STATE)
            np.testing.assert_allclose(np.frombuffer(raw, np.float32).reshape(H, N, P), states[slot], rtol=1e-4, atol=2e-5)
