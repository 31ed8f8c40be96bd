"""A device in two parts: steps of the part say what steps of the whole say, beside other steps the same bits as alone, and steps that give way stay in order."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from harness import Bench, from_bf16
from paddock_runner.errors import PackError, UnsupportedError
from paddock_runner.memory.part import part_arrays, part_sizes
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device, f32_tensor
from paddock_runner.pack.program import Epilogue, Heads, Program, Rotation
from paddock_runner.pack.tensor import S, T
from test_layer import check
from test_sample import sampling
from test_step import RESULT, Input
from weights import random_weight, scaled_fp8

SIDE, HIDDEN, VOCABULARY, EPS, PAGE = 512, 1024, 304, 1e-6, 16
SLOT_PAGES, LONG = 40, 8
"""Pages of a slot, and the slot whose prompt is long."""
SIZES = StateSizes(9, SLOT_PAGES * PAGE, PAGE, 9 * SLOT_PAGES + 1, VOCABULARY, 256, 9, 8, 5, 4, part_processors=1, part_tokens=128)
BUCKETS = (1, 2, 4, 8, 16, 128, 256)


class Side:
    """A program of one of both contexts."""

    def __init__(self, bench: Bench, device: Device, sizes: StateSizes) -> None:
        self.b, self.device, self.sizes, self.seq = bench, device, sizes, 0

    def send(self, **fields: object) -> int:
        """Gives a step; its number."""
        self.seq += 1
        block = Input(self.seq, **fields).block()
        self.device.step(ctypes.addressof(block))
        ctypes.memset(ctypes.addressof(block), 0, ctypes.sizeof(block))  # it has been read
        return self.seq

    def wait(self, seq: int) -> list[int]:
        """Tokens that the rows of a step drew."""
        assert self.device.wait(seq, 20_000_000)
        n = self.sizes.max_step_rows
        return np.frombuffer(bytes(self.device.results), RESULT).reshape(-1, n)[seq % self.sizes.n_results]["token"].tolist()

    def step(self, **fields: object) -> list[int]:
        """A step and its tokens."""
        return self.wait(self.send(**fields))


class Parted:
    """Two layers and a head on a device and on its part: over the same weights, with activations of their own."""

    def __init__(self, bench, rng, kind="bf16", sizes=SIZES, side=SIDE, heads=4, n_layers=2, n_left=0):
        kv, width = 2, 128
        self.side, page_bytes = side, n_layers * 2 * kv * PAGE * width * 2
        self.b = b = bench(sizes=sizes, page_bytes=page_bytes)
        n = b.device.facts.n_processors if not b.device.facts.is_host else b.n_threads
        part = b.device.part(max(1, n - n_left if n_left else int(0.7 * n)))
        own = part_sizes(sizes)
        names = ("n_slots", "max_ctx_tokens", "page_tokens", "slot_pages", "n_vocab", "max_step_tokens", "max_step_rows", "max_bias", "max_top", "n_results")
        part.set_state({name: getattr(own, name) for name in names} | {"kv_page_stride": page_bytes}, *part_arrays(sizes), b.device)
        self.heads = [Heads(heads, kv, width, width, 2 * i * kv * PAGE * width * 2, (2 * i + 1) * kv * PAGE * width * 2, abi.PK_BF16) for i in range(n_layers)]
        made = [self._layer(rng, kind, heads * width, kv * width) for _ in range(n_layers)]
        ends = self._vector(rng, side), self._weight(rng, "bf16", VOCABULARY, side), b.upload(rng.standard_normal((VOCABULARY, side)), abi.PK_F32)
        self.residuals = []
        for device, each in ((b.device, sizes), (part, own)):
            program = self._program(made, ends, each)
            if device is b.device:
                b.load(program, tuple(k for k in BUCKETS if k <= sizes.max_step_tokens))
                continue
            n_bytes = device.workspace_bytes(program)
            device.load(program, [k for k in BUCKETS if k <= own.max_step_tokens], (b.device.alloc(max(n_bytes, 64), "workspace"), n_bytes))
        self.loop, self.part = Side(b, b.device, sizes), Side(b, part, own)

    def _vector(self, rng, n):
        return f32_tensor(self.b.device, (1 + 0.2 * rng.standard_normal(n)).tolist(), "vectors")

    def _weight(self, rng, kind, rows, cols):
        made = scaled_fp8(kind, rows, cols, "block", rng) if kind == "fp8_e4m3" else random_weight(kind, rows, cols, rng, negative=0.5, size=1 / 16)
        return made.upload(self.b)

    def _layer(self, rng, kind, n_q, n_kv):
        side = self.side
        norms = [self._vector(rng, n) for n in (side, side, 128, 128)]
        return norms, [self._weight(rng, kind, *shape) for shape in ((n_q, side), (n_kv, side), (n_kv, side), (side, n_q), (HIDDEN, side), (HIDDEN, side), (side, HIDDEN))]

    def _program(self, layers, ends, sizes):
        b, n, side = self.b, sizes.max_step_tokens, self.side
        residual, normed, hidden, (qkv, q), out = b.output(n, side, T, format=abi.PK_F32), b.output(n, side, T), b.output(n, HIDDEN, T), b.projections(n, self.heads[0]), b.output(n, 128 * self.heads[0].n_heads, T)
        self.residuals.append(residual)
        last, last_normed, logits = b.output(sizes.max_step_rows, side, S, format=abi.PK_F32), b.output(sizes.max_step_rows, side, S), b.output(sizes.max_step_rows, VOCABULARY, S, format=abi.PK_F32)
        rope = Rotation(f32_tensor(b.device, [1e4 ** (-2 * i / 128) for i in range(64)], "vectors"), 128, "neox", 1.0)
        p = Program()
        p.prepare()
        p.embed(ends[2], residual)
        for heads, (norms, (wq, wk, wv, wo, gate, up, down)) in zip(self.heads, layers, strict=True):
            p.norm(residual, norms[0], normed, EPS)
            p.matmul(normed, [wq, wk, wv], qkv)
            p.qkv(qkv, q, heads, (norms[2], norms[3]), rope, EPS)
            p.attention(q, out, heads, 128**-0.5)
            p.matmul(out, [wo], residual, after=Epilogue(add=residual, scale=0.25))
            p.norm(residual, norms[1], normed, EPS)
            p.matmul(normed, [gate, up], hidden, after=Epilogue(act="silu"))
            p.matmul(hidden, [down], residual, after=Epilogue(add=residual, scale=0.25))
        p.gather(residual, last)
        p.norm(last, ends[0], last_normed, EPS)
        p.matmul(last_normed, [ends[1]], logits)
        p.sample(logits)
        p.commit()
        return p

    @staticmethod
    def start(slot, prompt, n, flags=1, use_mask=0):
        """Fields of a step in which a slot begins with the first n tokens of its prompt."""
        return {
            "news": [(slot, 0, sampling(temperature=0.0, prompt_length=len(prompt), max_length=SIZES.max_ctx_tokens, use_mask=use_mask), [])],
            "texts": [(slot, 0, prompt)],
            "pages": [(slot, i, 1 + slot * SLOT_PAGES + i) for i in range(SLOT_PAGES)],
            "rows": [(slot, n, flags)],
        }

    def keys(self, slot, n):
        """Pages of a slot's first n tokens, whole ones: how tokens lie in one is the pack's business."""
        n_pages, at = n // PAGE, self.b.device.kv_address + (1 + slot * SLOT_PAGES) * self.b.page_bytes
        return np.frombuffer(self.b.device.read(at, n_pages * self.b.page_bytes), np.uint16).reshape(-1, PAGE * 128).copy()

    def begin_streams(self, prompts):
        """All streams anew in one step, and the first tokens they draw."""
        fields = [self.start(slot, prompt, len(prompt)) for slot, prompt in enumerate(prompts)]
        return self.loop.step(**{name: [x for one in fields for x in one[name]] for name in fields[0]})

    def begin_long(self, prompt):
        """The long prompt's first tokens, in a step of the loop, as the engine does."""
        self.loop.step(**self.start(LONG, prompt, 16, flags=0))


def tokens(rng, n):
    """A prompt."""
    return rng.integers(0, VOCABULARY, n).tolist()


def near(got, wanted):
    """Keys are nearly the same."""
    check(from_bf16(got), from_bf16(wanted), 6e-2)


def only_once(level):
    """Parts are the same at all levels."""
    if level > 1:
        pytest.skip("levels differ in products, which have tests of their own")


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3", "q4_k"])
def test_a_prompt_that_the_part_reads_leaves_the_keys_that_the_whole_device_leaves(bench, rng, level, kind):
    only_once(level)
    m = Parted(bench, rng, kind)
    prompt = tokens(rng, 336)
    m.loop.step(**m.start(0, prompt, 208, flags=0))
    m.loop.step(rows=[(0, 128, 0)])
    wanted, found = m.keys(0, 336), []
    for _ in range(2):
        m.begin_long(prompt)
        for n in (128, 64, 128):
            m.part.step(rows=[(LONG, n, 0)])
        found.append(m.keys(LONG, 336))
    near(found[0], wanted)
    np.testing.assert_array_equal(found[1], found[0])
    assert m.b.get("length", 9).tolist()[LONG] == 336 and 0 <= m.loop.step(texts=[(LONG, 336, [5])], rows=[(LONG, 1, 1)])[0] < VOCABULARY


@pytest.mark.parametrize("n_rows", [2, 4, 8, 1], ids="b{}".format)
@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3", "q4_k"])
def test_steps_that_give_way_leave_the_keys_that_others_leave(bench, rng, level, kind, n_rows):
    only_once(level)
    m = Parted(bench, rng, kind)
    prompts, more = [tokens(rng, 20 + slot) for slot in range(n_rows)], [tokens(rng, n_rows) for _ in range(16)]
    found = []
    for is_on in (False, True, True, False):
        m.begin_streams([prompt[:16] for prompt in prompts])
        m.b.device.give_way(is_on)
        lengths = m.b.get("length", 9)
        for i, of in enumerate(more):
            m.loop.send(texts=[(slot, int(lengths[slot]) + i, [token]) for slot, token in enumerate(of)], rows=[(slot, 1, 0) for slot in range(n_rows)])
            m.loop.wait(m.loop.seq - 1)
        m.loop.wait(m.loop.seq)
        m.b.device.give_way(False)
        found.append(np.stack([m.keys(slot, 32) for slot in range(n_rows)]))
    near(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[1])
    np.testing.assert_array_equal(found[3], found[0])


@pytest.mark.parametrize("side", [8192, 512])
def test_a_step_of_128_rows_on_few_processors_says_what_it_says_on_all(bench, rng, level, side):
    """With so few, attention's partial sums take less of the scratch than what the norm behind it leaves narrowed for the next product."""
    only_once(level)
    sizes = StateSizes(128, 2 * PAGE, PAGE, 2 * 128 + 1, VOCABULARY, 128, 128, 8, 5, 4, part_processors=1, part_tokens=128)
    m = Parted(bench, rng, "fp8_e4m3", sizes, side, 8, 1, n_left=16)
    news = [(slot, 0, sampling(temperature=0.0, prompt_length=1, max_length=sizes.max_ctx_tokens), []) for slot in range(128)]
    pages, rows = [(slot, i, 1 + 2 * slot + i) for slot in range(128) for i in range(2)], [(slot, 1, 0) for slot in range(128)]
    drawn = [[tokens(rng, 1) for _ in range(128)] for _ in range(3)]
    found = []
    for is_on in (False, True, True, True):
        m.loop.step(news=news, pages=pages, texts=[(slot, 0, drawn[0][slot]) for slot in range(128)], rows=rows)
        m.b.device.give_way(is_on)
        for i, each in enumerate(drawn[1:]):
            m.loop.step(texts=[(slot, 1 + i, each[slot]) for slot in range(128)], rows=rows)
        m.b.device.give_way(False)
        found.append(m.b.download(m.residuals[0], 128))
    assert np.isfinite(found[0]).all() and np.linalg.norm(found[1] - found[0]) <= 0.1 * np.linalg.norm(found[0])
    for again in found[2:]:
        np.testing.assert_array_equal(again, found[1])


def test_both_sides_at_once_say_what_each_says_alone(bench, rng, level, pack):
    only_once(level)
    m = Parted(bench, rng)
    prompts, prompt = [tokens(rng, 24 + slot) for slot in range(4)], tokens(rng, 416)
    rows, chunks = [(slot, 1, 1) for slot in range(4)], [128, 96, 128, 48]

    def turn(is_at_once):
        m.begin_streams(prompts)
        m.begin_long(prompt)
        m.b.device.give_way(True)
        drawn, left = [], list(chunks)
        for _ in range(16):
            if left and (not is_at_once or m.part.device.done[0] == m.part.seq):
                m.part.send(rows=[(LONG, left.pop(0), 0)])
                if not is_at_once:
                    m.part.wait(m.part.seq)
            drawn.append(m.loop.step(rows=rows)[:4])
        for n in left:
            m.part.wait(m.part.seq)
            m.part.send(rows=[(LONG, n, 0)])
        m.part.wait(m.part.seq)
        m.b.device.give_way(False)
        return np.array(drawn), m.keys(LONG, 416), *(m.keys(slot, 32) for slot in range(4))

    alone = turn(False)
    for _ in range(3 if pack.description["pack"] == "cpu" else 50):
        for got, wanted in zip(turn(True), alone, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_steps_stay_in_order_wherever_they_run(bench, rng, level):
    only_once(level)
    m = Parted(bench, rng)
    prompts, prompt = [tokens(rng, 24 + slot) for slot in range(4)], tokens(rng, 416)

    def turn():
        m.begin_streams(prompts)
        m.begin_long(prompt)
        for i in range(24):
            if i % 3 == 0:
                m.b.device.give_way(i % 2 == 0)
            if i % 8 == 1:
                m.part.wait(m.part.seq)
                m.part.send(rows=[(LONG, 96, 0)])
            m.loop.send(rows=[(slot, 1, 1) for slot in range(4)])
            m.loop.wait(m.loop.seq - 1)
        m.loop.wait(m.loop.seq)
        m.part.wait(m.part.seq)
        m.b.device.give_way(False)
        return m.b.get("tokens", 4 * (SIZES.max_ctx_tokens + 1)).reshape(4, -1)[:, :49], m.keys(LONG, 304), m.b.get("length", 9)

    first = turn()
    assert first[2][:4].tolist() == [48, 49, 50, 51] and first[2][LONG] == 304
    for got, wanted in zip(turn(), first, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_held_rows_are_finished_where_they_began(bench, rng, level):
    only_once(level)
    m = Parted(bench, rng)
    fields = [m.start(0, tokens(rng, 20), 20, flags=0, use_mask=1), m.start(1, tokens(rng, 30), 30)]
    m.loop.step(**{name: fields[0][name] + fields[1][name] for name in fields[0]})
    words = -(-VOCABULARY // 32)
    for i, (is_on, then) in enumerate(((True, True), (True, False), (False, True), (False, False))):
        m.b.device.give_way(is_on)
        seq = m.loop.send(texts=[(0, 20 + i, [5])], rows=[(0, 1, abi.PK_ROW_SAMPLE | abi.PK_ROW_HELD), (1, 1, abi.PK_ROW_SAMPLE)])
        m.b.device.give_way(then)
        raw = struct.pack("<Qiii", seq, 1, 0, 0) + struct.pack(f"<{words}I", 1 << 7 + i, *[0] * (words - 1))
        block = (ctypes.c_uint64 * (len(raw) // 8 + 1)).from_buffer_copy(raw.ljust(8 * (len(raw) // 8 + 1), b"\0"))
        m.b.device.finish(ctypes.addressof(block))
        assert m.loop.wait(seq)[0] == 7 + i
    m.b.device.give_way(False)
    with pytest.raises(PackError, match="wait for no masks"):
        m.begin_long(tokens(rng, 64))
        m.part.send(rows=[(LONG, 16, abi.PK_ROW_SAMPLE | abi.PK_ROW_HELD)])


def test_what_cannot_be_parted_is_refused(bench, rng, level):
    only_once(level)
    b = bench(sizes=SIZES)
    with pytest.raises(PackError, match="this context was not parted"):
        b.device.give_way(True)
    with pytest.raises(PackError, match="n_processors is 0, it must be 1 to"):
        b.device.part(0)
    part = b.device.part(1)
    assert b.device.part(1) is part
    with pytest.raises(PackError, match="was parted before"):
        b.device.pack.call("pk_part", b.device._ctx, 1, ctypes.byref(ctypes.c_void_p()))
    with pytest.raises(PackError, match="is a part itself"):
        part.part(1)
    with pytest.raises(PackError, match="was not parted"):
        part.give_way(True)
    with pytest.raises(PackError, match="is_on is 2, it must be 0 or 1"):
        b.device.pack.call("pk_give_way", b.device._ctx, 2)
    with pytest.raises(UnsupportedError, match="part:"):
        bench(sizes=SIZES, is_invariant=True).device.part(1)
