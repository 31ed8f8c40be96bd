"""HTTP/1.1 for bulk data: an httpx transport whose bodies come straight from the socket in large pieces.

httpx's own copies each byte four times on its way; a file of many GiB notices. Used where no proxy is set; with one, httpx's goes on.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable, Iterator

import httpx

PIECE_BYTES = 1 << 20
REUSE = "paddock.reuse"
Connection = http.client.HTTPConnection
Origin = tuple[str, str, int]


class Transport(httpx.BaseTransport):
    """Keeps connections of finished answers for the next request to the same origin. Safe to use from several threads."""

    def __init__(self, context: Callable[[], ssl.SSLContext], connect_s: float, stall_s: float, max_idle: int):
        self._context, self._connect_s, self._stall_s, self._max_idle = context, connect_s, stall_s, max_idle
        self._idle: dict[Origin, list[Connection]] = {}
        self._lock, self._local = threading.Lock(), threading.local()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request without a body and read the head of its answer.

        Raises: httpx.ConnectError, ConnectTimeout, ReadTimeout, RemoteProtocolError, ReadError.
        """
        url = request.url
        origin = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        while True:
            connection = self._take(origin)
            is_used = connection is not None
            connection = connection or self._connect(origin, request)
            try:
                connection.putrequest(
                    request.method, url.raw_path.decode("ascii"), skip_host=True, skip_accept_encoding=True
                )
                for name, value in request.headers.raw:
                    if name.lower() not in (b"connection", b"keep-alive"):
                        connection.putheader(name, value)
                connection.endheaders()
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if is_used and isinstance(error, (ConnectionError, http.client.RemoteDisconnected)):
                    continue  # closed by the server while it lay idle
                raise _as_httpx(error, request) from error
            body = Body(self, origin, connection, answer, request)
            return httpx.Response(answer.status, headers=answer.getheaders(), stream=body, request=request)

    def _connect(self, origin: Origin, request: httpx.Request) -> Connection:
        scheme, host, port = origin
        if scheme == "https":
            connection: Connection = http.client.HTTPSConnection(
                host, port, timeout=self._connect_s, context=self._context()
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._connect_s)
        try:
            connection.connect()
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error), request=request) from error
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        connection.sock.settimeout(self._stall_s)
        return connection

    def buffer(self) -> memoryview:
        """PIECE_BYTES for this thread: made once, since fresh memory costs more than what is put into it."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(PIECE_BYTES))
        return self._local.buffer  # type: ignore[no-any-return]

    def _take(self, origin: Origin) -> Connection | None:
        with self._lock:
            kept = self._idle.get(origin)
            return kept.pop() if kept else None

    def keep(self, origin: Origin, connection: Connection) -> None:
        """A connection whose answer was read to its end."""
        with self._lock:
            kept = self._idle.setdefault(origin, [])
            if len(kept) < self._max_idle and connection.sock is not None:
                kept.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what lies idle."""
        with self._lock:
            idle, self._idle = [c for kept in self._idle.values() for c in kept], {}
        for connection in idle:
            connection.close()


class Body(httpx.SyncByteStream):
    """The body of one answer, in pieces of what has arrived, at most PIECE_BYTES.

    With the request's extension REUSE, each piece is a view of the thread's buffer and must be used up before the next is asked for.
    """

    def __init__(
        self,
        transport: Transport,
        origin: Origin,
        connection: Connection,
        answer: http.client.HTTPResponse,
        request: httpx.Request,
    ):
        self._transport, self._origin, self._connection = transport, origin, connection
        self._answer, self._request = answer, request

    def __iter__(self) -> Iterator[bytes]:
        answer = self._answer
        try:
            if REUSE in self._request.extensions and not answer.chunked and answer.length is not None:
                view = self._transport.buffer()
                while answer.length and (n_bytes := answer.fp.readinto1(view[: answer.length])):
                    answer.length -= n_bytes
                    yield view[:n_bytes]  # type: ignore[misc] # a view does for every consumer that asks for it
            else:
                while piece := answer.read1(PIECE_BYTES):
                    yield piece
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise _as_httpx(error, self._request) from error
        if answer.length:
            self._connection.close()
            raise httpx.RemoteProtocolError(f"{answer.length} bytes of the body are missing", request=self._request)

    def close(self) -> None:
        """Keep the connection where the answer was read to its end, else hang up."""
        is_whole = self._answer.length == 0 or (self._answer.length is None and self._answer.isclosed())
        self._answer.close()
        if is_whole:
            self._transport.keep(self._origin, self._connection)
        else:
            self._connection.close()


def _as_httpx(error: Exception, request: httpx.Request) -> httpx.HTTPError:
    """The error that httpx's own transport would raise."""
    if isinstance(error, TimeoutError):
        return httpx.ReadTimeout(str(error), request=request)
    if isinstance(error, http.client.HTTPException):
        return httpx.RemoteProtocolError(str(error) or type(error).__name__, request=request)
    return httpx.ReadError(str(error), request=request)
