"""Masks of one step go out together; an answer whose masks are slow holds up no other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from paddock_runner.errors import PaddockError, UsageError
from paddock_runner.text import grammar
from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf
from paddock_runner.turns import constrain
from paddock_runner.turns.constrain import Walker
from paddock_runner.wire.guesses import Guessed, Walked
from paddock_runner.wire.messages import MaskUpdate

from tests.unit.text.small import byte_level_metadata

pytest.importorskip("llguidance")
SMALL = tokenizer_from_gguf(byte_level_metadata())
BY_BYTE = {piece: i for i, piece in reversed(list(enumerate(SMALL.pieces)))}


@pytest.fixture(autouse=True, params=[2, 8])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of a step are computed one by one where there are few processors, together where there are many."""
    monkeypatch.setattr(grammar.os, "cpu_count", lambda: request.param)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes any time: what is walked ahead does not depend on what else the machine does."""
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(constrain, clock, lambda: 0.0)


class Desk:
    """Keeps what is sent, and tells when something was."""

    def __init__(self) -> None:
        self.sent: list[Sequence[Any]] = []
        self.changed = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def masks(self, updates: Sequence[Any]) -> None:
        if updates:
            self.sent.append(updates)
        self.loop.call_soon_threadsafe(self.changed.set)

    async def until(self, n: int) -> None:
        while sum(map(len, self.sent)) < n:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 10)


class Choice:
    """As much of an answer as a walk needs; it is its own turn."""

    def __init__(self, desk: Desk, ask_id: int) -> None:
        self.desk, self.ask_id, self.end, self.turn = desk, ask_id, None, self
        self.error: PaddockError | None = None

    def fail(self, error: PaddockError) -> None:
        self.error = error
        self.desk.changed.set()


def allowed(update: MaskUpdate) -> set[bytes]:
    bits = int.from_bytes(bytes(update.words), "little")
    return {SMALL.pieces[i] for i in range(SMALL.n_vocab) if bits >> i & 1}


def bit(words: bytes, token: int) -> bool:
    return bool(words[token >> 3] >> (token & 7) & 1)


Place = int | bytes
"""A token that is certain, or a mask."""


class Known:
    """What was said of one answer, by output index."""

    def __init__(self, desk: Desk, ask_id: int) -> None:
        self.desk, self.ask_id, self.places, self.n_read = desk, ask_id, dict[int, Place](), 0

    def read(self) -> list[Walked]:
        """Takes in what was sent; what was said of guesses is returned."""
        ahead = []
        for update in [u for sent in self.desk.sent[self.n_read :] for u in sent]:
            if update.ask_id == self.ask_id and isinstance(update, Walked):
                ahead.append(update)
            elif update.ask_id == self.ask_id:
                self.places |= dict(enumerate(update.sure, update.index))
                self.places[update.index + len(update.sure)] = update.words
        self.n_read = len(self.desk.sent)
        return ahead

    async def until(self, index: int) -> None:
        """What may come there is known."""
        while not self.read() and index not in self.places:
            self.desk.changed.clear()
            await asyncio.wait_for(self.desk.changed.wait(), 10)

    async def ahead(self) -> Walked:
        """The answer to a guess."""
        while not (found := self.read()):
            self.desk.changed.clear()
            await asyncio.wait_for(self.desk.changed.wait(), 10)
        return found[-1]


GRAMMARS: list[Callable[[], grammar.Constraint]] = [
    lambda: grammar.regex("(abc|abd|x[yz]{2,5}w)*(end|fin)"),
    lambda: grammar.json_schema({"type": "object", "properties": {"name": {"enum": ["abba", "abab", "the"]}, "ok": {"type": "boolean"}}, "required": ["name", "ok"], "additionalProperties": False}),
    lambda: grammar.choice(["abababab", "ababcdcd", "the end of it"]),
]


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("make", GRAMMARS)
@pytest.mark.parametrize("seed", range(4))
def test_guesses_are_walked_as_the_tokens_would_be_that_come(make: Callable[[], grammar.Constraint], seed: int) -> None:
    """One answer is walked token by token, another with guesses of which some are wrong, right ones coming several at a time: the same is said of both."""
    rng = random.Random(seed)

    async def test(walks: list[Any], desk: Desk, walker: Walker) -> None:
        plain, guessed = Known(desk, 0), Known(desk, 1)
        tokens: list[int] = []
        while len(tokens) < 60:
            await plain.until(len(tokens))
            place = plain.places[len(tokens)]
            allowed = [place] if isinstance(place, int) else [t for t in range(SMALL.n_vocab) if bit(place, t) and t not in SMALL.stop_ids]
            if not allowed:
                break
            tokens.append(rng.choice(allowed))
            walks[0].take(tokens[-1])
        await plain.until(len(tokens))
        n, n_right = 0, 0
        while n < len(tokens):
            await guessed.until(n)
            assert guessed.places[n] == plain.places[n]
            right = tokens[n : n + rng.randrange(1, 9)]
            tries = [t if rng.random() < 0.8 else rng.randrange(SMALL.n_vocab) for t in right]
            walks[1].take_guess(Guessed(1, n, tries))
            ahead = await guessed.ahead()
            n_same = next((i for i, (a, b) in enumerate(zip(tries, right, strict=True)) if a != b), len(tries))
            assert ahead.index == n and (not ahead.places or ahead.first + len(ahead.places) <= n + 1 + len(tries))
            for at, found in enumerate(ahead.places, ahead.first):
                assert at > n + n_same or found == plain.places[at], (at, n)
            assert n_same == 0 or ahead.first + len(ahead.places) > n + n_same or n + n_same in guessed.places, "as far as the guess is right there is something to draw under"
            for token in tokens[n : n + n_same + 1]:
                walks[1].take(token)
            n, n_right = n + min(n_same + 1, len(tokens) - n), n_right + n_same
        assert n_right > 0 and all(walk.choice.error is None for walk in walks)

    walked(make, 2, test)


def test_guesses_of_an_answer_that_was_slow_are_not_walked_and_those_that_take_long_only_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(constrain, "perf_counter", lambda: now[0])

    async def test(walks: list[Any], desk: Desk, walker: Walker) -> None:
        known, (walk,) = Known(desk, 0), walks
        guess = Guessed(0, 0, [BY_BYTE[b"a"]] * 3)
        accept = walk.matcher.copy().__class__.accept_some

        def slowly(matcher: Any, tokens: Sequence[int]) -> int:
            now[0] += constrain.SLOW_S * 0.6
            return int(accept(matcher, tokens))

        with monkeypatch.context() as patch:
            patch.setattr(grammar.Matcher, "accept_some", slowly)
            walk.take_guess(guess)
            assert len((await known.ahead()).places) == 1
        walk.is_slow = True
        walk.take_guess(guess)
        assert not (await known.ahead()).places
        walk.is_slow = False
        walk.take_guess(guess)
        assert len((await known.ahead()).places) == 3

    walked(lambda: grammar.regex("[ab]{9}"), 1, test)


def test_a_guess_for_tokens_that_did_not_come_is_not_walked() -> None:
    async def test(walks: list[Any], desk: Desk, walker: Walker) -> None:
        known = Known(desk, 0)
        walks[0].take_guess(Guessed(0, 5, [BY_BYTE[b"a"]]))
        assert not (await known.ahead()).places
        walks[0].take_guess(Guessed(0, 0, [BY_BYTE[b"z"]]))
        assert not (await known.ahead()).places
        walks[0].take_guess(Guessed(0, 0, [BY_BYTE[b"a"], BY_BYTE[b"z"]]))
        assert len((await known.ahead()).places) == 1
        assert walks[0].choice.error is None

    walked(lambda: grammar.regex("[ab]{4}"), 1, test)


def walked(make: Callable[[], grammar.Constraint], n: int, test: Callable[[list[Any], Desk, Walker], Any]) -> None:
    async def run() -> None:
        walker, desk = Walker(SMALL, SMALL.n_vocab), Desk()
        walks = (await walker.guide(make, n)).walks
        for i, walk in enumerate(walks):
            desk.masks(walk.begin(Choice(desk, i)))  # type: ignore[arg-type]
        try:
            await test(walks, desk, walker)
        finally:
            walker.close()

    asyncio.run(run())


def test_masks_of_one_step_go_out_together() -> None:
    async def test(walks: list[Any], desk: Desk, walker: Walker) -> None:
        assert [u.index for sent in desk.sent for u in sent] == [0] * 5
        del desk.sent[:]
        for i, walk in enumerate(walks):
            walk.take(BY_BYTE[b"ab"[i % 2 : i % 2 + 1]])
        await desk.until(5)
        (sent,) = desk.sent
        assert [u.ask_id for u in sent] == [0, 1, 2, 3, 4] and {u.index for u in sent} == {1}
        assert all(b"c" in allowed(u) and b"e" not in allowed(u) for u in sent[0::2])
        assert all(b"e" in allowed(u) and b"c" not in allowed(u) for u in sent[1::2])

    walked(lambda: grammar.regex("a[cd]|b[ef]"), 5, test)


def test_tokens_that_come_without_waiting_are_walked_in_order() -> None:
    async def test(walks: list[Any], desk: Desk, walker: Walker) -> None:
        del desk.sent[:]
        (walk,) = walks
        for token in b"abcdefgh" * 8:
            walk.take(BY_BYTE[bytes([token])])
            await asyncio.sleep(0)
        while not desk.sent or desk.sent[-1][-1].index < 64:
            desk.changed.clear()
            await asyncio.wait_for(desk.changed.wait(), 10)
        indices = [u.index for sent in desk.sent for u in sent]
        assert walk.choice.error is None and indices == sorted(set(indices)), "those that came while others were walked are walked together"

    walked(lambda: grammar.regex("([abcdefgh][abcdefgh])+x"), 1, test)


def test_a_step_of_nothing_but_tokens_that_are_not_allowed_ends_these_answers_alone() -> None:
    async def test(walks: list[Any], desk: Desk, walker: Walker) -> None:
        del desk.sent[:]
        walks[0].take(BY_BYTE[b"z"])
        while walks[0].choice.error is None:
            desk.changed.clear()
            await asyncio.wait_for(desk.changed.wait(), 10)
        walks[1].take(BY_BYTE[b"a"])
        await desk.until(1)
        assert [u.ask_id for sent in desk.sent for u in sent] == [1]

    walked(lambda: grammar.regex("[ab]{4}"), 2, test)


def test_an_answer_that_costs_too_much_ends_alone_and_slow_ones_find_their_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(walks: list[Any], desk: Desk, walker: Walker) -> None:
        del desk.sent[:]
        bad, *good = walks
        for walk in walks:
            walk.is_slow = True

        def fail() -> Any:
            raise UsageError("the grammar takes more than a second for one token")

        monkeypatch.setattr(bad.matcher, "mask", fail)
        for walk in walks:
            walk.take(BY_BYTE[b"a"])
        await desk.until(2)
        assert isinstance(bad.choice.error, UsageError) and [u.ask_id for sent in desk.sent for u in sent] == [1, 2]
        assert not any(walk.is_slow for walk in good)

    walked(lambda: grammar.regex("[ab]{4}"), 3, test)
