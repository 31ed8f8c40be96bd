"""Strict readers of the event streams of chat completions and of messages: every rule that clients rely on is an assertion."""

from __future__ import annotations

import json
from typing import Any

from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from pydantic import TypeAdapter

MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"), "tool_use": ("input_json_delta", "partial_json")}
STOPS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")


def check_messages(raw: bytes) -> list[dict[str, Any]]:
    """Anthropic's events as Claude Code reads them; gives the content blocks."""
    events = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        kind, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {body['type']}" and body["type"] != "error", block
        if body["type"] != "ping":
            MESSAGE_EVENT.validate_python(body)
            events.append(body)
    assert [e["type"] for e in events[:1] + events[-2:]] == ["message_start", "message_delta", "message_stop"]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["role"] == "assistant" and message["id"].startswith("msg_")
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] > 0
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks), "blocks are interleaved, or their numbers jump"
            blocks.append({**event["content_block"], "told": "", "signed": False})
            is_open = True
            continue
        assert is_open and event["index"] == len(blocks) - 1
        block = blocks[-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "thinking":
                assert block["signed"], "a thinking block without its signature"
            if block["type"] == "tool_use":
                assert block["id"] and block["name"] and block["input"] == {}
                block["input"] = json.loads(block["told"] or "{}")
        elif event["delta"]["type"] == "signature_delta":
            assert block["type"] == "thinking" and event["delta"]["signature"]
            block["signed"] = True
        else:
            kind, name = DELTAS[block["type"]]
            assert event["delta"]["type"] == kind and not block["signed"] and "\ufffd" not in event["delta"][name]
            block["told"] += event["delta"][name]
    last = events[-2]
    assert not is_open and blocks and last["delta"]["stop_reason"] in STOPS and last["usage"]["output_tokens"] > 0
    assert (last["delta"]["stop_reason"] == "tool_use") <= any(b["type"] == "tool_use" for b in blocks)
    return blocks


def check_chat(raw: bytes, wants_usage: bool) -> list[dict[str, Any]]:
    """Chat completion chunks as the SDK, Open WebUI and aiperf read them; gives one message per choice."""
    frames = [f for f in raw.decode().removesuffix("\n\n").split("\n\n") if not f.startswith(":")]
    assert frames[-1] == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    assert len({(c["id"], c["model"], c["created"], c["object"]) for c in chunks}) == 1
    if wants_usage:
        usage = chunks.pop()
        assert usage["choices"] == [] and usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"]
        assert all(c["usage"] is None for c in chunks)
    messages: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        (choice,) = chunk["choices"]
        delta, index = choice["delta"], choice["index"]
        if index not in messages:
            assert delta == {"role": "assistant", "content": ""}
            messages[index] = {"content": "", "calls": [], "end": None}
            continue
        message = messages[index]
        assert "role" not in delta and message["end"] is None, "something after the end of a choice"
        message["end"] = choice["finish_reason"]
        assert not (message["end"] and delta)
        assert "\ufffd" not in (delta.get("content") or "")
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            _take_call(message["calls"], call)
    for message in messages.values():
        assert message["end"] in ("stop", "length", "tool_calls") and (message["end"] == "tool_calls") <= bool(message["calls"])
        if message["end"] == "tool_calls":
            assert all(isinstance(json.loads(call["arguments"]), dict) for call in message["calls"])
    assert messages
    return list(messages.values())


def _take_call(calls: list[dict[str, str]], part: dict[str, Any]) -> None:
    """Id and name come once, with the first part of a call."""
    if part["index"] == len(calls):
        assert part["id"] and part["type"] == "function" and part["function"]["name"] and part["function"]["arguments"] == ""
        calls.append({"name": part["function"]["name"], "arguments": ""})
        return
    assert part["index"] == len(calls) - 1 and set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
    calls[-1]["arguments"] += part["function"]["arguments"]
