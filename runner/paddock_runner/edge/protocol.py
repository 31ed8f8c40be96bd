"""uvicorn's HTTP/1.1 with limits that uvicorn does not have: on what is no body of a request (its size, and the time it takes to arrive)."""

from __future__ import annotations

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0
_OFFER = re.compile(rb"\r\nupgrade(?=[ \t]*:)", re.IGNORECASE)
"""A client would rather speak another protocol (Java's offers h2c in every request). Parser and uvicorn would then take the body for the other protocol, and lose it."""
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _Open(int):
    """The length of an answer that ends where its connection does: nothing is too much for it, and nothing too little."""

    def __sub__(self, other: int) -> _Open:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class Protocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0
    _head_tail = b""
    _frame_bytes = 0
    _is_in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client came."""
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._is_in_head:
            end = (self._head_tail + data).find(b"\r\n\r\n")
            n = len(data) if end < 0 else end + 4 - len(self._head_tail)
            self._head_bytes += n
            self._head_tail = (self._head_tail + data)[-3:]
            data = _OFFER.sub(b"\r\nx-upgrade", data[:n]) + data[n:] if _OFFER.search(data, 0, n) else data
            if self._head_timer is None:
                self._watch_head()
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()
                return
        else:
            self._frame_bytes += len(data)
        super().data_received(data)
        if self._frame_bytes > MAX_HEAD_BYTES:
            self.transport.close()  # sizes of chunks, and headers behind the body, without end

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. One behind the body is none of the request's: it could say who calls, past a proxy that looks at the head."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """More of the body."""
        self._frame_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None and self.scope["http_version"] == "1.0":  # there are no chunks in it, which uvicorn sends all the same
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _Open(1 << 62)

    def on_message_complete(self) -> None:
        """The request is complete; what comes next is another's head."""
        super().on_message_complete()
        self._stop_timer()
        self._is_in_head, self._head_bytes, self._head_tail, self._frame_bytes = True, 0, b"", 0
        if self.cycle is not None and self.cycle.response_complete:
            self._watch_head()  # uvicorn's own time for the next head ended when the rest of the body came

    def on_response_complete(self) -> None:
        """The answer is complete; the request need not be, if it was refused."""
        super().on_response_complete()
        if not self._is_in_head and self._head_timer is None and not self.transport.is_closing():
            self._watch_head()

    def _watch_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if self.transport is None or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._watch_head()  # the answer before is under way: what came behind its request can wait
        else:
            self.transport.close()
