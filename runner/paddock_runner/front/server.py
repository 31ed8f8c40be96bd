"""The HTTP server: uvicorn on a socket that is bound before anything is loaded, with limits that uvicorn does not have."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .http import PIPE
from .listen import BACKLOG
from .outbox import Pipe
from .routes import Application
from .service import Front

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a limit on the size of a request's head and on the time it takes to arrive."""

    _head_bytes = 0
    _head_tail = b""
    _is_in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    pipe: Pipe

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came."""
        super().connection_made(transport)
        self.pipe = Pipe(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left."""
        self.pipe.close()
        self._stop_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read."""
        self.pipe.is_open = False
        super().pause_writing()

    def resume_writing(self) -> None:
        """It does again."""
        self.pipe.is_open = True
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._is_in_head:
            end = (self._head_tail + data).find(b"\r\n\r\n")
            self._head_bytes += len(data) if end < 0 else end + 4 - len(self._head_tail)
            self._head_tail = (self._head_tail + data)[-3:]
            if self._head_timer is None:
                self._watch_head()
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                )
                self.transport.close()
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope[PIPE] = partial(_pipe, self, self.cycle)  # type: ignore[literal-required]

    def on_message_complete(self) -> None:
        """The request is complete; what comes next is another's head."""
        super().on_message_complete()
        self._is_in_head, self._head_bytes, self._head_tail = True, 0, b""

    def _watch_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()


def _pipe(protocol: Protocol, cycle: RequestResponseCycle) -> Pipe | None:
    """The connection, when this answer goes out in chunks."""
    return protocol.pipe if cycle.chunked_encoding and not cycle.disconnected else None


class _Uvicorn(uvicorn.Server):
    """Without handlers for signals: those are app.py's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Serves a Front. `stop` ends it when the running requests have ended, at most drain_s later."""

    def __init__(self, front: Front, keep_alive_s: float, drain_s: float, tls: tuple[str, str] | None = None) -> None:
        self._front = front
        settings: dict[str, Any] = {
            "http": Protocol, "lifespan": "off", "log_config": None, "access_log": False, "server_header": False,
            "date_header": False, "ws": "none", "proxy_headers": False, "timeout_keep_alive": max(1, int(keep_alive_s)),
            "timeout_graceful_shutdown": max(1, int(drain_s)), "backlog": BACKLOG,
        }  # fmt: skip
        if tls is not None:
            settings |= {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}
        self._uvicorn = _Uvicorn(uvicorn.Config(Application(front), **settings))

    async def serve(self, listener: socket.socket) -> None:
        """Serves until stopped."""
        ticker = asyncio.get_running_loop().create_task(self._front.tick())
        try:
            await self._uvicorn.serve([listener])
        finally:
            ticker.cancel()

    def stop(self, at_once: bool = False) -> None:
        """Takes no new connections; ends when the open requests have ended, or at once."""
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit |= at_once
