"""Events of a turn to the items and events of OpenAI's Responses API: one item at a time, each opened, filled and closed."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...text.events import CallArguments, CallStart
from ...text.tokenizer import Tokenizer
from ...turns.choice import End, Prob
from ...turns.turn import CallPart
from ..sse import EventStream
from .chunks import call_id
from .probs import chat_entries
from .response_fields import Called, sealed

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
Body = dict[str, Any]


class Items:
    """A Sink that makes output items, and writes their events where there is a stream.

    response: the answer's fixed fields. called: what the client calls each tool. seals: whether reasoning is sent sealed too.
    """

    def __init__(
        self,
        response: Body,
        called: Mapping[str, Called],
        tokenizer: Tokenizer,
        stream: EventStream | None,
        seals: bool,
        has_probs: bool,
    ) -> None:
        self._response, self._called, self._tokenizer, self._stream = response, called, tokenizer, stream
        self._seals, self._has_probs = seals, has_probs
        self.output: list[Body] = []
        self.end = End("stop")
        self._sequence = 0
        self._item: Body | None = None
        self._texts: list[str] = []
        self._held: list[str] = []
        self._probs: list[msgspec.Raw] = []
        self._held_probs: list[msgspec.Raw] = []
        self._is_begun = False
        self._call = Called("")
        if stream is not None:
            stream.on_caught_up = self._release
            stream.comment = self.alive

    # the Sink

    def started(self) -> None:
        """response.created and response.in_progress."""
        self._begin("in_progress")
        self._say("response.in_progress", {"response": self._snapshot("in_progress")})

    def rated(self, prompt: int) -> None:
        """Not asked for here."""

    def text(self, index: int, text: str, probs: Sequence[Prob]) -> None:
        """More of a message."""
        if text or probs:
            self._open("message")
            entries = chat_entries(self._tokenizer, probs) if probs and self._has_probs else []
            self._probs += entries
            self._held_probs += entries
            self._delta(text)

    def lane(self, index: int) -> None:
        """Every event is numbered."""

    def reasoning(self, index: int, text: str) -> None:
        """More of a reasoning item."""
        self._open("reasoning")
        self._delta(text)

    def call(self, index: int, event: CallPart) -> None:
        """A call's item, more of its arguments, or its end."""
        if isinstance(event, CallStart):
            self._close()
            self._call = self._called.get(event.name, Called(event.name))
            self._open("custom_tool_call" if self._call.is_custom else "function_call", event.id)
        elif isinstance(event, CallArguments):
            self._delta(event.text)
        else:
            self._close(event.is_complete)

    def ended(self, index: int, end: End) -> None:
        """The answer is complete."""
        self.end = end
        self._close(end.reason != "length")

    def flush(self) -> None:
        """One write for this step."""
        if self._stream is not None:
            self._stream.flush()

    # the response

    def alive(self) -> None:
        """What a silent stream sends: comments would not reset the timers of clients that count events."""
        status = "in_progress" if self._is_begun else "queued"
        self._begin(status)
        self._say("response." + status, {"response": self._snapshot(status)})

    def finish(self, usage: Body) -> Body:
        """The last event; returns the whole response."""
        is_cut = self.end.reason == "length"
        done = self._snapshot("incomplete" if is_cut else "completed")
        done["usage"] = usage
        if is_cut:
            done["incomplete_details"] = {"reason": "max_output_tokens"}
        self._begin("in_progress")
        self._say("response.incomplete" if is_cut else "response.completed", {"response": done})
        return done

    def fail(self, code: str, message: str) -> None:
        """The last event of a response that failed after its beginning."""
        self._close(False)
        self._begin("in_progress")
        failed = {**self._snapshot("failed"), "error": {"code": code, "message": message}}
        self._say("response.failed", {"response": failed})

    def _snapshot(self, status: str) -> Body:
        return {**self._response, "status": status, "output": list(self.output)}

    def _begin(self, status: str) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._say("response.created", {"response": self._snapshot(status)})

    # items

    def _open(self, kind: str, given_id: str = "") -> None:
        if self._item is not None:
            if self._item["type"] == kind and kind in ("message", "reasoning"):
                return
            self._close()
        if kind == "message":
            self._item = {"id": _id("msg"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
        elif kind == "reasoning":
            self._item = {"id": _id("rs"), "type": kind, "summary": [], "content": [], "status": "in_progress"}
        else:
            is_custom = kind == "custom_tool_call"
            self._item = {
                "id": _id("ctc" if is_custom else "fc"), "type": kind, "status": "in_progress", "call_id": given_id or call_id(),
                "name": self._call.name, "input" if is_custom else "arguments": "",
            }  # fmt: skip
            if self._call.namespace is not None:
                self._item["namespace"] = self._call.namespace
        self._say("response.output_item.added", {"output_index": len(self.output), "item": dict(self._item)})
        if kind in ("message", "reasoning"):
            self._say("response.content_part.added", {**self._at(), "content_index": 0, "part": self._part("")})

    def _close(self, is_complete: bool = True) -> None:
        item = self._item
        if item is None:
            return
        self._release()
        text, kind = "".join(self._texts), item["type"]
        if kind in ("message", "reasoning"):
            name = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
            more: Body = {"logprobs": self._probs} if kind == "message" else {}
            self._say(name, {**self._at(), "content_index": 0, "text": text, **more})
            part = self._part(text)
            self._say("response.content_part.done", {**self._at(), "content_index": 0, "part": part})
            item["content"] = [part]
            if kind == "reasoning" and self._seals:
                item["encrypted_content"] = sealed(text)
        elif kind == "function_call":
            item["arguments"] = text
            self._say("response.function_call_arguments.done", {**self._at(), "name": item["name"], "arguments": text})
        else:
            item["input"] = given = _input(text)
            self._say("response.custom_tool_call_input.delta", {**self._at(), "delta": given})
            self._say("response.custom_tool_call_input.done", {**self._at(), "input": given})
        item["status"] = "completed" if is_complete else "incomplete"
        self._say("response.output_item.done", {"output_index": len(self.output), "item": item})
        self.output.append(item)
        self._item, self._texts, self._probs, self._held_probs = None, [], [], []

    def _delta(self, text: str) -> None:
        if self._item is None:
            return
        self._texts.append(text)
        if self._stream is not None:
            self._held.append(text)
            if not self._stream.is_behind:
                self._release()

    def _release(self) -> None:
        """Sends what is held back, as one delta."""
        held, self._held = "".join(self._held), []
        item = self._item
        if item is None or not (held or self._held_probs):
            return
        kind = item["type"]
        if kind == "message":
            probs, self._held_probs = self._held_probs, []
            self._say(
                "response.output_text.delta", {**self._at(), "content_index": 0, "delta": held, "logprobs": probs}
            )
        elif kind == "reasoning":
            self._say("response.reasoning_text.delta", {**self._at(), "content_index": 0, "delta": held})
        elif kind == "function_call":
            self._say("response.function_call_arguments.delta", {**self._at(), "delta": held})

    def _at(self) -> Body:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.output)}

    def _part(self, text: str) -> Body:
        assert self._item is not None
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "annotations": [], "logprobs": list(self._probs), "text": text}

    def _say(self, kind: str, body: Body) -> None:
        if self._stream is not None:
            event = _encode({"type": kind, "sequence_number": self._sequence, **body})
            self._stream.write(b"event: " + kind.encode() + b"\ndata: " + event + b"\n\n")
            self._sequence += 1


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _input(arguments: str) -> str:
    """A custom tool's input from the arguments that the model wrote; what is no JSON stands as it is."""
    try:
        found = _decode(arguments)
    except msgspec.DecodeError:
        return arguments
    if isinstance(found, dict) and isinstance(found.get("input"), str):
        text: str = found["input"]
        return text
    return arguments
