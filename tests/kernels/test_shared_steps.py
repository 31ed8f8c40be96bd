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
        self.kv, element = kv, ELEMENT_BYTES[kv]
        sizes = StateSizes(4, 320, 16, 81, V, 320, 4, 4, 3, 3)
        self.b = b = bench(sizes=sizes, page_bytes=page_bytes or 2 * 16 * D * element)
        heads = Heads(2, 1, D, D, 0, 16 * D * element, kv)
        if kv == abi.PK_FP8_E4M3:
            heads = replace(heads, gains=(b.upload(np.array([[0.25, 0.25, 4, 32]]), abi.PK_F32), b.upload(np.array([[2 / 32, 1 / 32]]), abi.PK_F32)))
        (hidden, q), out, gathered, logits = b.projections(320, heads), b.output(320, V, T), b.output(4, V, S), b.output(4, V, S, 0, abi.PK_F32)
        program = Program()
        program.prepare()
        self.table = rng.normal(size=(V, 4 * D))
        program.embed(b.upload(self.table, abi.PK_F32), hidden)
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

    def have_parted(self, one, other):
        """Whether two slots' tokens differ where both have some. Raises: AssertionError where that is more than a tie of what pages and the device's BF16 round."""
        lengths, texts = self.b.get("length", 4), self.b.get("tokens", 4 * 321).reshape(4, 321)
        n = min(lengths[one], lengths[other])
        apart = np.flatnonzero(texts[one, :n] != texts[other, :n])
        if not len(apart):
            return False
        x = self.table[texts[one, : apart[0]]]
        scores = np.einsum("hd,td->ht", x[-1, : 2 * D].reshape(2, D), x[:, 2 * D : 3 * D])
        weights = np.exp(scores - scores.max(1, keepdims=True))
        logits = (weights / weights.sum(1, keepdims=True) @ x[:, 3 * D :]).ravel()
        drawn = logits[texts[[one, other], apart[0]]]
        slack = 2**-2 if self.kv == abi.PK_FP8_E4M3 else 2**-5
        assert min(drawn) > max(logits) * (1 - slack), (apart[0], texts[[one, other], apart[0]], drawn, max(logits))
        return True

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
        m.step(rows=[(slot, 1, 1) for slot in rows])
        if m.have_parted(1, 2):
            return
    for rows in ((0, 1, 2), (2,), (1, 0), (2, 1), (0,), (1, 0, 2)):  # beside a piece of a prompt
        more, at = rng.integers(0, V, 8).tolist(), int(m.b.get("length", 4)[3])
        m.step(texts=[(3, at, more)], rows=[(slot, 1, 1) for slot in rows] + [(3, 8, 0)])
        if m.have_parted(1, 2):
            return
    assert m.b.get("length", 4)[[1, 2]].tolist() == [COMMON + 9 + 9] * 2
