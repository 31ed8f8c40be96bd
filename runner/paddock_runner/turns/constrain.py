"""Answers held to a grammar: compiled and walked in threads of their own, so that neither the event loop nor the engine waits.

Every token that comes is followed by the mask of the next. Where the grammar leaves one way on, the masks of several tokens go
out at once. Knows nothing of what the grammar means.
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ..errors import PackError, PaddockError
from ..text.grammar import Constraint, Grammars, Matcher, json_object
from ..text.tokenizer import Tokenizer
from ..wire.messages import MaskUpdate

if TYPE_CHECKING:
    from .choice import Choice

MAX_AHEAD = 8
"""Masks that may go out at once beyond the next."""
MAX_BATCH = 16
N_THREADS = 2
Masks = list[tuple[int, bytes]]
"""(output index, words) of masks to be sent."""


class Walk:
    """One answer's way through a grammar. `first`: the masks to send right behind its ask. Made in a thread."""

    __slots__ = ("_expected", "_index", "_is_walking", "_matcher", "_pending", "_walker", "choice", "first")

    def __init__(self, walker: Walker, matcher: Matcher) -> None:
        self._walker = walker
        self._matcher = matcher
        self._index = 0
        self._expected: deque[int] = deque()
        self._pending: deque[int] = deque()
        self._is_walking = False
        self.choice: Choice | None = None
        self.first = self._ahead(self._expected)

    def begin(self, choice: Choice) -> None:
        """Its answer's ask was sent: sends the first masks."""
        self.choice = choice
        self.send(self.first)

    def take(self, token: int) -> None:
        """A token came, which was not the last. Called in the event loop."""
        if self._is_walking:
            self._pending.append(token)
        elif not self._expected:
            self._is_walking = True
            self._walker.push(self, token)
        elif self._expected.popleft() != token:
            self.fail(_astray())

    def step(self, token: int) -> tuple[Masks, deque[int]]:
        """The masks that follow a token, and the tokens that are certain by them. Called in a thread. Raises: PaddockError."""
        if not self._matcher.accept(token):
            raise _astray()
        expected: deque[int] = deque()
        return self._ahead(expected), expected

    def settle(self, masks: Masks, expected: deque[int]) -> None:
        """What `step` gave, back in the event loop."""
        self._expected.extend(expected)
        self.send(masks)
        self._is_walking = False
        while self._pending and not self._is_walking:
            self.take(self._pending.popleft())

    def send(self, masks: Masks) -> None:
        """Sends masks, unless the answer has ended meanwhile."""
        choice = self.choice
        if choice is not None and choice.end is None:
            for index, words in masks:
                choice.turn.desk.mask(MaskUpdate(choice.ask_id, index, words))

    def fail(self, error: PaddockError) -> None:
        """Ends the turn."""
        if self.choice is not None and self.choice.end is None:
            self.choice.turn.fail(error)

    def _ahead(self, expected: deque[int]) -> Masks:
        matcher, masks = self._matcher, []
        forced = [] if matcher.is_stopped else matcher.forced()[:MAX_AHEAD]
        for token in forced:
            if not matcher.accept(token):
                break
            masks.append((self._index, self._walker.only(token)))
            expected.append(token)
            self._index += 1
        masks.append((self._index, matcher.mask().tobytes()))
        self._index += 1
        return masks


@dataclass(slots=True)
class Guide:
    """What one turn's answers are held to: a walk for each of them."""

    walks: list[Walk]


class Walker:
    """The grammars of one model, and the threads that walk through them."""

    def __init__(self, tokenizer: Tokenizer, n_rows: int) -> None:
        self._grammars = Grammars(tokenizer, n_rows)
        self._compiling = ThreadPoolExecutor(1, "grammar")
        self._jobs: SimpleQueue[tuple[Walk, int] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def warm(self) -> None:
        """Begins to build the tokenizer's table, which the first grammar would wait for."""
        self._compiling.submit(self._warm)

    async def guide(self, make: Callable[[], Constraint], n: int) -> Guide:
        """Walks for n answers. make: gives the constraint; called in a thread.

        Raises: UsageError for a grammar that is wrong or costs too much; UnsupportedError for one that this model cannot be held to.
        """
        self._loop = loop = asyncio.get_running_loop()
        if not self._threads:
            self._threads = [threading.Thread(target=self._work, daemon=True, name="masks") for _ in range(N_THREADS)]
            for thread in self._threads:
                thread.start()
        return await loop.run_in_executor(self._compiling, self._begin, make, n)

    def push(self, walk: Walk, token: int) -> None:
        """Has a token walked; the masks go out by themselves."""
        self._jobs.put((walk, token))

    def only(self, token: int) -> bytes:
        """The mask of one token."""
        words = array("I", bytes(4 * self._grammars.n_words))
        words[token >> 5] = 1 << (token & 31)
        return words.tobytes()

    def close(self) -> None:
        """Ends the threads."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        for _ in self._threads:
            self._jobs.put(None)

    def _warm(self) -> None:
        try:
            self._grammars.matcher(json_object())
        except PaddockError:
            return  # the first request that wants a grammar is told

    def _begin(self, make: Callable[[], Constraint], n: int) -> Guide:
        constraint = make()
        return Guide([Walk(self, self._grammars.matcher(constraint)) for _ in range(n)])

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            done: list[Callable[[], None]] = []
            while job is not None:
                done.append(self._one(*job))
                job = self._next() if len(done) < MAX_BATCH else None
            loop = self._loop
            if loop is None or loop.is_closed():
                return
            loop.call_soon_threadsafe(_settle, done)

    def _next(self) -> tuple[Walk, int] | None:
        """Another job that is there already."""
        try:
            job = self._jobs.get_nowait()
        except Empty:
            return None
        if job is None:
            self._jobs.put(None)
        return job

    def _one(self, walk: Walk, token: int) -> Callable[[], None]:
        try:
            masks, expected = walk.step(token)
        except PaddockError as error:
            fault = error
            return lambda: walk.fail(fault)
        return lambda: walk.settle(masks, expected)


def _settle(done: list[Callable[[], None]]) -> None:
    for act in done:
        act()


def _astray() -> PackError:
    return PackError("the engine drew a token that the grammar does not allow", "report this")
