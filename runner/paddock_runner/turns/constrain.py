"""Answers held to a grammar: compiled and walked in threads of their own, so that neither the event loop nor the engine waits.

Every token that comes is followed by the mask of the next. Where the grammar leaves one way on, the tokens of that way go out with the mask
of the one behind them. The tokens of one step are walked together and their masks sent together: the engine's next step then has all of its
rows, and half a batch costs it as much as a whole one. Answers whose masks are slow are walked one by one in a thread of their own.
Knows nothing of what the grammar means.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

from ..errors import PackError, PaddockError
from ..text.grammar import Constraint, Grammars, Matcher, json_object
from ..text.tokenizer import Tokenizer
from ..wire.messages import MaskUpdate

if TYPE_CHECKING:
    from .choice import Choice
    from .desk import Desk

MAX_SURE = 64
"""Certain tokens that are followed at once."""
SLOW_S = 0.01
"""A mask that takes longer, or the masks of one step together, are not waited for by others the next time."""
Masks = list[tuple[int, bytes, list[int]]]
"""(output index, words, certain tokens before that of the mask) of masks to be sent."""
Jobs = list[tuple["Walk", int]]
"""Walks with the tokens that came."""
Follow = Callable[[Jobs, list[Callable[[], None]]], list["Walk"]]
"""Takes tokens and adds masks; gives the walks that may have something to send, and appends what is to be done for those that failed."""


class Walk:
    """One answer's way through a grammar. Made in a thread."""

    __slots__ = (
        "_expected",
        "_index",
        "_is_walking",
        "_masks",
        "_pending",
        "_sure",
        "_walker",
        "choice",
        "forced",
        "is_slow",
        "matcher",
    )

    def __init__(self, walker: Walker, matcher: Matcher) -> None:
        self._walker = walker
        self.matcher = matcher
        self._index = 0
        self._sure: list[int] = []
        self._expected: deque[int] = deque()
        self._pending: deque[int] = deque()
        self._masks: Masks = []
        self._is_walking = False
        self.is_slow = False
        """Its last mask took long, or was computed with others that did."""
        self.choice: Choice | None = None
        self.forced: Sequence[int] = ()
        """Tokens that must follow the next that is taken, as far as the grammar lets them: the end of reasoning."""
        self._go_on()
        self.add_mask(matcher.mask().tobytes())

    def begin(self, choice: Choice) -> list[MaskUpdate]:
        """The masks to send with its answer's ask."""
        self.choice = choice
        return [update for _, update in self.settle()]

    def take(self, token: int) -> None:
        """A token came, which was not the last. Called in the event loop."""
        with self._walker.lock:
            self._pending.append(token)
            if self._is_walking or len(self._pending) > 1:
                return  # it has its turn when those before it have had theirs
        self.take_pending()

    def take_pending(self) -> None:
        """Takes the tokens that came, until one has to be walked. Called in the event loop."""
        while True:
            with self._walker.lock:
                if self._is_walking or not self._pending:
                    return
                token = self._pending.popleft()
                is_expected = bool(self._expected)
                self._is_walking = not is_expected
            if not is_expected:
                self._walker.push(self, token)
            elif self._expected.popleft() != token:
                self.fail(_astray())

    def follow(self, is_allowed: bool) -> None:
        """The matcher has taken a token, or not: goes on with those that are certain behind it; `add_mask` has to come next. Called in a thread.

        Raises: PaddockError.
        """
        matcher = self.matcher
        if not is_allowed:
            raise _astray()
        if self.forced:
            forced, self.forced = self.forced, ()
            self._must_come(forced[: matcher.accept_some(forced)])
        self._go_on()

    def add_mask(self, words: bytes) -> None:
        """The mask of the first token that is not certain."""
        self._masks.append((self._index, words, self._sure))
        self._index += len(self._sure) + 1
        self._sure = []

    def settle(self) -> list[tuple[Desk, MaskUpdate]]:
        """The masks to send, unless the answer has ended meanwhile."""
        with self._walker.lock:
            masks, self._masks = self._masks, []
            self._is_walking = False
            is_pending = bool(self._pending)
        choice = self.choice
        if choice is None or choice.end is not None:
            return []
        if is_pending:
            self._walker.call(self.take_pending)
        return [(choice.turn.desk, MaskUpdate(choice.ask_id, index, words, sure)) for index, words, sure in masks]

    def fail(self, error: PaddockError) -> None:
        """Ends the turn."""
        if self.choice is not None and self.choice.end is None:
            self.choice.turn.fail(error)

    def _go_on(self) -> None:
        matcher = self.matcher
        forced = matcher.forced()
        if forced and not matcher.is_stopped:
            del forced[MAX_SURE:]
            self._must_come(forced[: matcher.accept_some(forced)])

    def _must_come(self, tokens: Sequence[int]) -> None:
        self._sure += tokens
        self._expected += tokens


@dataclass(slots=True)
class Guide:
    """What one turn's answers are held to: a walk for each of them."""

    walks: list[Walk]


class Walker:
    """The grammars of one model, and the threads that walk through them."""

    def __init__(self, tokenizer: Tokenizer, n_rows: int) -> None:
        self._grammars = Grammars(tokenizer, n_rows)
        self._compiling = ThreadPoolExecutor(1, "grammar")
        self._jobs: SimpleQueue[Jobs | None] = SimpleQueue()
        self._slow_jobs: SimpleQueue[Jobs | None] = SimpleQueue()
        self._step: Jobs = []
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.lock = threading.Lock()
        """Held while a walk changes hands between the event loop and a thread."""

    def call(self, act: Callable[[], None]) -> None:
        """Has something done in the event loop."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(act)

    def warm(self) -> Future[None]:
        """Builds the tokenizer's table, which the first grammar would wait for: in a thread, though the interpreter's lock is held meanwhile."""
        return self._compiling.submit(self._warm)

    async def guide(self, make: Callable[[], Constraint], n: int) -> Guide:
        """Walks for n answers. make: gives the constraint; called in a thread.

        Raises: UsageError for a grammar that is wrong or costs too much; UnsupportedError for one that this model cannot be held to.
        """
        self._loop = loop = asyncio.get_running_loop()
        if not self._threads:
            follow = self._together if self._grammars.n_threads > 1 else self._one_by_one
            self._threads = [
                threading.Thread(target=self._work, args=(jobs, how), daemon=True, name="masks")
                for jobs, how in ((self._jobs, follow), (self._slow_jobs, self._one_by_one))
            ]
            for thread in self._threads:
                thread.start()
        return await loop.run_in_executor(self._compiling, self._begin, make, n)

    def push(self, walk: Walk, token: int) -> None:
        """Has a token walked, with the others of its step; the masks go out by themselves. Called in the event loop."""
        if walk.is_slow:
            self._slow_jobs.put([(walk, token)])
            return
        if not self._step and self._loop is not None:
            self._loop.call_soon(self.push_step)
        self._step.append((walk, token))

    def push_step(self) -> None:
        """The tokens of this step have come: they are walked while others do what else there is to do with them."""
        if self._step:
            step, self._step = self._step, []
            self._jobs.put(step)

    def close(self) -> None:
        """Ends the threads."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._jobs.put(None)
        self._slow_jobs.put(None)

    def _warm(self) -> None:
        try:
            self._grammars.matcher(json_object())
        except PaddockError:
            return  # the first request that wants a grammar is told

    def _begin(self, make: Callable[[], Constraint], n: int) -> Guide:
        constraint = make()
        return Guide([Walk(self, self._grammars.matcher(constraint)) for _ in range(n)])

    def _work(self, jobs: SimpleQueue[Jobs | None], follow: Follow) -> None:
        while (step := jobs.get()) is not None:
            failed: list[Callable[[], None]] = []
            walked = follow(step, failed)
            send([update for walk in walked for update in walk.settle()])
            for act in failed:
                self.call(act)

    def _together(self, step: Jobs, failed: list[Callable[[], None]]) -> list[Walk]:
        """Follows the tokens, then has the masks computed by several threads at once."""
        walked: list[Walk] = []
        begun = perf_counter()
        allowed = self._grammars.accept([(walk.matcher, token) for walk, token in step])
        for (walk, _), is_allowed in zip(step, allowed, strict=True):
            try:
                walk.follow(is_allowed)
                walked.append(walk)
            except PaddockError as error:
                failed.append(partial(walk.fail, error))
        found = self._grammars.masks([walk.matcher for walk in walked])
        is_slow = perf_counter() - begun > SLOW_S
        for walk, mask in zip(walked, found, strict=True):
            walk.is_slow = is_slow
            if isinstance(mask, PaddockError):
                failed.append(partial(walk.fail, mask))
            else:
                walk.add_mask(mask)
        return walked

    def _one_by_one(self, step: Jobs, failed: list[Callable[[], None]]) -> list[Walk]:
        """Follows each token and computes its mask at once, while what that needs is at hand."""
        for walk, token in step:
            begun = thread_time()
            try:
                walk.follow(walk.matcher.accept(token))
                walk.add_mask(walk.matcher.mask().tobytes())
            except PaddockError as error:
                failed.append(partial(walk.fail, error))
            walk.is_slow = thread_time() - begun > SLOW_S
        return [walk for walk, _ in step]


def send(updates: list[tuple[Desk, MaskUpdate]]) -> None:
    """Sends masks, those of one desk together."""
    by_desk: dict[Desk, list[MaskUpdate]] = {}
    for desk, update in updates:
        by_desk.setdefault(desk, []).append(update)
    for desk, some in by_desk.items():
        desk.masks(some)


def _astray() -> PackError:
    return PackError("the engine drew a token that the grammar does not allow", "report this")
