"""Chunks to a socket: one write per stream and step, and a client that lags gets its chunks merged.

The server's `send` only waits while a client does not read, so it is driven from the engine's events directly: no task switch
per token. When it does wait, a task takes over and the stream is `is_behind` until the client has read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from .http import SSE, Exchange, Headers

HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
COMMENT = b": keep-alive\n\n"


class EventStream:
    """The event stream of one answer. write: appends an event; flush: sends what was appended, when the client keeps up.

    on_caught_up: called when a lagging client has read everything; it may write. comment: sent after a silence (or written by a call of it).
    """

    def __init__(self, exchange: Exchange, content_type: bytes = SSE) -> None:
        self._exchange = exchange
        self._content_type = content_type
        self._parts: list[bytes] = []
        self._waiting: asyncio.Task[None] | None = None
        self.comment: bytes | Callable[[], None] = COMMENT
        self._is_quiet = False
        self.write = self._parts.append
        self.is_behind = False
        self.on_caught_up: Callable[[], None] | None = None

    def flush(self) -> None:
        """Sends what was written, with the headers before the first of it. Never waits."""
        if self.is_behind or not self._parts:
            return
        self._is_quiet = False
        if not self._exchange.is_started:
            self._drive(self._exchange.start(200, self._content_type, HEADERS))
            if self.is_behind:
                return
        data = b"".join(self._parts)
        self._parts.clear()
        write = self._exchange.write_now
        if write is None or not write(data):
            self._drive(self._exchange.send_part(data))

    def tick(self) -> None:
        """Called at intervals: a stream that was silent since the last call gets a comment."""
        if self._is_quiet and not self.is_behind and not self._parts and not self._exchange.is_complete:
            if isinstance(self.comment, bytes):
                self.write(self.comment)
            else:
                self.comment()
            self.flush()
        self._is_quiet = True

    async def finish(self) -> None:
        """Sends what is left and ends the answer, however long the client takes to read it."""
        while self._waiting is not None:
            await self._waiting
        if not self._exchange.is_started:
            await self._exchange.start(200, self._content_type, HEADERS)
        data = b"".join(self._parts)
        self._parts.clear()
        await self._exchange.send_part(data, is_last=True)

    async def settle(self) -> None:
        """Waits until nothing is on its way, so that somebody else may send."""
        self._parts.clear()
        while self._waiting is not None:
            await self._waiting

    def _drive(self, sending: Awaitable[None]) -> None:
        steps = sending.__await__()
        try:
            first = next(steps)
        except StopIteration:
            return
        self.is_behind = True
        self._waiting = asyncio.get_running_loop().create_task(self._wait(_Rest(steps, first)))

    async def _wait(self, rest: _Rest) -> None:
        try:
            await rest
        finally:
            self._waiting, self.is_behind = None, False
        if self.on_caught_up is not None:
            self.on_caught_up()
        self.flush()


class _Rest:
    """The rest of an awaitable whose first step was taken outside a task."""

    __slots__ = ("_first", "_steps")

    def __init__(self, steps: Generator[Any, Any, None], first: Any) -> None:
        self._steps, self._first = steps, first

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._first
        yield from self._steps
