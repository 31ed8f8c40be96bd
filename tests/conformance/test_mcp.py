"""The runner as an MCP server, spoken to by the official SDK's client over streamable HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.conformance.live import KEY, MODEL, Live

mcp = pytest.importorskip("mcp")
from mcp.client.session import ClientSession  # noqa: E402
from mcp.client.streamable_http import streamable_http_client  # noqa: E402

HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json", "mcp-protocol-version": "2025-06-18"}
ASK = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}


def talk(server: Live, act: Callable[[ClientSession], Awaitable[Any]]) -> Any:
    """What `act` gives in a session."""

    async def run() -> Any:
        import httpx2

        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx2.AsyncClient(headers=headers) as client, streamable_http_client(server.url + "/mcp", http_client=client) as streams, ClientSession(streams[0], streams[1]) as session:
            await session.initialize()
            return await act(session)

    return asyncio.run(run())


def test_tools_are_listed_with_schemas(server: Live) -> None:
    found = talk(server, lambda s: s.list_tools())
    assert {t.name for t in found.tools} == {"generate", "embed", "rerank", "count_tokens", "fit", "list_models"}
    assert all(t.description and t.input_schema["type"] == "object" for t in found.tools)


def test_generate_answers_with_text_and_usage(server: Live) -> None:
    found = talk(server, lambda s: s.call_tool("generate", {"prompt": "Hi", "system": "Be kind", "temperature": 0.5}))
    assert not found.is_error and found.content[0].text == "Hello there, general."
    assert found.structured_content["finish_reason"] == "stop" and found.structured_content["output_tokens"] > 3
    assert "Be kind" in server.tokenizer.decode(memoryview(server.engine.asked[-1].prompt).cast("i"))


def test_generate_holds_the_answer_to_a_schema(server: Live) -> None:
    pytest.importorskip("llguidance")
    server.say('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    found = talk(server, lambda s: s.call_tool("generate", {"messages": [{"role": "user", "content": "Hi"}], "json_schema": schema}))
    assert json.loads(found.content[0].text) == {"a": 1}


def test_count_tokens_and_list_models(server: Live) -> None:
    counted = talk(server, lambda s: s.call_tool("count_tokens", {"text": "the thing"}))
    assert counted.structured_content == {"tokens": len(server.tokenizer.encode("the thing"))}
    fit = talk(server, lambda s: s.call_tool("fit", {"text": "the thing", "max_tokens": 10})).structured_content
    n = len(server.tokenizer.encode("the thing"))
    assert fit == {"fits": True, "prompt_tokens": n, "needed_tokens": n + 10, "max_ctx_tokens": 4096, "room_tokens": 4096 - n}
    assert talk(server, lambda s: s.call_tool("fit", {"prompt_tokens": 4000, "max_tokens": 97})).structured_content["fits"] is False
    listed = talk(server, lambda s: s.call_tool("list_models", {}))
    assert listed.structured_content["models"][0]["name"] == MODEL


@pytest.mark.parametrize("name, arguments", [("nothing", {}), ("generate", {}), ("generate", {"prompt": 5}), ("generate", {"prompt": "x", "max_tokens": 0}), ("generate", {"prompt": "x", "max_tokens": 5000}), ("fit", {}), ("embed", {"texts": ["x"]}), ("rerank", {"query": "x", "documents": ["y"]}), ("fit", {"prompt_tokens": -1}), ("generate", {"prompt": "x", "frob": 1}), ("generate", {"messages": [{"role": "user"}]}), ("generate", {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}), ("generate", {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]}), ("generate", {"prompt": "x" * 50_000}), ("generate", {"prompt": "x", "json_schema": {"type": "martian"}})])
def test_wrong_call_is_an_error_of_the_tool(server: Live, name: str, arguments: dict[str, Any]) -> None:
    found = talk(server, lambda s: s.call_tool(name, arguments))
    assert found.is_error and found.content[0].text


def test_key_and_host_are_checked_and_broken_messages_are_4xx(server: Live) -> None:
    headers = {"accept": "application/json, text/event-stream"}
    assert server.post("/mcp", ASK, headers={**headers, "authorization": "Bearer no"}).status_code == 401
    assert server.post("/mcp", ASK, headers={**headers, "host": "evil.example"}).status_code == 403
    for body in (b"", b"{", b"[]", b"[" * 20_000, b'{"jsonrpc": "2.0"}', b"\xff", b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":5}'):
        assert server.post("/mcp", content=body, headers={**headers, "content-type": "application/json"}).status_code < 500, body
    with server.client() as client:
        for method in ("GET", "DELETE"):  # a stream that nothing ever comes on would hold up the runner's end
            assert client.request(method, "/mcp", headers=headers, timeout=5).status_code == 405
    assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}).status_code == 200


def test_messages_are_no_larger_than_the_sdk_reads_in_a_moment(server: Live) -> None:
    body = b'{"jsonrpc":"2.0","id":1,"method":"x","params":[%b1]}' % (b"[]," * 2_000_000)
    assert server.post("/mcp", content=body, headers=HEADERS).status_code == 413


CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "generate", "arguments": {"prompt": "Hi"}}}


@pytest.mark.parametrize("starts", [False, True])
def test_client_that_leaves_a_call_ends_it(server: Live, starts: bool) -> None:
    server.script.starts, server.script.n_tokens = starts, 2
    with server.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("/mcp", json=CALL, headers=HEADERS, timeout=0.5)
    assert server.engine.wait_for(lambda: len(server.engine.aborted) == 1)
    with server.client() as client:
        assert "paddock_aborted_requests_total 0\n" not in client.get("/metrics").text


def test_call_is_its_key_s_and_its_session_s_as_any_request_is(server: Live) -> None:
    """Prompts are found in the cache by whoever sent them, nobody else; and who waits too long is told."""
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for headers in ({}, {"x-session-id": "one"}):
        assert server.post("/v1/chat/completions", body, headers=headers).status_code == 200
        assert server.post("/mcp", CALL, headers={**HEADERS, **headers}).json()["result"]["isError"] is False
        chat, call = server.engine.asked[-2:]
        assert (call.salt, call.client, call.weight) == (chat.salt, chat.client, chat.weight) and call.salt and call.received_ns
    assert server.post("/mcp", CALL, headers={**HEADERS, "x-queue-timeout-ms": "60000"}).status_code == 200
    assert server.engine.asked[-1].deadline_ns > server.engine.asked[-1].received_ns
