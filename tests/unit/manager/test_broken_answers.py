"""What a gateway's clients see of a runner that ends in the middle of an answer."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from paddock_manager.disk import born
from paddock_manager.fleet.spawn import Launch
from paddock_manager.fleet.state import Server
from paddock_manager.paths import Places
from paddock_manager.web.gateway import Gateway
from paddock_manager.web.pool import Entry, Pool
from paddock_runner.edge.auth import Guard, key_of


async def broken(kind: str, part: bytes, path: str, heads: list[bytes] | None = None, key: str = "") -> tuple[list[Any], list[str]]:
    """What a gateway sends, and what it logs, when its runner sends this part of an answer and is gone. heads: gets what the runner was asked. key: of the caller."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        if heads is not None:
            heads.append(asked.lower())
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        writer.write(head + (f"{len(part):x}\r\n".encode() + part + b"\r\n" if part else b""))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port, pid = listener.sockets[0].getsockname()[1], os.getpid()
        entry = Entry(Launch("m", "", Path()), 1, server=Server("m", "", "", pid, born(pid), "127.0.0.1", port, "cpu", 1, 1, "", 0.0))
        pool, said, sent = Pool(Places(Path()), [entry], 1, 0, 1), list[str](), list[Any]()
        pool.log = said.append
        body = [{"type": "http.request", "body": b'{"model": "m"}'}]

        async def receive() -> dict[str, Any]:
            if not body:
                await asyncio.sleep(60)
            return body.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        sent_headers = [(b"host", b"localhost"), *([(b"x-api-key", key.encode())] if key else [])]
        scope = {"type": "http", "method": "POST", "path": path, "headers": sent_headers}
        await Gateway(pool, lambda: "own", Guard((key_of("own"), key_of("theirs", "inference"))) if key else Guard(()), 1000)(scope, receive, send)
    return sent, said


@pytest.mark.parametrize(
    ("kind", "part", "path", "event"),
    [
        ("text/event-stream; charset=utf-8", b"data: {}\n\n", "/v1/chat/completions", b"data: "),
        ("text/event-stream", b"", "/v1/messages", b"event: error\ndata: "),
        ("application/x-ndjson", b"{}\n", "/api/chat", b""),
    ],
)
def test_stream_ends_with_an_error_in_the_vendors_words(kind: str, part: bytes, path: str, event: bytes) -> None:
    sent, said = asyncio.run(broken(kind, part, path))
    assert sent[-1]["more_body"] is False and sent[-1]["body"].startswith(event)
    error = json.loads(sent[-1]["body"].removeprefix(event))["error"]
    assert "m broke off the answer" in (error if isinstance(error, str) else error["message"])
    assert len(said) == 1 and said[0].startswith("m broke off an answer: ")


@pytest.mark.parametrize(("kind", "part"), [("text/event-stream", b"data: {"), ("application/x-ndjson", b"{"), ("application/json", b"{}")])
def test_answer_that_is_no_stream_or_broken_in_an_event_stays_incomplete(kind: str, part: bytes) -> None:
    sent, said = asyncio.run(broken(kind, part, "/v1/chat/completions"))
    assert sent[-1]["more_body"] is True and len(said) == 1


def test_runner_is_asked_with_the_callers_own_key_by_which_it_tells_callers_apart() -> None:
    heads: list[bytes] = []
    asyncio.run(broken("application/json", b"{}", "/v1/chat/completions", heads, "theirs"))
    assert b"authorization: bearer theirs\r\n" in heads[0] and b"x-api-key" not in heads[0] and b"x-request-id: req_" in heads[0]
