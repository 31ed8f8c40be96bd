"""Steps whose rows begin with the same pages: they say what a row with pages of its own says."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Heads, Program
from paddock_runner.pack.tensor import ELEMENT_BYTES, S, T
from test_sample import sampling
from test_step import RESULT, Input

V, D, COMMON = 128, 64, 272
"""Tokens, width of a head, tokens that all prompts begin with: 17 pages."""


class Attending:
    """Rows of an embedding table are q, k and v of two heads; the attention's output is the logits. Four slots of 20 pages of 16 tokens."""

    def __init__(self, bench, rng, page_bytes=0, kv=abi.PK_BF16):
        element = ELEMENT_BYTES[kv]
        sizes = StateSizes(4, 320, 16, 81, V, 320, 4, 4, 3, 3)
        self.b = b = bench(sizes=sizes, page_bytes=page_bytes or 2 * 16 * D * element)
        heads = Heads(2, 1, D, D, 0, 16 * D * element, kv)
        if kv == abi.PK_FP8_E4M3:
            heads = replace(heads, gains=(b.upload(np.array([[0.25, 0.25, 4, 32]]), abi.PK_F32), b.upload(np.array([[2 / 32, 1 / 32]]), abi.PK_F32)))
        (hidden, q), out, gathered, logits = b.projections(320, heads), b.output(320, V, T), b.output(4, V, S), b.output(4, V, S, 0, abi.PK_F32)
        program = Program()
        program.prepare()
        program.embed(b.upload(rng.normal(size=(V, 4 * D)), abi.PK_F32), hidden)
        program.qkv(hidden, q, heads, (None, None), None, 1e-6)
        program.attention(q, out, heads, 1.0)
        program.gather(out, gathered)
        program.copy(gathered, logits)
        program.sample(logits)
        program.commit()
        b.load(program, (2, 4, 320))
        self.seq = 0

    def step(self, **fields):
        """Tokens that the rows of one step draw, in order of rows."""
        self.seq += 1
        given = Input(self.seq, **fields)
        block = given.block()
        self.b.device.step(ctypes.addressof(block))
        assert self.b.device.wait(self.seq, 10_000_000)
        return np.frombuffer(bytes(self.b.device.results), RESULT).reshape(3, 4)[self.seq % 3]["token"][: len(given.rows)].tolist()

    @staticmethod
    def greedy(prompt_length):
        """Sampling of a slot."""
        return sampling(temperature=0.0, prompt_length=prompt_length)

    def start(self, slot, prompt, pages, known=0):
        """A new slot whose first `known` tokens lie in its pages already."""
        fields = {
            "news": [(slot, known, self.greedy(len(prompt)), [])],
            "texts": [(slot, 0, prompt)],
            "pages": [(slot, i, p) for i, p in enumerate(pages)],
        }
        return self.step(**fields, rows=[(slot, len(prompt) - known, 1)])


@pytest.mark.parametrize("kv", [abi.PK_BF16, abi.PK_F16, abi.PK_FP8_E4M3], ids=["bf16", "f16", "fp8"])
def test_rows_that_share_pages_say_what_rows_with_their_own_say(bench, rng, kv):
    m = Attending(bench, rng, kv=kv)
    common = rng.integers(0, V, COMMON).tolist()
    prompts = [common + rng.integers(0, V, n).tolist() for n in (25, 9)]
    own = [[1 + slot * 20 + i for i in range(20)] for slot in range(4)]
    m.start(0, prompts[0], own[0])
    shared = m.start(1, prompts[1], own[0][:17] + own[1][17:], known=COMMON)
    assert shared == m.start(2, prompts[1], own[2])
    m.start(3, prompts[0][:40], own[3])
    for rows in ((0, 1, 2), (2, 1, 0, 3), (1, 0), (2,), (0, 1, 2), (0, 1, 2, 3)):
        tokens = dict(zip(rows, m.step(rows=[(slot, 1, 1) for slot in rows]), strict=True))
        if {1, 2} <= set(rows):
            assert tokens[1] == tokens[2], rows
    for rows in ((0, 1, 2), (2,), (1, 0), (2, 1), (0,), (1, 0, 2)):  # beside a piece of a prompt
        more, at = rng.integers(0, V, 8).tolist(), int(m.b.get("length", 4)[3])
        tokens = dict(zip(rows, m.step(texts=[(3, at, more)], rows=[(slot, 1, 1) for slot in rows] + [(3, 8, 0)])[: len(rows)], strict=True))
        if {1, 2} <= set(rows):
            assert tokens[1] == tokens[2], rows
    history = m.b.get("tokens", 2 * 321, at=321).reshape(2, 321)[:, : COMMON + 9]
    np.testing.assert_array_equal(history[0], history[1])
