"""Requests to a gateway: for which model and path of a runner, and those that nobody sends who means it, which cost the others nothing."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from paddock_manager.disk import born
from paddock_manager.fleet.spawn import Launch
from paddock_manager.fleet.state import Server
from paddock_manager.paths import Places
from paddock_manager.web.gateway import Gateway
from paddock_manager.web.pool import Entry, Pool
from paddock_runner.edge.auth import Guard


def pool_of(port: int = 1) -> Pool:
    """One model, whose runner is at this port."""
    pid = os.getpid()
    return Pool(Places(Path()), [Entry(Launch("m", "", Path()), 1, server=Server("m", "", "", pid, born(pid), "127.0.0.1", port, "cpu", 1, 1, "", 0.0))], 1, 0, 1)


async def ask(pool: Pool, method: str, path: str, body: bytes = b"", query: bytes = b"") -> tuple[int, Any]:
    """Status and JSON of the gateway's answer."""
    sent: list[Any] = []

    bodies = [body]

    async def receive() -> dict[str, Any]:
        if not bodies:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": bodies.pop()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": [(b"host", b"localhost")]}
    gateway = Gateway(pool, lambda: "", Guard(()), 1 << 30)
    await gateway(scope, receive, send)
    status = sent[0]["status"]
    assert f'status="{status}"' in gateway._metrics.text({})
    return status, json.loads(sent[1]["body"])


@pytest.mark.parametrize("name", ["\x01", "../../metrics", "a?b#c", "x" * 70_000, "\u20ac"])
def test_name_of_a_stored_response_is_a_name_whatever_it_holds(name: str) -> None:
    asked: list[bytes] = []

    async def runner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n")).split()[1])
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async def run() -> tuple[int, Any]:
        async with await asyncio.start_server(runner, "127.0.0.1", 0, limit=1 << 20) as listener:
            return await ask(pool_of(listener.sockets[0].getsockname()[1]), "GET", f"/v1/responses/{name}", query=b"a=b")

    status, told = asyncio.run(run())
    assert status == 404 and told["error"]["code"] == "response_not_found"
    assert all(path.startswith(b"/v1/responses/") and path.endswith(b"?a=b") and path.count(b"/") == 3 for path in asked)


@pytest.mark.parametrize("keep", ["1e12", "1" + "0" * 400, '"99999999h"', "NaN"])
def test_model_that_is_kept_for_ages_is_kept_for_ever(keep: str) -> None:
    async def run() -> tuple[int, Any]:
        pool = pool_of()
        assert (await ask(pool, "POST", "/api/chat", b'{"model": "m", "keep_alive": %s, "messages": [1]}' % keep.encode()))[0] == 503
        return await ask(pool, "GET", "/api/ps")

    status, told = asyncio.run(run())
    assert status == 200 and told["models"][0]["expires_at"].startswith("2318")


def test_long_name_of_a_model_is_told_to_be_unknown_at_once() -> None:
    begun = time.thread_time()
    status, told = asyncio.run(ask(pool_of(), "POST", "/v1/chat/completions", json.dumps({"model": "m" * 20_000_000}).encode()))
    assert status == 404 and len(told["error"]["message"]) < 400 and time.thread_time() - begun < 1


def test_what_nobody_foresaw_is_a_500_in_the_vendors_words_and_stands_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, said = pool_of(), list[str]()
    pool.log = said.append
    monkeypatch.setattr(pool, "entry", lambda name: 1 / 0)
    status, told = asyncio.run(ask(pool, "POST", "/v1/messages", b'{"model": "m"}'))
    assert status == 500 and told["error"]["type"] == "api_error" and "its log" in told["error"]["message"]
    assert len(said) == 1 and "ZeroDivisionError" in said[0] and told["request_id"] in said[0]


def test_messages_of_the_model_context_protocol_go_to_the_only_model_or_to_the_one_that_the_path_names() -> None:
    asked: list[bytes] = []

    async def runner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n")).split()[1])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def run() -> list[tuple[int, Any]]:
        async with await asyncio.start_server(runner, "127.0.0.1", 0) as listener:
            pool = pool_of(listener.sockets[0].getsockname()[1])
            found = [await ask(pool, "POST", "/mcp", b'{"method": "tools/list"}')]
            pool.entries["other"] = Entry(Launch("other", "", Path()), 1)
            return [*found, *[await ask(pool, "POST", "/mcp", b'{"method": "tools/list"}', query) for query in (b"model=m", b"")], await ask(pool, "GET", "/mcp")]

    found = asyncio.run(run())
    assert [status for status, _ in found] == [200, 200, 400, 405] and asked == [b"/mcp", b"/mcp?model=m"]
    assert "/mcp?model=NAME" in found[2][1]["error"]["hint"]
