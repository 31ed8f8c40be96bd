"""A request to a runner and its answer: in whatever pieces it comes, whole or broken."""

from __future__ import annotations

import asyncio

import pytest
from paddock_manager.web import exchange

BODY = b"data: one\n\ndata: two\n\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (BODY[:11], BODY[11:])) + b"0\r\n\r\n"
SIZED = b"HTTP/1.1 404 Not Found\r\nx-request-id: a\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
BARE = b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\n" + BODY


async def ask(pieces: list[bytes]) -> tuple[int, list[tuple[str, str]], bytes, bytes]:
    """(status, headers, body, the request) where the runner writes these pieces and hangs up."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head + await reader.readexactly(4))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with exchange.post("127.0.0.1", port, "/v1/x?a=b", {"x-a": "\xe9"}, b"body") as found:
            body = b"".join([part async for part in found.parts()])
            return found.status, found.headers, body, seen[0]


@pytest.mark.parametrize("raw", [CHUNKED, SIZED, BARE], ids=["chunked", "sized", "bare"])
def test_answer_is_the_same_in_whatever_pieces_it_comes(raw: bytes) -> None:
    for pieces in ([raw], [raw[:40], raw[40:]], [bytes([b]) for b in raw]):
        status, headers, body, asked = asyncio.run(ask(pieces))
        assert (status, body) == (404 if raw is SIZED else 200, BODY) and headers[0][0] == headers[0][0].lower()
    assert asked.startswith(b"POST /v1/x?a=b HTTP/1.1\r\nx-a: \xe9\r\nhost: 127.0.0.1:") and asked.endswith(b"content-length: 4\r\nconnection: close\r\n\r\nbody")


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200", CHUNKED[:-3], SIZED[:-1], b"nonsense\r\n\r\n"])
def test_answer_that_is_none_or_ends_before_its_end_is_broken(raw: bytes) -> None:
    with pytest.raises(exchange.Broken):
        asyncio.run(ask([raw] if raw else []))


def test_runner_that_is_not_there_is_broken() -> None:
    async def run() -> None:
        async with exchange.post("127.0.0.1", 1, "/", {}, b""):
            pass

    with pytest.raises(exchange.Broken):
        asyncio.run(run())
