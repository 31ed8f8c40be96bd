"""The front's one door to the engine: numbers asks, hands each event to its choice, then lets every touched turn write once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import PackError
from ..wire.guesses import Guessed, Walked
from ..wire.messages import Ask, Done, Event, Refused, Row, Started, State, StepResult, Update, Vector
from ..wire.port import FrontPort
from .lane import Apart, Together

if TYPE_CHECKING:
    from .choice import Choice
    from .constrain import Walk
    from .lane import Lane
    from .turn import Turn


class Desk:
    """Owns the port. on_dead: called once when the engine has gone, after every open turn has failed."""

    def __init__(self, port: FrontPort) -> None:
        self._port = port
        self.on_dead: Callable[[], None] = lambda: None
        self.on_taken: Callable[[], None] = lambda: None
        """Called when choices have what came, before anything is written."""
        self._choices: dict[int, Choice] = {}
        self._walks: dict[int, Walk] = {}
        """Of answers that are held to a grammar, by ask."""
        self._queries: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._vectors: dict[int, asyncio.Future[bytes]] = {}
        self._touched: list[Turn] = []
        self._begun: list[Turn] = []
        """Whose first token is being written."""
        self._lanes: list[Lane] = []
        self.together: Together = Apart()
        self._next_id = 0
        self.now_ns = 0
        """time.monotonic_ns() of the events that are being handled."""
        self.n_tokens = 0
        """Tokens received since the start."""

    @property
    def n_open(self) -> int:
        """Asks that have not ended."""
        return len(self._choices) + len(self._vectors)

    @property
    def is_dead(self) -> bool:
        """Whether the engine has gone."""
        return self._port.is_dead

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to hand out events, in this loop."""
        self._port.listen(loop, self._on_events)

    def next_id(self) -> int:
        """A number for an ask."""
        self._next_id += 1
        return self._next_id

    def send(self, ask: Ask, choice: Choice, masks: Sequence[Update] = ()) -> None:
        """Sends an ask, with the first masks of an answer that is held; its events go to `choice`. Raises: Busy, TooLarge, PackError."""
        self._port.ask(ask, masks)
        self._choices[ask.ask_id] = choice
        if choice.walk is not None:
            self.hold(choice, choice.walk)

    async def vector(self, ask: Ask) -> bytes:
        """What a model without a head makes of an ask: f32 numbers. Cancelling ends the ask. Raises: PaddockError (refused, failed, full)."""
        self._port.ask(ask)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._vectors[ask.ask_id] = future
        try:
            return await future
        finally:
            if self._vectors.pop(ask.ask_id, None) is not None:
                self._port.abort(ask.ask_id)

    def abort(self, ask_id: int) -> None:
        """Ends an ask; its choice hears no more of it."""
        self._walks.pop(ask_id, None)
        if self._choices.pop(ask_id, None) is not None:
            self._port.abort(ask_id)

    def hold(self, choice: Choice, walk: Walk) -> None:
        """This walk follows the choice's tokens, before anything else is done with them; not where reasoning may be ended behind a token."""
        if choice.tokens is None:
            self._walks[choice.ask_id] = walk

    def masks(self, updates: Sequence[Update]) -> None:
        """Sends masks of output tokens, together. Any thread may."""
        self._port.masks(updates)

    async def state(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The engine's own account of itself. Raises: PackError when it has gone or does not answer."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        query = self._port.query()
        self._queries[query] = future
        try:
            return await asyncio.wait_for(future, timeout_s or None)
        except TimeoutError:
            raise PackError(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            self._queries.pop(query, None)

    def close(self) -> None:
        """Lets go of the engine, which aborts what is open."""
        self._port.close()

    def touch(self, turn: Turn) -> None:
        """This turn has something to write."""
        if not turn.is_touched:
            turn.is_touched = True
            self._touched.append(turn)

    def begins(self, turn: Turn) -> None:
        """Its first token is written with what came: that is when it is there."""
        self._begun.append(turn)

    def _on_events(self, events: list[Event]) -> None:
        if not events and self._port.is_dead:
            self._fail_queries()
            self.on_dead()
            return
        self.now_ns = time.monotonic_ns()
        if self._walks:
            self._follow(events)
        self.together.hold()
        try:
            for event in events:
                if type(event) is StepResult:
                    self._take(event.rows, len(events) == 1)
                else:
                    self._notice(event)
            self.on_taken()
            for lane in self._lanes:
                lane.is_touched = False
                lane.flush()
            for turn in self._touched:
                turn.is_touched = False
                turn.sink.flush()
        finally:
            self._lanes.clear()
            self._touched.clear()
            self.together.release()
            if self._begun:
                written_ns = time.monotonic_ns()
                for turn in self._begun:
                    turn.timing.first_token_ns = written_ns
                self._begun.clear()

    def _follow(self, events: list[Event]) -> None:
        """Tokens of held answers set out to be walked: the engine waits for their masks, and for nothing else here."""
        walks = self._walks
        for event in events:
            if type(event) is StepResult:
                for row in event.rows:
                    if (walk := walks.get(row[0])) is not None and not row[2]:
                        walk.take(row[1])
            elif type(event) is Guessed and (walk := walks.get(event.ask_id)) is not None:
                walk.take_guess(event)
        self.on_taken()

    def _take(self, rows: Sequence[Row], is_alone: bool) -> None:
        """Hands a step's tokens to their choices: by the short way where that is open, which is written out here.

        is_alone: no other step's rows come with these. What the first of an answer's tokens says goes out at once then.
        """
        choices, lanes, now = self._choices, self._lanes, self.now_ns
        self.n_tokens += len(rows)
        is_alone = is_alone and len(rows) <= len(choices)
        for ask_id, token, flags, logprob, top in rows:
            choice = choices.get(ask_id)
            if choice is None:
                continue
            lane = choice.lane
            if lane is not None and not flags and not lane.is_behind:
                try:
                    text = choice.pieces[token]
                except IndexError:
                    text = None
                if text is not None:
                    choice.output_tokens += 1
                    choice.times.append(now)
                    if is_alone:
                        lane.say_now(text)
                        continue
                    lane.say(text)
                    if not lane.is_touched:
                        lane.is_touched = True
                        lanes.append(lane)
                    continue
            choice.take(token, flags, logprob, top)
            self.touch(choice.turn)

    def _notice(self, event: Event) -> None:
        if isinstance(event, Started):
            if (choice := self._choices.get(event.ask_id)) is not None:
                choice.on_started(event)
                self.touch(choice.turn)
        elif isinstance(event, Done | Refused):
            self._walks.pop(event.ask_id, None)
            if (choice := self._choices.pop(event.ask_id, None)) is not None:
                choice.on_ended(event)
                self.touch(choice.turn)
            elif (waiting := self._vectors.pop(event.ask_id, None)) is not None and not waiting.done():
                waiting.set_exception(event.to_error())
        elif isinstance(event, Guessed):
            if event.ask_id not in self._walks:  # its reasoning may be ended behind any token: nothing is certain of what would follow
                self.masks([Walked(event.ask_id, event.index, event.index + 1, ())])
        elif isinstance(event, Vector):
            if (waiting := self._vectors.pop(event.ask_id, None)) is not None and not waiting.done():
                waiting.set_result(event.values)
        elif isinstance(event, State):
            future = self._queries.get(event.query_id)
            if future is not None and not future.done():
                future.set_result(event.facts)

    def _fail_queries(self) -> None:
        for future in self._queries.values():
            if not future.done():
                future.set_exception(PackError("the engine process has ended", "see the runner's log"))
