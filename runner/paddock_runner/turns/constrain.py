"""Answers held to a grammar: compiled and walked in threads of their own, so that neither the event loop nor the engine waits.

Every token that comes is followed by the mask of the next. Where the grammar leaves one way on, the tokens of that way go out with the mask
of the one behind them. The tokens of one step are walked together and their masks sent together: the engine's next step then has all of its
rows, and half a batch costs it as much as a whole one. Answers whose masks are slow are walked one by one in a thread of their own.
Tokens that the engine guessed are walked ahead by a copy, exactly as they would be if they came: their masks follow the others.
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
from ..wire.guesses import Guessed, Walked
from ..wire.messages import MaskUpdate, Update

if TYPE_CHECKING:
    from .choice import Choice
    from .desk import Desk

MAX_SURE = 64
"""Certain tokens that are followed at once."""
SLOW_S = 0.01
"""A mask that takes longer, or the masks of one step together, are not waited for by others the next time."""
Failed = list[Callable[[], None]]
"""What is to be done in the event loop for walks that failed."""
Follow = Callable[[list["Walk"], Failed], list["Walk"]]
"""Takes the tokens that came and adds masks; gives the walks that did not fail."""


class Walk:
    """One answer's way through a grammar. Made in a thread."""

    __slots__ = (
        "_expected",
        "_guess",
        "_is_walking",
        "_n_taken",
        "_pending",
        "_updates",
        "_walker",
        "choice",
        "forced",
        "is_slow",
        "matcher",
        "tokens",
    )

    def __init__(self, walker: Walker, matcher: Matcher) -> None:
        self._walker = walker
        self.matcher = matcher
        self._n_taken = 0
        self._expected: deque[int] = deque()
        """Tokens that are certain to come: the matcher has them already."""
        self._pending: deque[int] = deque()
        self._guess: Guessed | None = None
        self._updates: list[tuple[int, bytes, list[int]] | tuple[int, int, list[int | bytes]]] = []
        self._is_walking = False
        self.tokens: deque[int] = deque()
        """What came and is walked now; the first is one that was not certain."""
        self.is_slow = False
        """Its last mask took long, or was computed with others that did."""
        self.choice: Choice | None = None
        self.forced: Sequence[int] = ()
        """Tokens that must follow the next that is taken, as far as the grammar lets them: the end of reasoning."""
        self._go_on()
        self.add_mask(matcher.mask().tobytes())

    def begin(self, choice: Choice) -> list[Update]:
        """The masks to send with its answer's ask."""
        self.choice = choice
        return [update for _, update in self.updates()]

    def take(self, token: int) -> None:
        """A token came, which was not the last. Called in the event loop."""
        with self._walker.lock:
            self._pending.append(token)
            if self._is_walking or len(self._pending) > 1:
                return  # it has its turn when those before it have had theirs
        self.take_pending()

    def take_guess(self, guess: Guessed) -> None:
        """The engine guesses what comes behind the tokens that came. Called in the event loop."""
        with self._walker.lock:
            self._guess = guess
            if self._is_walking or self._pending:
                return
        self.take_pending()

    def take_pending(self) -> None:
        """Takes what came, until something has to be walked. Called in the event loop."""
        with self._walker.lock:
            if self._is_walking:
                return
            is_astray = not self._pass_expected(self._pending)
            if is_astray or not (self._pending or self._guess is not None):
                self._pending.clear()
            else:
                self._is_walking = True
        if is_astray:
            self.fail(_astray())
        elif self._is_walking:
            self._walker.push(self)

    def start(self) -> None:
        """What came until now is walked: `tokens`, and the guess behind them. Called in a thread. Raises: PaddockError."""
        with self._walker.lock:
            self.tokens, self._pending = self._pending, deque()
        self._check(self._pass_expected(self.tokens))

    def follow(self, is_allowed: bool) -> None:
        """The matcher has taken the first of the tokens, or not: goes on with those that are certain behind it, and with the others. Called in a thread.

        Raises: PaddockError.
        """
        matcher = self.matcher
        self._check(is_allowed)
        while self.tokens:
            self.tokens.popleft()
            self._n_taken += 1
            if self.forced:
                forced, self.forced = self.forced, ()
                self._expected += forced[: matcher.accept_some(forced)]
            self._go_on()
            self._check(self._pass_expected(self.tokens) and (not self.tokens or matcher.accept(self.tokens[0])))

    def add_mask(self, words: bytes) -> None:
        """The mask of the first token that is not certain."""
        self._updates.append((self._n_taken, words, list(self._expected)))

    def look_ahead(self) -> None:
        """Walks the guess, as far as the grammar allows it and there is time. Called in a thread."""
        with self._walker.lock:
            guess, self._guess = self._guess, None
        if guess is not None:
            first, places = guess.index + len(self._expected) + 1, list[int | bytes]()
            if guess.index == self._n_taken and not self.forced and not self.is_slow:
                self._walk_ahead(guess.tokens, places)
            self._updates.append((guess.index, first, places))

    def _walk_ahead(self, tokens: Sequence[int], places: list[int | bytes]) -> None:
        """What may come at each place behind guessed tokens; a token that is certain is followed by what is certain behind it, as in `follow`."""
        n = len(self._expected)
        if list(self._expected) != list(tokens[:n]):
            return
        ahead, certain, begun = self.matcher.copy(), deque[int](), perf_counter()
        try:
            for token in tokens[n:]:
                if certain:
                    if certain.popleft() != token:
                        return
                elif ahead.is_stopped or not ahead.accept_some([token]) or perf_counter() - begun > SLOW_S:
                    return
                else:
                    certain += _certain_after(ahead)
                places.append(certain[0] if certain else ahead.mask().tobytes())
        except PaddockError:
            return  # too costly there: without guesses the answer may never come to it

    def updates(self) -> list[tuple[Desk, Update]]:
        """What is to be sent, unless the answer has ended meanwhile."""
        updates, self._updates = self._updates, []
        choice = self.choice
        if choice is None or choice.end is not None:
            return []
        ask_id, found = choice.ask_id, list[tuple["Desk", Update]]()
        for update in updates:
            made = MaskUpdate(ask_id, update[0], update[1], update[2]) if isinstance(update[1], bytes) else Walked(ask_id, *update)
            found.append((choice.turn.desk, made))
        return found

    def settle(self) -> None:
        """It is walked no longer; what has come meanwhile has its turn."""
        with self._walker.lock:
            self._is_walking = False
            is_pending = bool(self._pending) or self._guess is not None
        if is_pending and self.choice is not None and self.choice.end is None:
            self._walker.call(self.take_pending)

    def fail(self, error: PaddockError) -> None:
        """Ends the turn."""
        if self.choice is not None and self.choice.end is None:
            self.choice.turn.fail(error)

    def _go_on(self) -> None:
        self._expected += _certain_after(self.matcher)

    def _pass_expected(self, tokens: deque[int]) -> bool:
        """Takes the first of these tokens, as far as they were certain. False when another came."""
        while tokens and self._expected:
            if self._expected.popleft() != tokens.popleft():
                return False
            self._n_taken += 1
        return True

    def _check(self, is_allowed: bool) -> None:
        if not is_allowed:
            raise self.matcher.refusal() or _astray()


def _certain_after(matcher: Matcher) -> list[int]:
    """Tokens that must come next, which the matcher has taken then."""
    forced = matcher.forced()
    if not forced or matcher.is_stopped:
        return []
    del forced[MAX_SURE:]
    return forced[: matcher.accept_some(forced)]


@dataclass(slots=True)
class Guide:
    """What one turn's answers are held to: a walk for each of them."""

    walks: list[Walk]


class Walker:
    """The grammars of one model, and the threads that walk through them."""

    def __init__(self, tokenizer: Tokenizer, n_rows: int) -> None:
        self.grammars = Grammars(tokenizer, n_rows)
        self._compiling = ThreadPoolExecutor(1, "grammar")
        self._jobs: SimpleQueue[list[Walk] | None] = SimpleQueue()
        self._slow_jobs: SimpleQueue[list[Walk] | None] = SimpleQueue()
        self._step: list[Walk] = []
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
            follow = self._together if self.grammars.n_threads > 1 else self._one_by_one
            self._threads = [
                threading.Thread(target=self._work, args=(jobs, how), daemon=True, name="masks")
                for jobs, how in ((self._jobs, follow), (self._slow_jobs, self._one_by_one))
            ]
            for thread in self._threads:
                thread.start()
        return await loop.run_in_executor(self._compiling, self._begin, make, n)

    def push(self, walk: Walk) -> None:
        """Has what came walked, with the others of its step; the masks go out by themselves. Called in the event loop."""
        if walk.is_slow:
            self._slow_jobs.put([walk])
            return
        if not self._step and self._loop is not None:
            self._loop.call_soon(self.push_step)
        self._step.append(walk)

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
            self.grammars.matcher(json_object())
        except PaddockError:
            return  # the first request that wants a grammar is told

    def _begin(self, make: Callable[[], Constraint], n: int) -> Guide:
        constraint = make()
        return Guide([Walk(self, self.grammars.matcher(constraint)) for _ in range(n)])

    def _work(self, jobs: SimpleQueue[list[Walk] | None], follow: Follow) -> None:
        while (step := jobs.get()) is not None:
            failed: Failed = []
            walked = follow(step, failed)
            send([update for walk in walked for update in walk.updates()])
            for walk in walked:
                walk.look_ahead()
            send([update for walk in walked for update in walk.updates()])
            for walk in walked:
                walk.settle()
            for act in failed:
                self.call(act)

    def _together(self, step: list[Walk], failed: Failed) -> list[Walk]:
        """Follows the tokens, then has the masks computed by several threads at once."""
        begun = perf_counter()
        walked = _each(step, Walk.start, failed)
        moved = [walk for walk in walked if walk.tokens]
        allowed = dict(zip(moved, self.grammars.accept([(walk.matcher, walk.tokens[0]) for walk in moved]), strict=True))
        moved = _each(moved, lambda walk: walk.follow(allowed[walk]), failed)
        found = self.grammars.masks([walk.matcher for walk in moved])
        is_slow = perf_counter() - begun > SLOW_S
        for walk, mask in zip(moved, found, strict=True):
            walk.is_slow = is_slow
            if isinstance(mask, PaddockError):
                failed.append(partial(walk.fail, mask))
            else:
                walk.add_mask(mask)
        return [walk for walk in walked if walk not in allowed or walk in moved]

    def _one_by_one(self, step: list[Walk], failed: Failed) -> list[Walk]:
        """Follows each answer's tokens and computes its mask at once, while what that needs is at hand."""

        def walk_on(walk: Walk) -> None:
            begun = thread_time()
            walk.start()
            if walk.tokens:
                walk.follow(walk.matcher.accept(walk.tokens[0]))
                walk.add_mask(walk.matcher.mask().tobytes())
                walk.is_slow = thread_time() - begun > SLOW_S

        return _each(step, walk_on, failed)


def _each(walks: list[Walk], act: Callable[[Walk], None], failed: Failed) -> list[Walk]:
    """Does this with each walk; gives those that did not fail."""
    good = []
    for walk in walks:
        try:
            act(walk)
            good.append(walk)
        except PaddockError as error:
            failed.append(partial(walk.fail, error))
    return good


def send(updates: list[tuple[Desk, Update]]) -> None:
    """Sends masks, those of one desk together."""
    by_desk: dict[Desk, list[Update]] = {}
    for desk, update in updates:
        by_desk.setdefault(desk, []).append(update)
    for desk, some in by_desk.items():
        desk.masks(some)


def _astray() -> PackError:
    return PackError("the engine drew a token that the grammar does not allow", "report this")
