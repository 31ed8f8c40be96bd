"""Events of a turn to Anthropic's stream events, in their exact order; one answer, blocks never interleaved."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from ...text.events import CallArguments, CallStart
from ...turns.choice import End, Prob
from ...turns.lane import Lane
from ...turns.turn import CallPart, Turn
from ..sse import EventStream
from .fields import usage_json

_encode = msgspec.json.Encoder().encode
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}
TEXT_OPEN = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":'
)
THINKING_OPEN = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"thinking_delta","thinking":'
INPUT_OPEN = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"input_json_delta","partial_json":'
CLOSE = b"}}\n\n"
_OPENS = {"text": TEXT_OPEN, "thinking": THINKING_OPEN, "tool_use": INPUT_OPEN}


def event(kind: str, body: dict[str, Any]) -> bytes:
    """One event."""
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **body}) + b"\n\n"


def signature() -> str:
    """The opaque mark that clients send back with thinking blocks; we need nothing in it."""
    return "paddock-" + secrets.token_hex(12)


def stop_of(end: End) -> dict[str, Any]:
    """stop_reason and stop_sequence."""
    if isinstance(end.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
    return {"stop_reason": STOP_REASONS[end.reason], "stop_sequence": None}


class Events:
    """A Sink that writes Anthropic's events. `turn` must be set before the turn starts."""

    turn: Turn

    def __init__(self, stream: EventStream, message: dict[str, Any]) -> None:
        self._stream, self._message = stream, message
        self._write = stream.write
        self._block = ""
        self._index = -1
        self._open = b""
        self._held: list[str] = []
        self._end = End("stop")
        stream.on_caught_up = self._release

    def started(self) -> None:
        """message_start, with the prompt's usage: the cached part is known now."""
        self._write(event("message_start", {"message": {**self._message, "usage": usage_json(self.turn.usage)}}))
        self._write(PING)
        self._stream.comment = PING

    def rated(self, prompt: int) -> None:
        """Not asked for here."""

    def text(self, index: int, text: str, probs: Sequence[Prob]) -> None:
        """text_delta"""
        if text:
            self._delta("text", text)

    def lane(self, index: int) -> Lane | None:
        """Texts of an open text block."""
        if self._block != "text" or self._held:
            return None
        self._stream.head, self._stream.tail = self._open, CLOSE
        return self._stream

    def reasoning(self, index: int, text: str) -> None:
        """thinking_delta"""
        self._delta("thinking", text)

    def call(self, index: int, part: CallPart) -> None:
        """A tool_use block, or more of its input."""
        if isinstance(part, CallStart):
            block = {"type": "tool_use", "id": part.id or tool_id(), "name": part.name, "input": {}}
            self._begin("tool_use", block)
        elif isinstance(part, CallArguments):
            self._delta("tool_use", part.text)

    def ended(self, index: int, end: End) -> None:
        """The answer is complete."""
        self._end = end

    def flush(self) -> None:
        """One write for this step."""
        self._stream.flush()

    def close(self) -> None:
        """The last events."""
        if self._index < 0:
            self._begin("text", {"type": "text", "text": ""})
        self._finish_block()
        self._write(event("message_delta", {"delta": stop_of(self._end), "usage": usage_json(self.turn.usage)}))
        self._write(event("message_stop", {}))

    def _delta(self, block: str, text: str) -> None:
        if self._block != block:
            self._begin(block, {"type": block, block: "", **({"signature": ""} if block == "thinking" else {})})
        if self._stream.is_behind or self._held:
            self._held.append(text)
            return
        self._write(self._open)
        self._write(_encode(text))
        self._write(CLOSE)

    def _begin(self, block: str, body: dict[str, Any]) -> None:
        self._finish_block()
        self._index += 1
        self._block, self._open = block, _OPENS[block] % self._index
        self._write(event("content_block_start", {"index": self._index, "content_block": body}))

    def _finish_block(self) -> None:
        self._release()
        if self._block:
            if self._block == "thinking":
                delta = {"type": "signature_delta", "signature": signature()}
                self._write(event("content_block_delta", {"index": self._index, "delta": delta}))
            self._write(event("content_block_stop", {"index": self._index}))
            self._block = ""

    def _release(self) -> None:
        held, self._held = self._held, []
        if held:
            self._write(self._open + _encode("".join(held)) + CLOSE)


def tool_id() -> str:
    """A new id of a tool_use block."""
    return "toolu_" + secrets.token_hex(12)
