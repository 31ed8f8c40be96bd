"""Answers with guessed tokens, through the engine and the real pack, are the answers without, greedy and drawn."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from paddock_runner.engine import drafts
from paddock_runner.engine.policy import Policy

from tests.golden.test_batches import Place
from tests.golden.test_tiny import FAMILIES
from tests.soak.rig import Rig

EAGER = Policy(draft_gain=0.0, draft_tokens=(4,))


class Oracle:
    """Knows the answers that were given without guesses, and is wrong at every fifth token."""

    def __init__(self) -> None:
        self.next: dict[bytes, list[int]] = {}

    def learn(self, tokens: list[int]) -> None:
        for i in range(8, len(tokens)):
            self.next[array("i", tokens[max(0, i - 8) : i]).tobytes()] = tokens[i : i + 8]

    def __call__(self, text: bytes, n: int) -> tuple[bytes, int]:
        found = self.next.get(text[-32:], [])[:n]
        return array("i", [t if t % 5 else (t + 1) % 90 for t in found]).tobytes(), -1


def answers(place: Place, guesses: bool, temperature: float, oracle: Oracle) -> tuple[list[list[int]], int]:
    rig = Rig(replace(place.sizes), device=place.device, policy=EAGER)
    rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(place.device.done[0])
    rig.engine.drafter.is_on = guesses
    loop = [5, 6, 7, 8] * 4
    found = [rig.ask(loop[: 8 + i], 40, temperature=temperature, top_k=2, seed=i, repetition_penalty=1.0 + 0.2 * (i == 1)) for i in range(2)]
    rig.run()
    rig.assert_empty()
    rig.close()
    for i, x in enumerate(found):
        oracle.learn(loop[: 8 + i] + x.tokens)
    return [x.tokens for x in found], rig.engine.drafter.accepted


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen4-exp"])
def test_guesses_do_not_change_an_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(name, max_guesses=4)
    try:
        accepted = 0
        for temperature in (0.0, 0.7):
            oracle = Oracle()
            monkeypatch.setattr(drafts, "look_up", oracle)
            plain, none = answers(place, False, temperature, oracle)
            guessed, n = answers(place, True, temperature, oracle)
            assert guessed == plain and none == 0
            accepted += n
        assert accepted > 0
    finally:
        place.device.close()
