"""Chunks to a socket: one write per stream and step, and a client that lags gets its chunks merged.

The server's `send` only waits while a client does not read, so it is driven from the engine's events directly: no task switch
per token. When it does wait, a task takes over and the stream is `is_behind` until the client has read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..edge.body import Rest, begin
from .http import SSE, Exchange, Headers
from .outbox import Pipe

HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
COMMENT = b": keep-alive\n\n"


class EventStream:
    """The event stream of one answer. write: appends an event; flush: sends what was appended, when the client keeps up.

    on_caught_up: called when a lagging client has read everything; it may write. comment: sent after a silence (or written by a call of it).
    head, tail: the bytes around the JSON of a text, set by a sink that lets its texts go by the short way (a Lane).
    """

    __slots__ = (
        "_content_type", "_exchange", "_is_quiet", "_parts", "_pipe", "_put", "_waiting", "comment", "head", "is_behind", "is_touched", "on_caught_up", "tail", "write",
    )  # fmt: skip

    def __init__(self, exchange: Exchange, content_type: bytes = SSE) -> None:
        self.head = self.tail = b""
        self.is_behind = self.is_touched = False
        self._parts: list[bytes] = []
        self.write: Callable[[bytes], None] = self._parts.append
        self._pipe: Pipe | None = None
        self._exchange = exchange
        self._put = exchange.outbox.put
        self._is_quiet = False
        self._content_type = content_type
        self._waiting: asyncio.Task[None] | None = None
        self.comment: bytes | Callable[[], None] = COMMENT
        self.on_caught_up: Callable[[], None] | None = None

    def flush(self) -> None:
        """Sends what was written, with the headers before the first of it. Never waits."""
        parts, pipe = self._parts, self._pipe
        if self.is_behind or not parts:
            return
        self._is_quiet = False
        if pipe is None or not pipe.is_open:
            self._send()
            return
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._put(pipe, data)

    def say(self, text: bytes) -> None:
        """Appends an event of a text that is JSON already."""
        self._parts.append(self.head + text + self.tail)

    def say_now(self, text: bytes) -> None:
        """Sends an event of a text that is JSON already, and what was appended before it."""
        pipe = self._pipe
        if self._parts or pipe is None or not pipe.is_open:
            self._parts.append(self.head + text + self.tail)
            self.flush()
        else:
            self._is_quiet = False
            self._put(pipe, self.head + text + self.tail)

    def _send(self) -> None:
        """The way through the server, which knows what to do with a client that does not read or has left."""
        exchange, parts = self._exchange, self._parts
        if not exchange.is_started:
            self._drive(exchange.start(200, self._content_type, HEADERS))
            self._pipe = exchange.pipe()
            if self.is_behind:
                return
        exchange.outbox.write_out()
        if self._pipe is not None:
            self._pipe.is_direct = False
        data = b"".join(parts)
        parts.clear()
        self._drive(exchange.send_part(data))

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
        rest = begin(sending)
        if rest is None:
            return
        self.is_behind = True
        self._waiting = asyncio.get_running_loop().create_task(self._wait(rest))

    async def _wait(self, rest: Rest[None]) -> None:
        try:
            await rest
        finally:
            self._waiting, self.is_behind = None, False
        if self.on_caught_up is not None:
            self.on_caught_up()
        self.flush()
