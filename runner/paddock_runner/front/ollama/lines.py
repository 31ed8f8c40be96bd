"""Events of a turn to Ollama's lines of JSON (NDJSON), streamed or gathered into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...text.events import Call, CallArguments, CallStart
from ...text.tokenizer import Tokenizer
from ...turns.choice import End, Prob
from ...turns.turn import CallPart, Turn
from ..openai.probs import chat_entries
from ..sse import EventStream
from .fields import now

_encode = msgspec.json.Encoder().encode
REASONS = {"stop": "stop", "length": "length", "calls": "stop"}
Shape = Callable[[dict[str, Any]], dict[str, Any]]


def as_message(part: dict[str, Any]) -> dict[str, Any]:
    """A part of an answer as /api/chat wants it."""
    return {"message": {"role": "assistant", "content": part.pop("text", ""), **part}}


def as_response(part: dict[str, Any]) -> dict[str, Any]:
    """A part of an answer as /api/generate wants it."""
    part.pop("tool_calls", None)
    return {"response": part.pop("text", ""), **part}


def tool_calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Calls with their arguments as objects."""
    return [{"function": {"name": c.name, "arguments": _object(c.arguments)}} for c in calls]


def _object(arguments: str) -> Any:
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {"_raw": arguments}
    return found if isinstance(found, dict) else {"_raw": arguments}


class Lines:
    """A Sink that writes a line a step. `turn` must be set before the turn starts."""

    turn: Turn

    def __init__(self, stream: EventStream, model: str, shape: Shape, tokenizer: Tokenizer) -> None:
        self._stream, self._model, self._shape, self._tokenizer = stream, model, shape, tokenizer
        self._probs: list[Prob] = []
        self._parts: list[tuple[str, str]] = []
        self._calls: list[Call] = []
        self.end = End("stop")
        stream.on_caught_up = self._release
        stream.comment = b" "  # in front of the next line: Ollama's own client reads a line of nothing as JSON

    def started(self) -> None:
        """Nothing to say yet."""

    def rated(self, prompt: int) -> None:
        """Not asked for here."""

    def text(self, index: int, text: str, probs: Sequence[Prob]) -> None:
        """More of the answer."""
        self._probs.extend(probs)
        if text or probs:
            self._add("text", text)

    def lane(self, index: int) -> None:
        """Every line says when it was written."""

    def reasoning(self, index: int, text: str) -> None:
        """More of the reasoning."""
        self._add("thinking", text)

    def call(self, index: int, event: CallPart) -> None:
        """Calls are told whole."""
        if isinstance(event, CallStart):
            self._calls.append(Call(event.name, "", event.id))
        elif isinstance(event, CallArguments):
            self._calls[-1].arguments += event.text
        else:
            self._release()
            self._line({"text": "", "tool_calls": tool_calls(self._calls[-1:])})

    def ended(self, index: int, end: End) -> None:
        """The answer is complete."""
        self.end = end

    def flush(self) -> None:
        """One write for this step."""
        if not self._stream.is_behind:
            self._release()
        self._stream.flush()

    def close(self) -> None:
        """The last line, with the counts and times."""
        self._release()
        self._stream.write(_encode({**self._head(), **self._shape({"text": ""}), **last(self.turn, self.end)}) + b"\n")

    def _add(self, kind: str, text: str) -> None:
        if self._parts and self._parts[-1][0] == kind:
            self._parts[-1] = (kind, self._parts[-1][1] + text)
        else:
            self._parts.append((kind, text))

    def _release(self) -> None:
        for kind, text in self._parts:
            self._line({kind: text})
        self._parts.clear()

    def _line(self, part: dict[str, Any]) -> None:
        told: dict[str, Any] = {}
        if self._probs and "text" in part:
            told = {"logprobs": chat_entries(self._tokenizer, self._probs)}
            self._probs.clear()
        self._stream.write(_encode({**self._head(), **self._shape(part), **told, "done": False}) + b"\n")

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}


def last(turn: Turn, end: End) -> dict[str, Any]:
    """How an answer ended, its counts, and times in ns."""
    usage, timing = turn.usage, turn.timing
    first, received = timing.first_token_ns or timing.last_token_ns, timing.received_ns
    return {
        "done": True, "done_reason": REASONS.get(end.reason, end.reason), "total_duration": max(0, timing.last_token_ns - received),
        "load_duration": 0, "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": max(0, first - (timing.started_ns or received)), "eval_count": usage.output_tokens,
        "eval_duration": max(0, timing.last_token_ns - first),
    }  # fmt: skip
