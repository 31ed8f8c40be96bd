"""What a port does with requests that do not end, and with what stands behind their bodies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from paddock_runner.edge import protocol
from paddock_runner.edge.listen import bind

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]
HEAD = b"POST /%s HTTP/1.1\r\nhost: localhost\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """The body and who calls, as the application sees them; /early answers before the body, /slow takes its time."""
    raw, more = b"", scope["path"] != "/early"
    while more:
        message = await receive()
        raw, more = raw + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(1)
    told = raw + b" by " + dict(scope["headers"]).get(b"authorization", b"nobody")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]})
    await send({"type": "http.response.body", "body": told})


def served(client: Client) -> Any:
    """What a client finds at a port of ours."""

    async def run() -> Any:
        listener = bind("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(answer, http=protocol.Protocol, lifespan="off", log_config=None, ws="none", timeout_keep_alive=60))
        task = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        try:
            return await asyncio.wait_for(client(reader, writer), 20)
        finally:
            writer.close()
            server.should_exit = server.force_exit = True
            await task

    return asyncio.run(run())


async def told(reader: asyncio.StreamReader) -> bytes:
    """The body of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))


def test_headers_behind_a_body_are_none_of_the_requests() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(HEAD % b"" + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nauthorization: me\r\n\r\n")
        return await told(reader)

    assert served(client) == b"hi by nobody"


def test_frame_of_a_body_has_a_limit() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(HEAD % b"early" + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n")
        await told(reader)
        for n in range(1000):
            if reader.at_eof() or reader.exception() is not None:
                return n
            writer.write(b"x: " + b"y" * 16000 + b"\r\n")
            await asyncio.sleep(0.001)
        return 1000

    assert served(client) < 1000


@pytest.mark.parametrize("more", [b"", b"b", b"bcdefghi"])
def test_refused_request_that_does_not_end_holds_no_connection(monkeypatch: pytest.MonkeyPatch, more: bytes) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.3)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(HEAD % b"early" + b"content-length: 9\r\n\r\na")
        await told(reader)
        writer.write(more)
        return await reader.read()

    assert served(client) == b""


def test_line_that_stands_behind_a_request_cuts_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.3)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(HEAD % b"slow" + b"content-length: 2\r\n\r\nhi")
        await asyncio.sleep(0.05)
        writer.write(b"\r\n")
        return await told(reader)

    assert served(client) == b"hi by nobody"


def test_client_that_offers_another_protocol_is_answered_in_this_one(caplog: pytest.LogCaptureFixture) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[bytes]:
        found = []
        for name in (b"h2c", b"websocket"):
            writer.write(HEAD % b"" + b"connection: upgrade, http2-settings\r\nupgrade: %s\r\nhttp2-settings: AAAA\r\ncontent-length: 2\r\n\r\nhi" % name)
            found.append(await told(reader))
        return found

    with caplog.at_level(logging.WARNING):
        assert served(client) == [b"hi by nobody"] * 2
    assert not caplog.records
