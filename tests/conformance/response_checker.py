"""A strict reader of the Responses API's event stream: every rule that Codex or the SDK relies on is an assertion."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
CALLS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
LAST = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}


def frames(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The events of a whole stream; comments left out. The `event:` line must agree with the JSON's type."""
    assert raw.endswith(b"\n\n")
    out = []
    for block in raw.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        kind, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {body['type']}"
        EVENT.validate_python(body, strict=False)
        out.append((body["type"], body))
    return out


def check(raw: bytes) -> dict[str, Any]:
    """Asserts the whole state machine; returns the final response."""
    events = frames(raw)
    assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
    assert events[0][0] == "response.created" and events[-1][0] in LAST, events[-1]
    head = events[0][1]["response"]
    for name in ("id", "model", "created_at", "status", "tools", "tool_choice", "parallel_tool_calls"):
        assert head.get(name) is not None, name
    assert head["output"] == [] and head["usage"] is None
    done: list[dict[str, Any]] = []
    open_item: Item | None = None
    for kind, body in events[1:-1]:
        if kind in ("response.queued", "response.in_progress"):
            assert body["response"]["id"] == head["id"]
            continue
        assert body["output_index"] == len(done), (kind, body)
        if kind == "response.output_item.added":
            assert open_item is None, "two items are open at once"
            open_item = Item(body["item"])
            continue
        assert open_item is not None, f"{kind} outside an item"
        if kind == "response.output_item.done":
            open_item.end(body["item"])
            done.append(body["item"])
            open_item = None
        else:
            assert body["item_id"] == open_item.item["id"]
            open_item.take(kind, body)
    assert open_item is None, "an item was never done"
    final: dict[str, Any] = events[-1][1]["response"]
    Response.model_validate(final)
    assert final["id"] == head["id"] and final["status"] == LAST[events[-1][0]] and final["output"] == done
    if final["status"] != "failed":
        usage = final["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and usage["output_tokens"] > 0
    return final


class Item:
    """One output item between its added and its done."""

    def __init__(self, item: dict[str, Any]) -> None:
        assert item["id"] and item["status"] == "in_progress"
        self.item, self.kind = item, item["type"]
        self.text = ""
        self.state = "new"
        if self.kind in CALLS:
            assert item["call_id"] and item["name"] and item[CALLS[self.kind][1]] == ""
            self.state = "filling"

    def take(self, kind: str, body: dict[str, Any]) -> None:
        """An event inside the item."""
        if self.kind in TEXTS:
            assert body["content_index"] == 0
            self._text(kind, body, TEXTS[self.kind])
        else:
            prefix, name = CALLS[self.kind]
            assert self.state == "filling"
            if kind == prefix + ".delta":
                self.text += body["delta"]
            else:
                assert kind == prefix + ".done" and body[name] == self.text, (kind, body, self.text)
                self.state = "done"

    def _text(self, kind: str, body: dict[str, Any], prefix: str) -> None:
        if kind == "response.content_part.added":
            assert self.state == "new" and body["part"]["text"] == ""
            self.state = "filling"
        elif kind == prefix + ".delta":
            assert self.state == "filling" and body["delta"] and "\ufffd" not in body["delta"]
            self.text += body["delta"]
        elif kind == prefix + ".done":
            assert self.state == "filling" and body["text"] == self.text
            self.state = "told"
        else:
            assert kind == "response.content_part.done" and self.state == "told" and body["part"]["text"] == self.text
            self.state = "done"

    def end(self, item: dict[str, Any]) -> None:
        """The item as it was at its end."""
        assert self.state == "done" and item["id"] == self.item["id"] and item["type"] == self.kind
        assert item["status"] in ("completed", "incomplete")
        if self.kind in TEXTS:
            assert "".join(part["text"] for part in item["content"]) == self.text
        else:
            assert item[CALLS[self.kind][1]] == self.text and item["call_id"] == self.item["call_id"]
