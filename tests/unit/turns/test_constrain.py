"""Masks of one step go out together; an answer whose masks are slow holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from paddock_runner.errors import PaddockError, UsageError
from paddock_runner.text import grammar
from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf
from paddock_runner.turns.constrain import Walker
from paddock_runner.wire.messages import MaskUpdate

from tests.unit.text.small import byte_level_metadata

pytest.importorskip("llguidance")
SMALL = tokenizer_from_gguf(byte_level_metadata())
BY_BYTE = {piece: i for i, piece in reversed(list(enumerate(SMALL.pieces)))}


@pytest.fixture(autouse=True, params=[2, 8])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of a step are computed one by one where there are few processors, together where there are many."""
    monkeypatch.setattr(grammar.os, "cpu_count", lambda: request.param)


class Desk:
    """Keeps what is sent, and tells when something was."""

    def __init__(self) -> None:
        self.sent: list[Sequence[MaskUpdate]] = []
        self.changed = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def masks(self, updates: Sequence[MaskUpdate]) -> None:
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
        await desk.until(64)
        assert walk.choice.error is None and [u.index for sent in desk.sent for u in sent] == list(range(1, 65))

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
