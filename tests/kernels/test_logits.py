"""Draws behind a product of logits: what such a step draws is what it draws from logits that lie there, whatever rows ask for and however many there are."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Program
from paddock_runner.pack.tensor import S, T
from test_sample import sampling
from test_step import RESULT, Input
from weights import Weight, random_weight

SLOTS, V, K, TOKENS = 130, 3008, 512, 300
ASKED = (
    {"temperature": 0.0},
    {"temperature": 0.0, "max_length": 2},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.0, "n_logprobs": 2},
    {"temperature": 0.0, "min_length": 3, "stop": (5,)},
    {"temperature": 1.0, "top_p": 0.9, "seed": 9},
)


class Head:
    """Tokens that are looked up, multiplied and drawn from; apart: logits are copied before rows draw."""

    def __init__(self, bench, table: np.ndarray, head: Weight, apart: bool):
        self.b = b = bench(sizes=StateSizes(SLOTS, 32, 8, SLOTS * 4 + 1, V, TOKENS, SLOTS, 4, 3, 3))
        hidden, last, logits = b.output(TOKENS, K, T), b.output(SLOTS, K, S), b.output(SLOTS, V, S, 0, abi.PK_F32)
        program = Program()
        program.prepare()
        program.embed(b.upload(table, abi.PK_BF16), hidden)
        program.gather(hidden, last)
        program.matmul(last, [head.upload(b)], logits)
        if apart:
            copied = b.output(SLOTS, V, S, 0, abi.PK_F32)
            program.copy(logits, copied)
            logits = copied
        program.sample(logits)
        program.commit()
        b.load(program, (16, 64, 128, TOKENS))
        self.seq = 0

    def step(self, held: Sequence[tuple[int, np.ndarray]] = (), **fields) -> np.ndarray:
        """The results of one step. held: slots whose rows wait for masks, and those."""
        self.seq += 1
        block = Input(self.seq, **fields).block()
        self.b.device.step(ctypes.addressof(block))
        if held:
            raw = struct.pack(f"<Qii{len(held)}i", self.seq, len(held), 0, *(slot for slot, _ in held)) + b"".join(mask.tobytes() for _, mask in held)
            masks = (ctypes.c_uint64 * (len(raw) // 8 + 1)).from_buffer_copy(raw.ljust(8 * (len(raw) // 8 + 1), b"\0"))
            self.b.device.finish(ctypes.addressof(masks))
        assert self.b.device.wait(self.seq, 20_000_000)
        return np.frombuffer(bytes(self.b.device.results), RESULT).reshape(3, SLOTS)[self.seq % 3][: len(fields["rows"])].copy()


def exactly(values: np.ndarray) -> Weight:
    """These whole numbers in BF16."""
    return Weight("bf16", V, K, (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(V, -1), values)


def starts(slots: range, prompt: np.ndarray, n: int) -> dict[str, list]:
    """Rows of slots that begin, n tokens each."""
    return {
        "news": [(s, 0, sampling(**({"prompt_length": n} | ASKED[s % len(ASKED)])), [(7, 50.0)] if s % 16 == 0 else []) for s in slots],
        "texts": [(s, 0, prompt[s, :n].tolist()) for s in slots],
        "pages": [(s, i, 1 + s * 4 + i) for s in slots for i in range(4)],
        "rows": [(s, n, abi.PK_ROW_SAMPLE) for s in slots],
    }


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "q8_0"])
def test_draws_are_those_from_logits_that_lie_there(bench, rng, format):
    table = rng.integers(-2, 3, (V, K)).astype(np.float64)
    table[9] = np.nan
    head = random_weight(format, V, K, rng)
    if format == "bf16":  # equal logits: the lowest wins
        values = rng.integers(-3, 4, (V, K)).astype(np.float64)
        values[V // 2 :] = values[: V - V // 2]
        head = exactly(values)
    prompt = rng.integers(10, V, (SLOTS, 4))
    prompt[3, 0], prompt[40, :2], prompt[64, 0] = 9, 9, 9
    seen = []
    for apart in (False, True):
        machine, results = Head(bench, table, head, apart), []
        for n, n_tokens in itertools.chain([(128, 1), (100, 1), (60, 1), (40, 1), (20, 1)], [(120, 2), (50, 2), (10, 2)]):
            results.append(machine.step(**starts(range(n), prompt, n_tokens)))
            alive = [r for r in range(n) if not results[-1]["flags"][r]]
            results.append(machine.step(rows=[(s, 1, abi.PK_ROW_SAMPLE if s % 9 else 0) for s in alive]))
        seen.append(results)
    for one, other in zip(*seen, strict=True):
        assert one.tobytes() == other.tobytes()
    first = seen[0][0]
    assert first["flags"][3] == first["flags"][64] == abi.PK_ROW_NAN
    if format == "bf16":
        logits = np.nan_to_num(table[prompt[:128, 0]]) @ head.values.T
        plain = [s for s in range(1, 128, 8) if s % 16 and s not in (3, 64)]
        assert first["token"][plain].tolist() == logits[plain].argmax(1).tolist()


@pytest.mark.parametrize("n", [48, 120])
def test_rows_that_wait_for_masks_draw_under_them_beside_others(bench, rng, n):
    """Every third row takes the largest logit that its mask leaves, the others the largest of all, in a step that is cut before it draws."""
    table, values = (rng.integers(-3, 4, (V, K)).astype(np.float64) for _ in range(2))
    prompt = rng.integers(10, V, (SLOTS, 1))
    allowed = rng.random((n, V)) < 0.02
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    machine, waiting, before = Head(bench, table, exactly(values), False), range(0, n, 3), prompt[:n, 0]
    fields = starts(range(n), prompt, 1)
    fields["news"] = [(s, 0, sampling(temperature=0.0, prompt_length=1, use_mask=int(s in waiting)), []) for s in range(n)]
    fields["rows"] = [(s, 1, abi.PK_ROW_SAMPLE | abi.PK_ROW_HELD * (s in waiting)) for s in range(n)]
    for _ in range(2):
        results = machine.step([(s, words[s]) for s in waiting], **fields)
        logits = table[before] @ values.T
        logits[::3][~allowed[::3]] = -np.inf
        assert not results["flags"].any() and results["token"].tolist() == logits.argmax(1).tolist()
        before, fields = results["token"], {"rows": fields["rows"]}
