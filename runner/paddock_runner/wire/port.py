"""The two ends of a channel as objects: what a front calls, what the engine calls.

FrontPort: ask, abort, mask, query; events back through `poll` or, under asyncio, through `listen`.
EnginePort: records in through `next`, rows and notices out; never blocks on a front that does not read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..errors import Busy, PackError
from .channel import Channel, End
from .guesses import Guessed
from .messages import (
    BIND,
    QUERY,
    ROW,
    SINGLE,
    STEP,
    TOP,
    Abort,
    Ask,
    Done,
    ErrorCode,
    Event,
    Kind,
    MaskUpdate,
    Reason,
    Refused,
    Row,
    Started,
    State,
    StepResult,
    Update,
    Vector,
)  # fmt: skip

if TYPE_CHECKING:
    import asyncio

Ended = TypeVar("Ended", Done, Refused)
RETRY_MS = 5
"""How soon a record that found the ring full is tried again."""
MAX_TURNS = 4
"""Rounds of reading before the event loop gets its turn."""


class FrontPort:
    """The front's end. All calls from one thread, but for `masks`. Every ask ends with exactly one Done or Refused, also when the engine dies."""

    def __init__(self, channel: Channel, shares_process: bool = False) -> None:
        self._end = End(channel, is_front=True, shares_process=shares_process)
        self._reader = self._end.reader
        self._writer = self._end.writer
        self._open: dict[int, int] = {}
        self._ask_of_slot: list[int] = [0] * 256
        self._waiting: deque[tuple[Kind, bytes]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_events: Callable[[list[Event]], None] | None = None
        self._n_queries = 0
        self._lock = threading.Lock()
        """Held while something is written."""
        self.is_dead = False
        """The engine has gone; every call raises PackError from then on."""

    @property
    def n_open(self) -> int:
        """Asks that have not ended."""
        return len(self._open)

    def ask(self, ask: Ask, masks: Sequence[Update] = ()) -> None:
        """Sends an ask, and masks of its first output tokens, which the engine sees together.

        Raises: Busy when the ring is full (nothing was sent), TooLarge when it can never fit, UsageError from Ask.encode,
        PackError when the engine has gone.
        """
        self._check()
        payload = ask.encode()
        with self._lock:
            if self._waiting or not self._writer.push(Kind.ASK, payload):
                raise Busy(
                    "the engine does not keep up with new requests", "try again", 100, waiting_bytes=self._writer.used_bytes
                )
            self._open[ask.ask_id] = -1
            self._write(masks)
            self._writer.publish()

    def abort(self, ask_id: int) -> None:
        """Asks for the end of an ask; Done with reason ABORT (or whatever was quicker) follows. Unknown ids are ignored."""
        if ask_id in self._open:
            self._send(Kind.ABORT, Abort(ask_id).encode())

    def masks(self, updates: Sequence[Update]) -> None:
        """Sends masks of output tokens; the engine sees all of them or none. Any thread may."""
        with self._lock:
            self._write(updates)
            if not self.is_dead:
                self._writer.publish()

    def query(self) -> int:
        """Asks for the engine's state; the State event carries the id that this returns. Raises: PackError."""
        self._check()
        self._n_queries += 1
        self._send(Kind.QUERY, QUERY.pack(self._n_queries))
        return self._n_queries

    def poll(self) -> list[Event]:
        """Everything that has arrived. Does not block."""
        self._flush()
        events: list[Event] = []
        reader = self._reader
        while (payload := reader.next()) is not None:
            kind = reader.kind
            if kind == Kind.STEP:
                events.append(self._step(payload))
            elif kind == Kind.BIND:
                self._bind(*BIND.unpack_from(payload)[:2])
            elif kind == Kind.STARTED:
                started = Started.decode(payload)
                if started.slot >= 0:
                    self._bind(started.ask_id, started.slot)
                events.append(started)
            elif kind == Kind.DONE:
                events.append(self._ended(Done.decode(payload)))
            elif kind == Kind.REFUSED:
                events.append(self._ended(Refused.decode(payload)))
            elif kind == Kind.STATE:
                events.append(State.decode(payload))
            elif kind == Kind.GUESS:
                events.append(Guessed.decode(payload))
            elif kind == Kind.VECTOR:
                events.append(Vector.decode(payload))
            payload.release()
        reader.done()
        return events

    def listen(self, loop: asyncio.AbstractEventLoop, on_events: Callable[[list[Event]], None]) -> None:
        """Calls on_events from the loop whenever something arrives; also when the engine dies (a Done for each open ask, then [])."""
        self._loop = loop
        self._on_events = on_events
        loop.add_reader(self._reader.event_fd, self._woken)
        loop.add_reader(self._end.life_fd, self._died)
        self._woken()

    def close(self) -> None:
        """Stops listening and lets go of the channel; the engine aborts what is open."""
        self._unlisten()
        with self._lock:
            self.is_dead = True
            self._end.close()

    def _check(self) -> None:
        if self.is_dead or (self._loop is None and not self._end.peer_is_alive()):
            raise PackError("the engine process has ended", "see the runner's log; start it again")

    def _send(self, kind: Kind, payload: bytes) -> None:
        with self._lock:
            self._append(kind, payload)
            self._writer.publish()

    def _append(self, kind: Kind, payload: bytes) -> None:
        if self.is_dead:
            return
        if self._waiting or not self._writer.push(kind, payload):
            self._waiting.append((kind, payload))
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._retry_later)

    def _write(self, updates: Sequence[Update]) -> None:
        writer, is_free = self._writer, not self._waiting and not self.is_dead
        for update in updates:
            if update.ask_id not in self._open:
                continue
            kind = Kind.MASK if isinstance(update, MaskUpdate) else Kind.WALKED
            if is_free and (at := writer.reserve(kind, update.n_bytes)) >= 0:
                update.write(writer.data, at)
            else:
                is_free = False
                self._append(kind, update.encode())

    def _flush(self) -> None:
        waiting = self._waiting
        if waiting:
            with self._lock:
                while waiting and self._writer.push(*waiting[0]):
                    waiting.popleft()
                self._writer.publish()

    def _retry_later(self) -> None:
        if self._loop is not None:
            self._loop.call_later(RETRY_MS / 1000, self._retry)

    def _retry(self) -> None:
        if not self.is_dead:
            self._flush()
            if self._waiting:
                self._retry_later()

    def _step(self, payload: memoryview) -> StepResult:
        seq, n_rows, n_top, n_slots, _ = STEP.unpack_from(payload)
        asks = self._ask_of_slot
        if n_slots > len(asks):
            asks.extend([0] * (n_slots - len(asks)))
        rows: list[Row] = []
        at = STEP.size
        with payload[at : at + ROW.size * n_rows] as block:
            if not n_top:
                rows = [
                    (ask_id, token, flags, logprob, ())
                    for slot, token, flags, logprob in SINGLE.iter_unpack(block)
                    if token >= 0 and (ask_id := asks[slot])
                ]
                return StepResult(seq, rows)
            at += ROW.size * n_rows
            top = tuple(TOP.iter_unpack(payload[at : at + TOP.size * n_top]))
            first = 0
            for slot, token, flags, _, logprob, n in ROW.iter_unpack(block):
                if token >= 0 and (ask_id := asks[slot]):
                    rows.append((ask_id, token, flags, logprob, top[first : first + n]))
                first += n
            return StepResult(seq, rows)

    def _bind(self, ask_id: int, slot: int) -> None:
        asks = self._ask_of_slot
        if slot >= len(asks):
            asks.extend([0] * (slot + 1 - len(asks)))
        self._unbind(ask_id)
        if ask_id in self._open:
            self._open[ask_id] = slot
            if slot >= 0:
                asks[slot] = ask_id

    def _unbind(self, ask_id: int) -> None:
        slot = self._open.get(ask_id, -1)
        if slot >= 0 and self._ask_of_slot[slot] == ask_id:
            self._ask_of_slot[slot] = 0

    def _ended(self, event: Ended) -> Ended:
        self._unbind(event.ask_id)
        self._open.pop(event.ask_id, None)
        return event

    def _woken(self) -> None:
        self._reader.unpark()
        for _ in range(MAX_TURNS):
            events = self.poll()
            if events and self._on_events is not None:
                self._on_events(events)
            if self.is_dead or self._reader.park():
                return
        if self._loop is not None:
            self._loop.call_soon(self._woken)

    def _died(self) -> None:
        events = self.poll()
        self._unlisten()
        self.is_dead = True
        events.extend(Done(ask_id, Reason.ERROR, ErrorCode.GONE) for ask_id in list(self._open))
        self._open.clear()
        if self._on_events is not None:
            self._on_events(events)
            if events:
                self._on_events([])

    def _unlisten(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._reader.event_fd)
            self._loop.remove_reader(self._end.life_fd)
            self._loop = None


class EnginePort:
    """The engine's end of one front's channel."""

    __slots__ = (
        "_end",
        "_overflow",
        "_overflow_bytes",
        "is_closed",
        "is_dead",
        "max_overflow_bytes",
        "reader",
        "writer",
    )

    def __init__(self, channel: Channel, shares_process: bool = False, max_overflow_bytes: int = 64 << 20) -> None:
        self._end = End(channel, is_front=False, shares_process=shares_process)
        self.reader = self._end.reader
        self.writer = self._end.writer
        self._overflow: deque[tuple[int, bytes]] = deque()
        self._overflow_bytes = 0
        self.max_overflow_bytes = max_overflow_bytes
        self.is_dead = False
        """The front has gone, or let more than max_overflow_bytes pile up: its asks must be ended."""
        self.is_closed = False

    @property
    def life_fd(self) -> int:
        """Becomes readable when the front dies."""
        return self._end.life_fd

    def peer_is_alive(self) -> bool:
        """False once the front has gone. One system call."""
        return self._end.peer_is_alive()

    def send(self, kind: int, payload: bytes) -> None:
        """Appends a record; it goes out with the next `publish`. A full ring makes it wait here, in order."""
        if self.is_dead:
            return
        if self._overflow or not self.writer.push(kind, payload):
            self._keep(kind, payload)

    def send_rows(self, seq: int, n_slots: int, rows: memoryview, top: bytes = b"") -> None:
        """Appends one step's rows: `rows` is pk_result [n], copied as it is; `top` the pk_top entries of the rows that have any."""
        if self.is_dead:
            return
        n_row_bytes = len(rows)
        size = 24 + n_row_bytes + len(top)
        at = -1 if self._overflow else self.writer.reserve(Kind.STEP, size)
        if at < 0:
            head = STEP.pack(seq, n_row_bytes // 24, len(top) // 8, n_slots, 0)
            self._keep(Kind.STEP, b"".join((head, rows, top)))
            return
        data = self.writer.data
        STEP.pack_into(data, at, seq, n_row_bytes // 24, len(top) // 8, n_slots, 0)
        data[at + 24 : at + 24 + n_row_bytes] = rows
        if top:
            data[at + 24 + n_row_bytes : at + size] = top

    def publish(self) -> None:
        """Sends what was appended, what had to wait first."""
        if self.is_closed:
            return
        overflow = self._overflow
        while overflow and self.writer.push(*overflow[0]):
            self._overflow_bytes -= len(overflow.popleft()[1])
        self.writer.publish()

    @property
    def overflow_bytes(self) -> int:
        """Bytes that wait because the front does not read."""
        return self._overflow_bytes

    def _keep(self, kind: int, payload: bytes) -> None:
        self._overflow.append((kind, payload))
        self._overflow_bytes += len(payload)
        if self._overflow_bytes > self.max_overflow_bytes:
            self.is_dead = True
            self._overflow.clear()
            self._overflow_bytes = 0

    def close(self) -> None:
        """Lets go of the channel; the front sees this as the engine's death."""
        if not self.is_closed:
            self.is_dead = self.is_closed = True
            self._overflow.clear()
            self._overflow_bytes = 0
            self._end.close()
