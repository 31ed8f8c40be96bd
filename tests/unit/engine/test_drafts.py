"""Guesses change the pace and never the answer: look-up, acceptance, who is guessed for, and a storm with an oracle that errs."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from paddock_runner.engine import drafts, loop
from paddock_runner.engine.guess import Guess, common, look_up
from paddock_runner.engine.policy import Policy
from paddock_runner.wire.messages import Done

from tests.soak.fake_device import alone
from tests.soak.rig import SIZES, Answer, Rig
from tests.soak.test_soak import Storm

BIG = replace(SIZES, n_slots=8, max_ctx_tokens=256, n_pages=513, max_step_tokens=256, max_step_rows=16)
EAGER = Policy(draft_gain=0.0, draft_gap_us=0.0)


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def test_what_followed_the_longest_known_ending_last_is_guessed() -> None:
    assert look_up(ids(1, 2, 3, 4, 9, 8, 1, 2, 3, 4), 2) == (ids(9, 8), 4)
    assert look_up(ids(3, 4, 7, 5, 3, 4, 6, 1, 3, 4), 1) == (ids(6), 6)
    assert look_up(ids(1, 2, 3, 4, 5), 4) == look_up(ids(1), 4) == look_up(b"", 4) == (b"", -1)


def test_a_source_that_told_right_goes_on_without_a_look() -> None:
    text = [5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 5, 6]
    guess = Guess()

    def text_of(first: int, end: int) -> bytes:
        return ids(*text[first:end])

    assert guess.go_on(text_of, 12, 3) == b""
    found, at = look_up(ids(*text), 3)
    assert (found, at) == (ids(7, 8, 9), 2)
    guess.found(at, 12)
    text += [7, 8, 9, 10]
    assert guess.go_on(text_of, 16, 3) == ids(11, 12, 1)
    text += [11, 99]
    assert guess.go_on(text_of, 18, 3) == b""


def test_bytes_that_only_look_like_tokens_are_not_taken() -> None:
    shifted = ids(1, 2, 0x0305 << 16, 5, 3, 5)
    at = shifted.rfind(ids(3, 5)[:4], 0, 20)
    assert look_up(shifted, 2)[0] == b"" or at % 4 == 0


def test_the_rate_follows_what_is_seen() -> None:
    guess = Guess()
    for _ in range(30):
        guess.see(8, 8)
    assert guess.rate > 0.99 and guess.pause() == 32
    for _ in range(30):
        guess.see(0, 8)
    assert guess.rate < 0.05
    assert common(ids(1, 2, 3), ids(1, 2, 4)) == 2


class Oracle:
    """Knows how each answer goes on, and is wrong now and then."""

    def __init__(self, seed: int, wrong: float) -> None:
        self.rng, self.wrong = random.Random(seed), wrong
        self.next: dict[bytes, list[int]] = {}

    def learn(self, prompt: list[int], answer: list[int]) -> None:
        full = prompt + answer
        for i in range(len(prompt), len(full)):
            self.next[ids(*full[max(0, i - 5) : i])] = full[i : i + 8]

    def __call__(self, text: bytes, n: int) -> tuple[bytes, int]:
        found = self.next.get(text[-20:], [])[:n]
        return ids(*(self.rng.randrange(480) if self.rng.random() < self.wrong else t for t in found)), -1


def expect(rig: Rig, oracle: Oracle, prompt: list[int], n: int, **more: object) -> tuple[Answer, list[int]]:
    answer = rig.ask(prompt, n, **more)
    ask = answer.ask
    expected = alone(prompt, n, rig.sizes.n_vocab, rig.sizes.max_ctx_tokens, ask.seed, ask.stop)
    oracle.learn(prompt, expected)
    return answer, expected


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_guessing_starts_by_itself_when_it_pays_and_takes_fewer_steps(run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(1, 0.0)
    monkeypatch.setattr(drafts, "look_up", oracle)
    rig = Rig(BIG, run_ahead=run_ahead, policy=Policy())
    answer, expected = expect(rig, oracle, list(range(10)), 200)
    rig.run()
    assert answer.tokens == expected and rig.engine.drafter.accepted > 60
    assert len(rig.device.log) < 150
    rig.assert_empty()
    rig.close()


def test_guessing_stops_when_guesses_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(1, 0.0)
    monkeypatch.setattr(drafts, "look_up", oracle)
    rig = Rig(BIG)
    answer, expected = expect(rig, oracle, list(range(10)), 200)
    while rig.engine.drafter.accepted < 20:
        rig.turn()
    oracle.wrong = 1.0
    while rig.engine.drafter.requests:
        rig.turn()
    assert rig.engine.slots.decode
    rig.run()
    assert answer.tokens == expected
    rig.close()


def test_a_stop_token_within_a_row_of_guesses_ends_the_answer_there(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(1, 0.0)
    monkeypatch.setattr(drafts, "look_up", oracle)
    for at in range(80, 92):
        rig = Rig(BIG, policy=EAGER)
        stop = alone(list(range(10)), 200, 1000, 256)[at]
        answer, expected = expect(rig, oracle, list(range(10)), 200, stop=(stop,))
        rig.run()
        assert answer.tokens == expected and answer.done.output_tokens == len(expected)
        rig.assert_empty()
        rig.close()


def test_nobody_is_guessed_for_without_the_packs_support() -> None:
    rig = Rig(BIG, policy=EAGER)
    rig.engine.drafter.is_on = False
    answer = rig.ask(list(range(10)), 60)
    rig.run()
    assert answer.tokens == alone(list(range(10)), 60, 1000, 256) and not rig.engine.drafter.drafted
    rig.close()


STORMS = [(0, 160, 0.15, 0), (2, 160, 0.15, 0), (0, 40, 0.15, 0), *((seed % 3, 160 - 30 * (seed == 4), 0.8, seed) for seed in range(1, 6))]


@pytest.mark.parametrize("n_snapshots", [0, 12])
@pytest.mark.parametrize(("run_ahead", "n_pages", "masked_share", "seed"), STORMS)
def test_a_storm_with_an_oracle_that_errs_answers_right(run_ahead: int, n_pages: int, masked_share: float, seed: int, n_snapshots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """n_snapshots: places for recurrent states, of a model that has them."""
    oracle = Oracle(run_ahead, 0.2)
    monkeypatch.setattr(drafts, "look_up", oracle)
    monkeypatch.setattr(loop, "CONSIDER_EVERY", 1)
    scene = Storm(310 + run_ahead + 10 * seed, run_ahead, n_pages, 1, n_snapshots)
    scene.masked_share = masked_share
    scene.rig.engine.policy = replace(scene.rig.engine.policy, draft_gain=0.0, draft_gap_us=0.0)
    scene.rig.engine.drafter.is_on = True
    ask = scene.ask

    def learning() -> None:
        ask()
        answer = list(scene.rig.answers.values())[-1]
        oracle.learn(list(memoryview(answer.ask.prompt)), scene.expected[answer.ask.ask_id])

    scene.ask = learning  # type: ignore[method-assign]
    scene.run(200)
    scene.judge()
    assert scene.rig.engine.drafter.drafted > 0 or n_pages < 100
    accepted = sum(a.end.accepted_tokens for a in scene.rig.answers.values() if isinstance(a.end, Done) and a.ask.use_mask)
    assert accepted > 0 or masked_share < 0.5, "guesses of answers under masks are right, too"
    scene.rig.close()



def test_who_had_a_slot_before_tells_nothing_about_the_next() -> None:
    rig = Rig(BIG, run_ahead=2)
    rig.ask(list(range(10)), 100)
    rig.run()
    second = rig.ask(list(range(20, 30)), 30)
    while second.end is None:
        rig.turn()
        for request in filter(None, rig.engine.slots.request_of):
            assert rig.engine.given_tokens(request) <= 30 and rig.engine.given_tokens(request) >= len(second.tokens) - 2
    rig.close()
