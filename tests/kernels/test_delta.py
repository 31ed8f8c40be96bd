"""Gated delta net against float64 numpy: new and continued rows side by side, chunks of every length, dead slots untouched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from harness import POISON, rounded
from paddock_runner.errors import PackError
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import DeltaShape, DeltaWeights, Program
from paddock_runner.pack.tensor import T
from test_ops import close

W, EPS = 4, 1e-6
CHUNKED = 8
"""Rows of more tokens may be computed in chunks with bf16 operands by a pack whose activations are bf16."""


@dataclass(frozen=True)
class Dims:
    """Heads of a layer, and where a slot keeps its state."""

    g: int = 2
    h: int = 6
    dk: int = 16
    dv: int = 20
    is_tiled: bool = False

    @property
    def c(self) -> int:
        """Channels of the convolution."""
        return 2 * self.g * self.dk + self.h * self.dv

    @property
    def offsets(self) -> tuple[int, int]:
        """Of the state and of the tail in a slot's memory."""
        return 128, 128 + -(-4 * self.h * self.dk * self.dv // 64) * 64

    @property
    def sizes(self) -> StateSizes:
        """A small state with room for this layer."""
        return StateSizes(8, 256, 16, 64, 100, 512, 16, 8, 5, 3, self.offsets[1] + -(-4 * self.c * (W - 1) // 64) * 64 + 64)


SMALL, REAL, TILED, MANY = Dims(), Dims(2, 4, 128, 128), Dims(2, 4, 128, 128, True), Dims(8, 40, 128, 128)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(dims, w, qkv, z, b, a, state, tail):
    """One row's tokens in order: outputs [n, H*Dv], the state after, the tail after."""
    g_, h_, dk, dv = dims.g, dims.h, dims.dk, dims.dv
    seen, state, out = np.concatenate([tail, qkv]), state.copy(), []
    for t in range(len(qkv)):
        u = np.einsum("ci,ic->c", w["conv"].reshape(-1, W), seen[t : t + W])
        u = u * sigmoid(u)
        parts = u[: g_ * dk], u[g_ * dk : 2 * g_ * dk]
        q, k = (x.reshape(g_, dk) / np.sqrt((x.reshape(g_, dk) ** 2).sum(-1, keepdims=True) + 1e-6) for x in parts)
        v, o = u[2 * g_ * dk :].reshape(h_, dv), np.zeros((h_, dv))
        for h in range(h_):
            g = h % g_ if dims.is_tiled else h // (h_ // g_)
            state[h] *= np.exp(-np.exp(w["a_log"][h]) * np.log1p(np.exp(a[t, h] + w["dt"][h])))
            state[h] += np.outer(k[g], sigmoid(b[t, h]) * (v[h] - state[h].T @ k[g]))
            o[h] = state[h].T @ q[g] / np.sqrt(dk)
        o = o / np.sqrt((o * o).mean(-1, keepdims=True) + EPS) * w["scale"]
        out.append((o * z[t].reshape(h_, dv) * sigmoid(z[t].reshape(h_, dv))).reshape(-1))
    return np.array(out), state, seen[len(qkv) :]


class Layer:
    """A bench with one layer's weights, and random states of all slots."""

    def __init__(self, bench, rng, dims=SMALL) -> None:
        self.dims, self.rng = dims, rng
        self.b = b = bench(sizes=dims.sizes)
        self.slot_bytes = b.state.recurrent_stride = dims.sizes.recurrent_bytes
        sizes = {"conv": dims.c * W, "a_log": dims.h, "dt": dims.h, "scale": dims.dv}
        self.w = {name: rounded(rng.normal(size=n) * 0.6, abi.PK_F32) for name, n in sizes.items()}
        self.weights = DeltaWeights(*(b.upload(self.w[name], abi.PK_F32) for name in sizes))
        self.shape = DeltaShape(dims.g, dims.h, dims.dk, dims.dv, W, *dims.offsets, dims.is_tiled)
        n_slots = dims.sizes.n_slots
        b.device.fill(b.state.recurrent, POISON, n_slots * self.slot_bytes)
        self.states = rounded(rng.normal(size=(n_slots, dims.h, dims.dk, dims.dv)) * 0.3, abi.PK_F32)
        self.tails = rounded(rng.normal(size=(n_slots, W - 1, dims.c)), abi.PK_F32)
        self.is_exact = np.ones(n_slots, bool)
        for slot in range(n_slots):
            self._write(slot, dims.offsets[0], self.states[slot])
            self._write(slot, dims.offsets[1], self.tails[slot])

    def _write(self, slot, offset, values) -> None:
        self.b.device.write(self.b.state.recurrent + slot * self.slot_bytes + offset, values.astype(np.float32).tobytes())

    def read(self, slot, offset, shape):
        raw = self.b.device.read(self.b.state.recurrent + slot * self.slot_bytes + offset, 4 * int(np.prod(shape)))
        return np.frombuffer(raw, np.float32).reshape(shape)

    def step(self, rows, dead=()):
        """Runs rows (slot, position, n); compares outputs, states and tails with the reference, and moves the reference on."""
        b, dims, n = self.b, self.dims, sum(r[2] for r in rows)
        values = dims.h * dims.dv
        assert b.set_rows(rows, dead=dead) == n
        (qkv, qkv64), (z, z64) = (b.activations(self.rng.normal(size=(n, width)), T, 8) for width in (dims.c, values))
        numbers64 = [rounded(self.rng.normal(size=(n, dims.h)), abi.PK_F32) for _ in range(2)]
        numbers = [b.upload(x, abi.PK_F32, T, 2) for x in numbers64]
        out = b.output(n, values, T, 4 if dims.is_tiled else 8)
        program = Program()
        program.delta((qkv, z, *numbers), self.weights, out, self.shape, EPS)
        b.run(program, n)
        got, at = b.download(out, n), 0
        for r, (slot, position, count) in enumerate(rows):
            part, at = slice(at, at + count), at + count
            if r not in dead:
                zero = 0.0 if position == 0 else 1.0
                inputs = (qkv64[part], z64[part], numbers64[0][part], numbers64[1][part])
                want, self.states[slot], self.tails[slot] = reference(dims, self.w, *inputs, self.states[slot] * zero, self.tails[slot] * zero)
                self.is_exact[slot] = (self.is_exact[slot] or position == 0) and (count <= CHUNKED or dims.dk != 128 or b.activation == abi.PK_F32)
                if self.is_exact[slot]:
                    close(got[part], want, b.activation, 50)
                else:
                    assert np.linalg.norm(got[part] - want) <= 1.5e-2 * np.linalg.norm(want), f"row {r}"
                    np.testing.assert_allclose(got[part], want, atol=0.06 * np.abs(want).max(), err_msg=f"row {r}")
        for slot in range(dims.sizes.n_slots):
            state = self.read(slot, dims.offsets[0], (dims.h, dims.dk, dims.dv))
            if self.is_exact[slot]:
                np.testing.assert_allclose(state, self.states[slot], rtol=1e-4, atol=2e-5, err_msg=f"slot {slot}")
            else:
                assert np.linalg.norm(state - self.states[slot]) <= 1e-2 * np.linalg.norm(self.states[slot]), f"slot {slot}"
            tail = self.read(slot, dims.offsets[1], (W - 1, dims.c))
            np.testing.assert_allclose(tail, self.tails[slot], rtol=1e-2 if b.activation == abi.PK_BF16 else 1e-6)


@pytest.mark.parametrize("dims", [SMALL, REAL, TILED], ids=["small", "real", "tiled"])
def test_rows_begin_continue_and_decode_side_by_side(bench, rng, dims):
    layer = Layer(bench, rng, dims)
    layer.step([(3, 0, 1), (1, 0, 2), (5, 0, 40), (0, 17, 1), (2, 9, 3)])
    layer.step([(5, 40, 1), (3, 1, 5), (1, 2, 1)])
    layer.step([(1, 3, 1), (5, 41, 2), (3, 6, 1)])


def test_long_rows_meet_short_ones_at_every_border_of_a_chunk(bench, rng):
    layer = Layer(bench, rng, REAL)
    layer.step([(0, 0, 64), (1, 0, 65), (2, 0, 9), (3, 4, 63), (4, 9, 1), (5, 0, 130), (6, 0, 8)])
    layer.step([(5, 130, 1), (1, 65, 1), (0, 64, 17), (2, 9, 129)])
    layer.step([(0, 81, 1), (2, 138, 2)])


@pytest.mark.parametrize("dims", [SMALL, REAL, TILED], ids=["small", "real", "tiled"])
def test_rows_of_one_token_each(bench, rng, dims):
    layer = Layer(bench, rng, dims)
    layer.step([(0, 5, 1), (7, 0, 1), (3, 1, 1), (2, 200, 1)], dead=(3,))
    layer.step([(7, 1, 1), (0, 6, 1), (3, 2, 1)])
    layer.step([(7, 2, 1)])


def test_more_heads_of_rows_than_a_device_takes_at_once(bench, rng):
    layer = Layer(bench, rng, MANY)
    layer.step([(0, 5, 1), (7, 0, 1), (3, 1, 1), (2, 200, 1), (1, 3, 1), (4, 0, 1), (6, 9, 1)], dead=(3,))
    layer.step([(7, 1, 1), (0, 6, 1), (3, 2, 1), (1, 4, 1), (4, 1, 1)], dead=(0,))


def test_slot_that_is_used_again_begins_with_zeros(bench, rng):
    layer = Layer(bench, rng)
    layer.step([(4, 30, 7)])
    layer.step([(4, 0, 1)])
    layer.step([(4, 1, 1)])


def test_dead_slots_keep_what_they_remember(bench, rng):
    layer = Layer(bench, rng)
    layer.step([(2, 5, 3), (6, 0, 2), (1, 0, 4)], dead=(0, 1))


def test_state_outside_the_slot_is_refused(bench, rng):
    layer = Layer(bench, rng)
    b, d = layer.b, layer.dims
    b.state.recurrent_stride -= 128
    qkv, z, out = b.output(1, d.c, T), b.output(1, d.h * d.dv, T), b.output(1, d.h * d.dv, T)
    numbers = [b.output(1, d.h, T, 0, abi.PK_F32) for _ in range(2)]
    program = Program()
    program.delta((qkv, z, *numbers), layer.weights, out, layer.shape, EPS)
    with pytest.raises(PackError, match=r"op 0 \(delta\): the convolution's tail lies at bytes"):
        b.load(program)
