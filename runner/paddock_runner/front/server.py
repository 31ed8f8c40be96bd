"""The HTTP server: uvicorn on a socket that is bound before anything is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ..edge.listen import BACKLOG
from ..edge.protocol import Protocol
from .http import PIPE
from .outbox import Pipe
from .routes import Application
from .service import Front


class Piped(Protocol):
    """A connection that parts of answers may take past ASGI."""

    pipe: Pipe

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came."""
        super().connection_made(transport)
        self.pipe = Pipe(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left."""
        self.pipe.close()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read."""
        self.pipe.is_open = False
        super().pause_writing()

    def resume_writing(self) -> None:
        """It does again."""
        self.pipe.is_open = True
        super().resume_writing()

    def on_headers_complete(self) -> None:
        """The head is there."""
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope[PIPE] = partial(_pipe, self, self.cycle)  # type: ignore[literal-required]


def _pipe(protocol: Piped, cycle: RequestResponseCycle) -> Pipe | None:
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
            "http": Piped, "lifespan": "off", "log_config": None, "access_log": False, "server_header": False,
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
