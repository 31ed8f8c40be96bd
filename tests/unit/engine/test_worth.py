"""Guesses pay where text repeats itself and cost next to nothing where it does not, at the prices of an H200 (8B in FP8, bench.gpu_steps)."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import pytest
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.worth import Worth, expected

from tests.conftest import CHECKOUT
from tests.soak import fake_device
from tests.soak.rig import SIZES, Rig

ROOM = replace(SIZES, n_slots=16, max_ctx_tokens=4096, page_tokens=32, n_pages=2049, n_vocab=1 << 20, max_step_tokens=4096, max_step_rows=80, n_results=8)
PLAIN_US = {1: 2710, 2: 4233, 4: 4524, 8: 4622, 16: 4746}
GAP_US, TOKEN_US = 120, 45


class Priced(fake_device.FakeDevice):
    """A device whose steps take what they take on the card: the first guess costs a lone row the kernel that runs one row in one launch."""

    def __init__(self) -> None:
        super().__init__(ROOM, 2)

    def clock(self) -> int:
        return self.now_ns

    def run_one(self) -> None:
        before, is_step = self.now_ns, isinstance(self.pending[0], bytes)
        super().run_one()
        if is_step:
            rows = self.rows[-1]
            n_rows, n_more = len(rows), sum(n - 1 for _, n, _ in rows)
            us = PLAIN_US[min(n for n in PLAIN_US if n >= n_rows)]
            if any(flags & 32 for _, _, flags in rows):
                us = (us if n_rows > 1 or not n_more else 4370) + GAP_US
            self.now_ns = before + 1000 * (us + TOKEN_US * n_more)


def words(name: str, n: int, change: float = 0.0, seed: int = 1) -> list[int]:
    """The first words of a file as tokens; some of them changed."""
    rng = random.Random(seed)
    text = (CHECKOUT / name).read_text().split()[:n]
    return [1 + (rng.randrange(1 << 19) if rng.random() < change else zlib.crc32(word.encode()) % (1 << 19)) for word in text]


def gain(prompt: list[int], answer: list[int], n: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """How many times quicker n answers are with guesses."""
    times, scripts = [], {k: [900_000 + k, *prompt, *answer] for k in range(n)}
    monkeypatch.setattr(fake_device, "draw", lambda kv, seed, position, *rest: scripts[seed][position] if position < len(scripts[seed]) else 7)
    for rows in (0, 16):
        device = Priced()
        rig = Rig(ROOM, device=device, policy=Policy(draft_rows=rows, gather_ms=0.0, lead_ms=0.0))
        asked = [rig.ask(scripts[k][: 1 + len(prompt)], len(answer), seed=k, temperature=1.0) for k in range(n)]
        while not all(x.tokens for x in asked):
            rig.turn()
        begun = device.now_ns
        rig.run(check=False)
        assert all(x.tokens == answer for x in asked)
        times.append(device.now_ns - begun)
        rig.close()
    return times[0] / times[1]


@pytest.mark.parametrize("n", [1, 8])
def test_prose_loses_no_more_than_two_in_a_hundred(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = words("docs/explanation/scheduling.md", 1600)
    assert gain(text[:900], text[900:], n, monkeypatch) > 0.98


@pytest.mark.parametrize("n", [1, 8])
def test_a_file_that_is_written_again_with_edits_comes_more_than_twice_as_quickly(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "runner/paddock_runner/engine/slots.py"
    assert gain(words(name, 900), words(name, 500, 0.04), n, monkeypatch) > 2.0


def test_guesses_cost_what_steps_with_them_were_seen_to_take_more() -> None:
    worth = Worth()
    assert worth.plain_us(2, 70.0) == 70.0 and worth.extra_us(2, 4, 9.0) == 9.0
    for seq, us in ((4, 300.0), (5, 100.0), (7, 300.0)):
        worth.see_plain(seq, 2, us)
    for us in (150.0, 900.0, 149.0, 150.0, 151.0):
        worth.see(2, 12, us)
    worth.see(3, 12, 150.0)
    worth.see(2, 1, 950.0)
    assert worth.extra_us(2, 1, 30.0) == 30.0
    assert worth.extra_us(2, 16, 0.0) == worth.extra_us(2, 9, 0.0) == 50.0 and worth.extra_us(3, 12, 1.0) == 1.0
    worth.fade(2, 16)
    assert 49.0 < worth.extra_us(2, 12, 0.0) < 50.0
    assert expected(0.5, 3) == 0.875 and expected(1.0, 4) == 4
