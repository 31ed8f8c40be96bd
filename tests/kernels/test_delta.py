"""Gated delta net against float64 numpy: new and continued rows side by side, chunks of every length, dead slots untouched."""

from __future__ import annotations

import numpy as np
import pytest
from harness import POISON, rounded
from paddock_runner.errors import PackError
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import DeltaShape, DeltaWeights, Program
from paddock_runner.pack.tensor import T
from test_ops import close

G, H, DK, DV, W, EPS = 2, 6, 16, 20, 4, 1e-6
C = 2 * G * DK + H * DV
STATE, TAIL = 4 * H * DK * DV, 4 * C * (W - 1)
OFFSETS = (128, 128 + -(-STATE // 64) * 64)
SLOT_BYTES = OFFSETS[1] + -(-TAIL // 64) * 64 + 64
SIZES = StateSizes(8, 256, 16, 64, 100, 256, 16, 8, 5, 3, SLOT_BYTES)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(w, qkv, z, b, a, state, tail):
    """One row's tokens in order: outputs [n, H*Dv], the state after, the tail after."""
    seen, state, out = np.concatenate([tail, qkv]), state.copy(), []
    for t in range(len(qkv)):
        u = np.einsum("ci,ic->c", w["conv"].reshape(C, W), seen[t : t + W])
        u = u * sigmoid(u)
        q, k = (x.reshape(G, DK) / np.sqrt((x.reshape(G, DK) ** 2).sum(-1, keepdims=True) + 1e-6) for x in (u[: G * DK], u[G * DK : 2 * G * DK]))
        v, o = u[2 * G * DK :].reshape(H, DV), np.zeros((H, DV))
        for h in range(H):
            g = h // (H // G)
            state[h] *= np.exp(-np.exp(w["a_log"][h]) * np.log1p(np.exp(a[t, h] + w["dt"][h])))
            state[h] += np.outer(k[g], sigmoid(b[t, h]) * (v[h] - state[h].T @ k[g]))
            o[h] = state[h].T @ q[g] / np.sqrt(DK)
        o = o / np.sqrt((o * o).mean(-1, keepdims=True) + EPS) * w["scale"]
        out.append((o * z[t].reshape(H, DV) * sigmoid(z[t].reshape(H, DV))).reshape(-1))
    return np.array(out), state, seen[len(qkv) :]


class Layer:
    """A bench with one layer's weights, and random states of all slots."""

    def __init__(self, b, rng) -> None:
        self.b, self.rng = b, rng
        b.state.recurrent_stride = SLOT_BYTES
        sizes = {"conv": C * W, "a_log": H, "dt": H, "scale": DV}
        self.w = {name: rounded(rng.normal(size=n) * 0.6, abi.PK_F32) for name, n in sizes.items()}
        self.weights = DeltaWeights(*(b.upload(self.w[name], abi.PK_F32) for name in sizes))
        self.shape = DeltaShape(G, H, DK, DV, W, *OFFSETS)
        b.device.fill(b.state.recurrent, POISON, SIZES.n_slots * SLOT_BYTES)
        self.states = rounded(rng.normal(size=(SIZES.n_slots, H, DK, DV)) * 0.3, abi.PK_F32)
        self.tails = rounded(rng.normal(size=(SIZES.n_slots, W - 1, C)), abi.PK_F32)
        for slot in range(SIZES.n_slots):
            self._write(slot, OFFSETS[0], self.states[slot])
            self._write(slot, OFFSETS[1], self.tails[slot])

    def _write(self, slot, offset, values) -> None:
        self.b.device.write(self.b.state.recurrent + slot * SLOT_BYTES + offset, values.astype(np.float32).tobytes())

    def read(self, slot, offset, shape):
        raw = self.b.device.read(self.b.state.recurrent + slot * SLOT_BYTES + offset, 4 * int(np.prod(shape)))
        return np.frombuffer(raw, np.float32).reshape(shape)

    def step(self, rows, dead=()):
        """Runs rows (slot, position, n); compares outputs, states and tails with the reference, and moves the reference on."""
        b, n = self.b, sum(r[2] for r in rows)
        assert b.set_rows(rows, dead=dead) == n
        (qkv, qkv64), (z, z64) = (b.activations(self.rng.normal(size=(n, width)), T, 4) for width in (C, H * DV))
        numbers64 = [rounded(self.rng.normal(size=(n, H)), abi.PK_F32) for _ in range(2)]
        numbers = [b.upload(x, abi.PK_F32, T, 2) for x in numbers64]
        out = b.output(n, H * DV, T, 3)
        program = Program()
        program.delta((qkv, z, *numbers), self.weights, out, self.shape, EPS)
        b.run(program, n)
        got, at = b.download(out, n), 0
        for r, (slot, position, count) in enumerate(rows):
            part, at = slice(at, at + count), at + count
            if r not in dead:
                zero = 0.0 if position == 0 else 1.0
                inputs = (qkv64[part], z64[part], numbers64[0][part], numbers64[1][part])
                want, self.states[slot], self.tails[slot] = reference(self.w, *inputs, self.states[slot] * zero, self.tails[slot] * zero)
                close(got[part], want, b.activation, 50)
        for slot in range(SIZES.n_slots):
            np.testing.assert_allclose(self.read(slot, OFFSETS[0], (H, DK, DV)), self.states[slot], rtol=1e-4, atol=2e-5)
            np.testing.assert_allclose(self.read(slot, OFFSETS[1], (W - 1, C)), self.tails[slot], rtol=1e-2 if b.activation == abi.PK_BF16 else 1e-6)


def test_rows_begin_continue_and_decode_side_by_side(bench, rng):
    layer = Layer(bench(sizes=SIZES), rng)
    layer.step([(3, 0, 1), (1, 0, 2), (5, 0, 40), (0, 17, 1), (2, 9, 3)])
    layer.step([(5, 40, 1), (3, 1, 5), (1, 2, 1)])
    layer.step([(1, 3, 1), (5, 41, 2), (3, 6, 1)])


def test_slot_that_is_used_again_begins_with_zeros(bench, rng):
    layer = Layer(bench(sizes=SIZES), rng)
    layer.step([(4, 30, 7)])
    layer.step([(4, 0, 1)])
    layer.step([(4, 1, 1)])


def test_dead_slots_keep_what_they_remember(bench, rng):
    layer = Layer(bench(sizes=SIZES), rng)
    layer.step([(2, 5, 3), (6, 0, 2), (1, 0, 4)], dead=(0, 1))


def test_state_outside_the_slot_is_refused(bench, rng):
    b = bench(sizes=SIZES)
    layer = Layer(b, rng)
    b.state.recurrent_stride = SLOT_BYTES - 128
    qkv, z, out = b.output(1, C, T), b.output(1, H * DV, T), b.output(1, H * DV, T)
    numbers = [b.output(1, H, T, 0, abi.PK_F32) for _ in range(2)]
    program = Program()
    program.delta((qkv, z, *numbers), layer.weights, out, layer.shape, EPS)
    with pytest.raises(PackError, match=r"op 0 \(delta\): the convolution's tail lies at bytes"):
        b.load(program)
