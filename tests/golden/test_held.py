"""Answers that are held to masks, through the engine and the real pack: every token is allowed, and neither company, guesses nor late masks change one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from paddock_runner.engine import drafts, masks
from paddock_runner.engine.policy import Policy
from paddock_runner.wire.guesses import Guessed, Walked
from paddock_runner.wire.messages import MaskUpdate
from paddock_runner.wire.port import FrontPort

from tests.golden.drafted import folder
from tests.golden.test_batches import Place
from tests.golden.test_drafts import Oracle
from tests.golden.test_mtp import Place as Drafted
from tests.soak.rig import Answer, Rig

pytestmark = pytest.mark.timeout(60)
EAGER = Policy(draft_gain=0.0, draft_tokens=(4,))
N_TOKENS = 24


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent states are made anew after a short wait, and guesses pay whatever the clock says."""
    monkeypatch.setattr(masks, "RESTART_NS", 1_000_000)
    monkeypatch.setattr(drafts.Drafter, "best", lambda self, rates, n_rows: (2.0, max(self._counts)))


class Grammar:
    """What may follow depends on the last token and on how many there are; now and then only one can, several times in a row."""

    def __init__(self, n_vocab: int, seed: int) -> None:
        self._n, self._seed = n_vocab, seed

    def allowed(self, tokens: list[int]) -> int:
        """Bit i: token i may follow."""
        if self._seed < 0:
            return (1 << self._n) - 1
        at = len(tokens)
        rng = random.Random(f"{self._seed} {at} {tokens[-1:]}")
        if at % 9 < 4:
            return 1 << (random.Random(at // 9).randrange(90) + at) % 90
        return sum(1 << i for i in range(self._n) if rng.random() < 0.5) | 1

    def update(self, ask_id: int, tokens: list[int]) -> tuple[MaskUpdate, int]:
        """The mask behind these tokens and those that are sure to follow, and the output index behind it."""
        sure = list[int]()
        while (mask := self.allowed(tokens + sure)).bit_count() == 1:
            sure.append(mask.bit_length() - 1)
        return MaskUpdate(ask_id, len(tokens), self.words(mask), sure), len(tokens) + len(sure) + 1

    def words(self, mask: int) -> bytes:
        """A mask as it is sent."""
        return mask.to_bytes(4 * ((self._n + 31) // 32), "little")


class Front:
    """Sends masks when their tokens come, or `late` tokens of anybody later."""

    def __init__(self, rig: Rig, late: random.Random | None) -> None:
        self._rig, self._late = rig, late
        self._grammars: dict[int, tuple[Grammar, Answer]] = {}
        self._sent: dict[int, int] = {}
        self._waiting: list[tuple[int, int]] = []
        self.n_walked = self.n_refused = 0
        rig.on_token, rig.on_guess = self.token, self.guess

    def hold(self, answer: Answer, grammar: Grammar) -> None:
        self._grammars[answer.ask.ask_id] = grammar, answer
        self._send(answer.ask.ask_id)

    def token(self, answer: Answer) -> None:
        self._waiting = [(n - 1, ask_id) for n, ask_id in self._waiting]
        if answer.ask.ask_id in self._grammars:
            self._waiting.append((self._late.choice((0, 0, 0, 3)) if self._late else 0, answer.ask.ask_id))
        self.flush(0)

    def flush(self, most: int) -> None:
        for n, ask_id in self._waiting[:]:
            if n <= most:
                self._waiting.remove((n, ask_id))
                self._send(ask_id)

    def guess(self, port: FrontPort, guess: Guessed) -> None:
        """Says how far the grammar allows a guess, where the tokens before it have been walked in time; now and then it says nothing."""
        grammar, answer = self._grammars[guess.ask_id]
        tokens, first, places = answer.tokens[:], self._sent[guess.ask_id], list[int | bytes]()
        assert guess.index == len(tokens)
        if first <= len(tokens) or (self._late and self._late.random() < 0.2):
            return
        for token in guess.tokens:
            allowed = grammar.allowed(tokens)
            if not allowed >> token & 1:
                self.n_refused += 1
                break
            tokens.append(token)
            if len(tokens) >= first:
                allowed = grammar.allowed(tokens)
                places.append(allowed.bit_length() - 1 if allowed.bit_count() == 1 else grammar.words(allowed))
        self.n_walked += len(places)
        port.masks([Walked(guess.ask_id, guess.index, first, places)])

    def _send(self, ask_id: int) -> None:
        grammar, answer = self._grammars[ask_id]
        if len(answer.tokens) >= self._sent.get(ask_id, 0):
            update, self._sent[ask_id] = grammar.update(ask_id, answer.tokens)
            self._rig.fronts[0].masks([update])


def answers(
    place: Place | Drafted, seeds: list[int | None], temperature: float, late: random.Random | None = None, guesses: bool = False, policy: Policy = EAGER
) -> tuple[list[list[int]], Rig]:
    """Answers at once, each held to the grammar of its seed, or to none."""
    rig = Rig(replace(place.sizes), device=place.device, policy=policy)
    rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(place.device.done[0])
    rig.engine.drafter.is_on = guesses
    front, found = Front(rig, late), []
    for i, seed in enumerate(seeds):
        answer = rig.ask([5, 6, 7, 8] * 3 + [i % 2], N_TOKENS, temperature=temperature, seed=3, use_mask=seed is not None)
        found.append(answer)
        if seed is not None:
            front.hold(answer, Grammar(place.sizes.n_vocab, seed))
    while not all(a.end for a in found):
        if not rig.turn() and late is not None:
            front.flush(99)
    rig.run()
    rig.assert_empty()
    rig.close()
    return [a.tokens for a in found], rig


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3.5"])
def test_held_answers_obey_their_masks_whatever_else_happens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(name, max_guesses=4)
    try:
        n_right = n_held = n_late = 0
        for temperature in (0.0, 0.9):
            oracle = Oracle()
            monkeypatch.setattr(drafts, "look_up", oracle)
            seeds: list[int | None] = [None, 1, -1, 2]
            alone = [answers(place, [None] * (i % 2) + [seed], temperature)[0][-1] for i, seed in enumerate(seeds)]
            for tokens, seed in zip(alone, seeds, strict=True):
                if seed is not None:
                    grammar = Grammar(place.sizes.n_vocab, seed)
                    assert all(grammar.allowed(tokens[:i]) >> token & 1 for i, token in enumerate(tokens)) and len(tokens) == N_TOKENS
            assert alone[2] == alone[0], "under masks that allow everything the answer is the free one"
            for i, tokens in enumerate(alone):
                oracle.learn([5, 6, 7, 8] * 3 + [i % 2] + tokens)
            assert answers(place, seeds, temperature)[0] == alone
            guessed, rig = answers(place, seeds, temperature, guesses=True)
            assert guessed == alone
            n_right += rig.engine.drafter.accepted
            held = [a.done for a in rig.answers.values() if a.ask.use_mask]
            n_held += sum(done.accepted_tokens for done in held)
            assert sum(done.drafted_tokens for done in held) <= rig.engine.drafter.drafted
            for is_guessed in (False, True):
                late, rig = answers(place, seeds, temperature, random.Random(7), is_guessed)
                assert late == alone
                n_late += rig.engine.counters.late_masks
        assert n_right > n_held > 10 and n_late > 0
    finally:
        place.device.close()


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe"])
def test_held_answers_with_a_models_own_guesses_are_those_without(name: str, tmp_path: Path) -> None:
    place = Drafted(folder(name, tmp_path), n_slots=8)
    policy, seeds = Policy(draft_gain=0.0, draft_head=True), [None, 1, -1, 2]
    try:
        plain, _ = answers(place, seeds, 0.8, policy=policy)
        guessed, rig = answers(place, seeds, 0.8, guesses=True, policy=policy)
        assert guessed == plain and plain[2] == plain[0]
        held = [a.done for a in rig.answers.values() if a.ask.use_mask]
        assert min(done.drafted_tokens for done in held) > 0
        late, rig = answers(place, seeds, 0.8, random.Random(3), guesses=True, policy=policy)
        assert late == plain and rig.engine.counters.late_masks > 0
    finally:
        place.device.close()
