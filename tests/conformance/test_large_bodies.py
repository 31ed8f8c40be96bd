"""Bodies of megabytes are understood in threads, in pieces, and mean what small ones mean."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from paddock_runner.front import pieces, service
from paddock_runner.text import grammar, sandbox

from tests.conformance.live import TOOLS, Live, live

LONG = "word " * 240_000
"""Larger than what is understood in the event loop."""
ASK = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "description": "what it does", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(TOOLS) as found:
        yield found


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where bodies were decoded."""
    found: list[str] = []
    decode = pieces.decode

    def noting(raw: bytes, kind: type[Any]) -> Any:
        found.append(threading.current_thread().name)
        return decode(raw, kind)

    monkeypatch.setattr(service.pieces, "decode", noting)
    return found


BODIES = [
    ("/v1/chat/completions", {"messages": ASK}), ("/v1/completions", {"prompt": "hi"}), ("/v1/responses", {"input": "hi"}), ("/api/chat", {"messages": ASK, "stream": False}),
    ("/v1/messages", {"messages": ASK, "max_tokens": 9}), ("/v1/messages/count_tokens", {"messages": ASK}), ("/tokenize", {"messages": ASK}), ("/detokenize", {"tokens": [60, 61]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_large_field_that_nobody_knows_is_named_and_the_answer_is_the_same(server: Live, threads: list[str], path: str, body: dict[str, Any]) -> None:
    small = server.post(path, body)
    assert small.status_code == 200 and not threads
    large = server.post(path, {**body, "nobody": [LONG, {"a": [1, {}]}], "no-one": 1})
    assert large.status_code == 200 and large.headers["x-paddock-ignored-fields"] == "nobody,no-one"
    assert len(threads) == 1 and threads[0].startswith("bodies"), "decoded in a thread"

    def told(answer: Any) -> Any:
        return {k: v for k, v in answer.json().items() if k not in ("id", "created", "created_at", "output", "usage", "total_duration", "eval_duration", "prompt_eval_duration", "load_duration")}

    assert told(small) == told(large)


@pytest.mark.parametrize(("path", "body", "sentence"), [
    ("/v1/chat/completions", {"messages": [*[{"role": "user", "content": "x" * 100}] * 10_000, {"role": 7}]}, "messages[10000].role is something else, and must be a text"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}, {"role": "nobody"}]}, "messages[1].role"),
    ("/v1/chat/completions", {"messages": ASK, "tools": [{"type": "function", "function": {**FUNCTION, "description": LONG, "name": ""}}]}, "tools[0].function.name"),
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "image"}]}]}, "messages.0.content.1"),
    ("/v1/responses", {"input": [{"role": "user", "content": LONG}, {"type": "item_reference", "id": "x"}]}, "input[1].id"),
    ("/v1/responses", {"input": [{"role": "user", "content": LONG}, {"type": "nothing"}]}, "input[1].type"),
    ("/v1/completions", {"prompt": [[1, 2, 3]] * 120_000}, "120000 prompts were sent"),
    ("/v1/completions", {"prompt": [1] * 400_000 + [10**9]}, "token id 1000000000 does not exist"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}, {"role": "nobody"}]}, "messages[1].role"),
])  # fmt: skip
def test_what_is_wrong_in_a_large_body_is_told_with_its_place(server: Live, path: str, body: dict[str, Any], sentence: str) -> None:
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and sentence in f"{error.get('param')} {error['message']}", error


def test_a_large_conversation_with_tools_is_rendered_as_a_small_one(server: Live) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    for extra in ("", LONG):
        answer = server.post("/tokenize", {"messages": [*ASK, {"role": "user", "content": extra}], "tools": tools})
        text = server.tokenizer.decode(answer.json()["tokens"], skip_special=False)
        assert sandbox.to_json({"type": "function", "function": FUNCTION}) in text and extra in text


def test_all_ids_of_a_long_text_are_told(server: Live) -> None:
    found = server.post("/tokenize", {"prompt": LONG, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 1 << 16 and "".join(found["token_strs"]) == LONG
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == LONG
    assert server.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_a_schema_of_megabytes_is_refused_before_it_is_written(monkeypatch: pytest.MonkeyPatch, server: Live) -> None:
    monkeypatch.setattr(grammar.json, "dumps", lambda *a, **k: pytest.fail("it was written"))
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(30_000)}}
    body = {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    assert "limit" in server.post("/v1/chat/completions", body).json()["error"]["message"]
