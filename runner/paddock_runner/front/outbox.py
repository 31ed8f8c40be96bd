"""Bytes of answers that are under way, past ASGI to their connections; those of one step in one go.

A write into a socket runs through a lot of the system's code: one after the other, with nothing between them, they find it where
the last one left it. They go into the socket itself while the event loop keeps nothing for it, and while no other thread of the
interpreter wants to run: each such write lets go of the interpreter's lock, and would wait for it again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from time import monotonic_ns

SLOW_NS = 200_000
"""A few writes that take longer waited for something."""
FEW = 2
APART_NS = 100_000_000
"""How long writes go through the event loop when one few after the other waited: it is the interpreter's lock then, not the processor."""


class Pipe:
    """One connection. is_open: its client reads and is there; minded by the protocol.

    is_direct: `send` may be called: the event loop keeps nothing for this connection. Who has something sent in another way
    while an answer is under way, sets it to False.
    """

    __slots__ = ("_n_kept", "_socket", "_write", "is_direct", "is_open", "send")

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self.is_open, self.is_direct = True, False
        self._write, self._n_kept = transport.write, transport.get_write_buffer_size
        theirs = transport.get_extra_info("socket")
        self._socket: socket.socket | None = None
        if theirs is not None and transport.get_extra_info("sslcontext") is None:
            self._socket = socket.socket(theirs.family, socket.SOCK_STREAM, theirs.proto, theirs.fileno())
        self.send: Callable[[bytes], int] | None = None if self._socket is None else self._socket.send

    def write(self, chunk: bytes) -> None:
        """Writes through the event loop; directly the next time, when it keeps nothing then."""
        self._write(chunk)
        self.is_direct = False

    def try_direct(self) -> bool:
        """Whether the socket itself can be written to now."""
        self.is_direct = self.send is not None and not self._n_kept()
        return self.is_direct

    def close(self) -> None:
        """The connection has gone: its descriptor is the event loop's to close."""
        self.is_open = self.is_direct = False
        self.send = None
        if self._socket is not None:
            self._socket.detach()
            self._socket = None


class Outbox:
    """What the streams of one step write, between `hold` and `release`; outside of these it goes out at once."""

    __slots__ = ("_apart_until_ns", "_is_holding", "_kept")

    def __init__(self) -> None:
        self._kept: list[tuple[Pipe, bytes]] = []
        self._is_holding = False
        self._apart_until_ns = 0

    def put(self, pipe: Pipe, data: bytes) -> None:
        """Writes a part of an answer that goes out in chunks."""
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        if self._is_holding:
            self._kept.append((pipe, chunk))
        else:
            pipe.write(chunk)

    def hold(self) -> None:
        """Keeps what comes."""
        self._is_holding = True

    def release(self) -> None:
        """Writes what was kept, and keeps no more."""
        self._is_holding = False
        self.write_out()

    def write_out(self) -> None:
        """Writes what was kept, in its order."""
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        now = monotonic_ns()
        is_apart, has_waited = now < self._apart_until_ns, False
        for i, (pipe, chunk) in enumerate(kept):
            if is_apart or not (pipe.is_direct or pipe.try_direct()):
                pipe.write(chunk)
                continue
            try:
                n = pipe.send(chunk)  # type: ignore[misc]
            except OSError:  # full, or gone: the event loop finds out
                n = 0
            if n < len(chunk):
                pipe.write(chunk[n:])
            if i % FEW:
                then, now = now, monotonic_ns()
                is_slow = now - then > SLOW_NS
                if is_slow and has_waited:
                    is_apart, self._apart_until_ns = True, now + APART_NS
                has_waited = is_slow
