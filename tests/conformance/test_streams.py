"""Streams say what whole answers say: no half characters, no stop string, whatever the token borders."""

from __future__ import annotations

import json

import pytest

from tests.conformance.live import Live

BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
HARD = "Grüße 👩‍👩‍👧 日本語 \\ \" \n\t\x01 🇩🇪 ñ"


def chunks_of(server: Live, body: dict, path: str = "/v1/chat/completions") -> list[dict]:
    """The chunks of a stream, its framing checked."""
    answer = server.post(path, body)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    *events, last = [e for e in answer.text.split("\n\n") if e and not e.startswith(":")]
    assert last == "data: [DONE]" and all(e.startswith("data: {") and "\n" not in e for e in events)
    return [json.loads(e[6:]) for e in events]


def text_of(chunks: list[dict]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def test_characters_split_over_tokens_come_whole(server: Live) -> None:
    server.say_bytes(HARD)
    chunks = chunks_of(server, BODY)
    assert text_of(chunks) == HARD
    assert all("\ufffd" not in (c["choices"][0]["delta"].get("content") or "") for c in chunks)


@pytest.mark.parametrize("stop", ["🇩🇪", "本語", "\\ \"", "ü"])
def test_stop_strings_never_leak_whatever_the_token_borders(server: Live, stop: str) -> None:
    server.say_bytes(HARD)
    chunks = chunks_of(server, {**BODY, "stop": stop})
    assert text_of(chunks) == HARD[: HARD.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["choices"][0]["stop_reason"] == stop
    whole = server.post("/v1/chat/completions", {**BODY, "stop": stop, "stream": False}).json()
    assert whole["choices"][0]["message"]["content"] == HARD[: HARD.index(stop)]


def test_text_that_only_began_like_a_stop_string_is_shown_at_the_end(server: Live) -> None:
    server.say_bytes("abc STO")
    assert text_of(chunks_of(server, {**BODY, "stop": ["STOP", "abcd"]})) == "abc STO"


def test_stop_string_can_be_included(server: Live) -> None:
    server.say_bytes("one two three")
    assert text_of(chunks_of(server, {**BODY, "stop": "two", "include_stop_str_in_output": True})) == "one two"


def test_logprobs_cover_just_the_tokens_that_are_shown(server: Live) -> None:
    server.say_bytes("añ stop here")
    chunks = chunks_of(server, {**BODY, "logprobs": True, "stop": " stop"})
    entries = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert b"".join(bytes(e["bytes"]) for e in entries) == "añ".encode()


def test_special_tokens_are_left_out_unless_asked_for(server: Live) -> None:
    server.say("a", "<|im_start|>", "b")
    assert text_of(chunks_of(server, BODY)) == "ab"
    assert text_of(chunks_of(server, {**BODY, "skip_special_tokens": False})) == "a<|im_start|>b"


def test_stop_token_of_the_client_ends_the_answer_and_is_not_shown(server: Live) -> None:
    server.say("xyz")
    b = server.answer[1]
    assert text_of(chunks_of(server, {**BODY, "stop_token_ids": [b]})) == "x"


def test_completion_stream_has_the_same_text_as_the_whole_answer(server: Live) -> None:
    server.say_bytes(HARD)
    body = {"prompt": "x", "max_tokens": 500, "logprobs": 1}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    chunks = chunks_of(server, {**body, "stream": True, "stream_options": {"include_usage": True}}, "/v1/completions")
    parts = [c["choices"][0] for c in chunks if c["choices"]]
    assert "".join(p["text"] for p in parts) == whole["text"] == HARD
    offsets = [o for p in parts if p["logprobs"] for o in p["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets) and len(offsets) == len(whole["logprobs"]["text_offset"])
    assert chunks[-1]["choices"] == [] and all(c["usage"] is None for c in chunks[:-1])


def test_template_that_thinks_gives_reasoning_apart_from_content(thinking: Live) -> None:
    server = thinking
    server.say_bytes("<think>\nLet me see.\n</think>\n\nIt is 4.")
    whole = server.post("/v1/chat/completions", {**BODY, "stream": False}).json()
    message = whole["choices"][0]["message"]
    assert message["content"].strip() == "It is 4." and message["reasoning"].strip() == "Let me see."
    assert message["reasoning_content"] == message["reasoning"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = chunks_of(server, BODY)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert text_of(chunks) == message["content"]
    assert "".join(d.get("reasoning") or "" for d in deltas) == message["reasoning"]
    assert "think>" not in text_of(chunks)


def test_tool_call_streams_as_name_then_arguments(tools: Live) -> None:
    server = tools
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
    server.say_bytes('Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    whole = server.post("/v1/chat/completions", {**BODY, "stream": False, "tools": [tool]}).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls" and call["function"]["name"] == "weather" and call["id"].startswith("call_")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"} and whole["message"]["content"] == "Let me look."
    chunks = chunks_of(server, {**BODY, "tools": [tool]})
    calls = [d for c in chunks for d in c["choices"][0]["delta"].get("tool_calls") or []]
    assert calls[0]["id"] and calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert all("id" not in c and "name" not in c["function"] for c in calls[1:])
    assert json.loads("".join(c["function"]["arguments"] for c in calls)) == {"city": "Paris"}
    assert text_of(chunks) == "Let me look." and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tool_call_is_plain_text_when_there_are_no_tools_or_none_may_be_called(tools: Live) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    tools.say_bytes(text)
    assert text_of(chunks_of(tools, BODY)) == text
    tool = {"type": "function", "function": {"name": "weather"}}
    assert text_of(chunks_of(tools, {**BODY, "tools": [tool], "tool_choice": "none"})) == text
