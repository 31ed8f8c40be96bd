"""One request to a runner on this machine, and its answer as it comes.

A general client takes more than twice as long for each part of a stream, of which a GPU makes tens of thousands a second: what comes
together goes on together here, and nothing of it is looked at but its frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httptools

READ_BYTES = 1 << 16
CONNECT_S = 5.0


class Broken(ConnectionError):
    """The runner did not answer, or not to the end."""


class Answer:
    """What a runner answers. headers: names in lower case, as they came."""

    def __init__(self, reader: asyncio.StreamReader):
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._has_frame = self._is_told = self._is_whole = False
        self.status = 0
        self.headers: list[tuple[str, str]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers; told by the parser, as what follows."""
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        """All of them."""
        self.status = self._parser.get_status_code()
        self._is_told = True
        self._has_frame = any(name in ("content-length", "transfer-encoding") for name, _ in self.headers)

    def on_body(self, part: bytes) -> None:
        """More of the body."""
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """There is no more."""
        self._is_whole = True

    def header(self, name: str) -> str:
        """A header's value, "" where it was not sent."""
        return next((value for key, value in self.headers if key == name), "")

    async def head(self) -> None:
        """Returns when status and headers are there. Raises: Broken."""
        while not self._is_told:
            await self._more()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body, as much at a time as has come. Raises: Broken when it ends before its end."""
        while True:
            if self._parts:
                part = b"".join(self._parts)
                self._parts.clear()
                yield part
            if self._is_whole:
                return
            await self._more()

    async def _more(self) -> None:
        try:
            data = await self._reader.read(READ_BYTES)
            if data:
                self._parser.feed_data(data)
                return
        except (OSError, httptools.HttpParserError) as error:
            raise Broken(str(error)) from None
        if not self._is_told or self._has_frame:
            raise Broken("it hung up before the end of its answer" if self._is_told else "it hung up")
        self._is_whole = True  # a body without a frame ends so


@asynccontextmanager
async def post(host: str, port: int, path: str, headers: Mapping[str, str], body: bytes) -> AsyncIterator[Answer]:
    """The answer, of which status and headers are there. When this is left before its end, the runner sees that its client has gone. Raises: Broken."""
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise Broken(str(error) or f"no connection within {CONNECT_S:.0f} s") from None
    try:
        told = {**headers, "host": f"{host}:{port}", "content-length": str(len(body)), "connection": "close"}
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in told.items())
        writer.write(f"{head}\r\n".encode("latin-1") + body)
        answer = Answer(reader)
        await answer.head()
        yield answer
    finally:
        writer.close()
