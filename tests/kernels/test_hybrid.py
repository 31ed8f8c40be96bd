"""Hybrid layers of one row against the same beside another row: a pack may run a row alone in one launch, and must not be seen to."""

from __future__ import annotations

import numpy as np
import pytest
from harness import encode, rounded
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.device import f32_tensor
from paddock_runner.pack.program import DeltaShape, DeltaWeights, Epilogue, Heads, Program, Rotation, View
from paddock_runner.pack.tensor import ELEMENT_BYTES, T
from test_layer import check, gains
from weights import random_weight, scaled_fp8

WIDTH, HIDDEN, EPS, TAPS, HEAD = 512, 768, 1e-6, 4, 128
N_HEADS, WIDE, TURNED = 6, 256, 64
STATE = 4 * HEAD * HEAD
N_LAYERS = 3
"""The second has attention whose outputs are gated, six heads of 256 on one of keys and values; the others have a gated delta net."""


class Hybrid:
    """Layers and their feed-forwards, all on one residual; `records` are functions that append one record each."""

    def __init__(self, bench, rng: np.random.Generator, name: str, n_keys: int, n_values: int, is_tiled: bool, kv: int = abi.PK_BF16) -> None:
        self.name, self.shape = name, (n_keys, n_values, is_tiled)
        self.channels = (2 * n_keys + n_values) * HEAD
        self.layer_bytes = n_values * STATE + self.channels * 4 * (TAPS - 1)
        self.slot_bytes = N_LAYERS * self.layer_bytes
        page = 16 * WIDE * ELEMENT_BYTES[kv]
        self.b = b = bench(sizes=StateSizes(4, 512, 16, 4 * 32 + 1, 100, 64, 4, 8, 5, 3, self.slot_bytes), page_bytes=256 + 2 * page)
        b.state.recurrent_stride = self.slot_bytes
        b.scatter_pages(rng)
        is_fp8 = kv == abi.PK_FP8_E4M3
        self.rng, self.heads = rng, Heads(N_HEADS, 1, WIDE, WIDE, 256, 256 + page, kv, gains=gains(b, N_HEADS, 1, rng) if is_fp8 else None)
        self.pages = encode((rng.standard_normal(b.sizes.n_pages * b.page_bytes // ELEMENT_BYTES[kv]) * (64 if is_fp8 else 0.5)).astype(np.float32), kv)
        self.memory = (rng.standard_normal(4 * self.slot_bytes // 4) * 0.3).astype(np.float32)
        self.residual = b.output(2, WIDTH, T, format=abi.PK_F32)
        self.normed, hidden = b.output(2, WIDTH, T), b.output(2, HIDDEN, T)
        self.records = []
        add = self.records.append
        for i in range(N_LAYERS):
            norm = self.vector(WIDTH)
            add(lambda p, w=norm: p.norm(self.residual, w, self.normed, EPS))
            out = self.attention() if i == 1 else self.delta(i)
            o, norm = self.weight(WIDTH, out.cols), self.vector(WIDTH)
            add(lambda p, x=out, w=o: p.matmul(x, [w], self.residual, after=Epilogue(add=self.residual, scale=0.25)))
            add(lambda p, w=norm: p.norm(self.residual, w, self.normed, EPS))
            both, down = [self.weight(HIDDEN, WIDTH), self.weight(HIDDEN, WIDTH)], self.weight(WIDTH, HIDDEN)
            add(lambda p, w=both: p.matmul(self.normed, w, hidden, after=Epilogue(act="silu")))
            add(lambda p, w=down: p.matmul(hidden, [w], self.residual, after=Epilogue(add=self.residual, scale=0.25)))

    def weight(self, rows: int, cols: int, kind: str = ""):
        """A random matrix of the layers' format, or of another."""
        kind = kind or self.name
        made = scaled_fp8(kind, rows, cols, "block", self.rng) if kind == "fp8_e4m3" else random_weight(kind, rows, cols, self.rng)
        return made.upload(self.b)

    def vector(self, n: int, mean: float = 1.0):
        """Random numbers around a mean."""
        return f32_tensor(self.b.device, (mean + 0.2 * self.rng.standard_normal(n)).astype(np.float32).tolist(), "vectors")

    def delta(self, i: int):
        """Appends a gated delta net; what it leaves."""
        b, add, (n_keys, n_values, is_tiled) = self.b, self.records.append, self.shape
        values = n_values * HEAD
        mixed, numbers, out = b.output(2, self.channels + values, T), b.output(2, 2 * n_values, T, format=abi.PK_F32), b.output(2, values, T)
        qkv, z = mixed.columns(0, self.channels), mixed.columns(self.channels, values)
        heads = numbers.columns(0, n_values), numbers.columns(n_values, n_values)
        parts, small = [self.weight(self.channels, WIDTH), self.weight(values, WIDTH)], [self.weight(n_values, WIDTH, "bf16") for _ in range(2)]
        shape = DeltaShape(n_keys, n_values, HEAD, HEAD, TAPS, i * self.layer_bytes, i * self.layer_bytes + n_values * STATE, is_tiled)
        conv = b.upload(rounded(self.rng.normal(size=self.channels * TAPS) * 0.5, abi.PK_F32), abi.PK_F32)
        net = DeltaWeights(conv, self.vector(n_values, 0.0), self.vector(n_values, 0.0), self.vector(HEAD))
        add(lambda p: p.matmul(self.normed, parts, mixed))
        add(lambda p: p.matmul(self.normed, small, numbers))
        add(lambda p: p.delta((qkv, z, *heads), net, out, shape, EPS))
        return out

    def attention(self):
        """Appends attention with a gate; what it leaves."""
        b, add, width = self.b, self.records.append, N_HEADS * WIDE
        (qkv, q), gate, out = b.projections(2, self.heads), b.output(2, width, T), b.output(2, width, T)
        rope = Rotation(f32_tensor(b.device, [1e4 ** (-2 * i / TURNED) for i in range(TURNED // 2)], "vectors"), TURNED, "neox", 1.0)
        parts, gates, norms = [self.weight(n, WIDTH) for n in (width, WIDE, WIDE)], self.weight(width, WIDTH), (self.vector(WIDE), self.vector(WIDE))
        add(lambda p: p.matmul(self.normed, parts, qkv))
        add(lambda p: p.matmul(self.normed, [gates], gate))
        add(lambda p: p.qkv(qkv, q, self.heads, norms, rope, EPS))
        add(lambda p: p.attention(q, out, self.heads, WIDE**-0.5, View(0)))
        add(lambda p: p.sigmoid(out, gate, out))
        return out

    def run(self, rows: list[tuple[int, int]], starts: np.ndarray, dead: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Steps of these rows (slot, first position): the first row's residual after each, and what its slot remembers at the end."""
        b, found, program = self.b, [], Program()
        for record in self.records:
            record(program)
        b.device.write(b.state.recurrent, self.memory.tobytes())
        b.device.write(b.device.kv_address, self.pages.tobytes())
        for step, start in enumerate(starts):
            n = b.set_rows([(slot, position + step, 1) for slot, position in rows], dead=dead)
            b.device.write(self.residual.data, start[:n].astype(np.float32).tobytes())
            b.run(program, n)
            found.append(b.download(self.residual, 1)[0])
        raw = b.device.read(b.state.recurrent + rows[0][0] * self.slot_bytes, self.slot_bytes)
        return np.array(found), np.frombuffer(raw, np.float32)[None].copy()


@pytest.mark.parametrize("kv", [abi.PK_BF16, abi.PK_FP8_E4M3, abi.PK_F16], ids=["kept", "kept8", "kept16"])
@pytest.mark.parametrize("position", [0, 7, 300], ids=["first", "later", "long"])
@pytest.mark.parametrize(("name", "heads"), [("bf16", (2, 6, False)), ("fp8_e4m3", (2, 4, True)), ("q8_0", (4, 4, False)), ("q4_k", (2, 6, False))], ids=["bf16", "fp8", "q8_0", "q4_k"])
def test_layers_of_a_lone_row_equal_those_beside_another(bench, rng, level, name, heads, position, kv):
    if level > 1:
        pytest.skip("levels differ in products, which have tests of their own")
    layers = Hybrid(bench, rng, name, *heads, kv)
    if name not in layers.b.pack.description["formats"]:
        pytest.skip(f"this pack has no {name}")
    starts = rng.standard_normal((3, 2, WIDTH))
    wanted = layers.run([(2, position), (1, 9)], starts)
    got = layers.run([(2, position)], starts)
    for one, other in zip(got, wanted, strict=True):
        check(one, other, 6e-2)
    for _ in range(2):
        for one, other in zip(layers.run([(2, position)], starts), got, strict=True):
            np.testing.assert_array_equal(one, other)


def test_dead_row_leaves_its_slot_alone(bench, rng, level):
    if level > 1:
        pytest.skip("levels differ in products, which have tests of their own")
    layers = Hybrid(bench, rng, "bf16", 2, 4, False)
    got, memory = layers.run([(3, 5)], rng.standard_normal((1, 2, WIDTH)), dead=(0,))
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(memory[0], layers.memory.reshape(4, -1)[3])
