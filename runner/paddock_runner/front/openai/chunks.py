"""Events of a turn to OpenAI's stream chunks: byte templates per stream; only the JSON-escaped delta is made per token."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...text.events import CallArguments, CallStart
from ...text.tokenizer import Tokenizer
from ...turns.choice import End, Prob
from ...turns.lane import Lane
from ...turns.turn import CallPart
from ...turns.usage import Usage
from ..sse import EventStream
from .fields import usage_json
from .probs import chat_entries, text_logprobs

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of one stream say. has_usage: chunks carry `usage: null` and a last one the figure."""

    id: str
    created_s: int
    model: str
    n_choices: int
    has_usage: bool
    has_probs: bool

    def fields(self, kind: str) -> dict[str, Any]:
        """The first fields of every chunk."""
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}


@dataclass(slots=True)
class _Held:
    """What a lagging client has not been sent yet."""

    kind: str
    index: int
    texts: list[str]
    probs: list[Prob]


class Chunks:
    """A Sink that writes chunks to a stream. Subclasses say what a delta looks like."""

    kind = ""

    def __init__(self, stream: EventStream, head: Head, tokenizer: Tokenizer) -> None:
        self._stream, self._head, self._tokenizer = stream, head, tokenizer
        self._write = stream.write
        self._held: list[_Held] = []
        self.ratings: Callable[[int], Sequence[dict[str, Any]]] | None = None
        """Fields of the chunks that tell how a prompt's tokens were rated; set where that was asked for."""
        stream.on_caught_up = self.release
        start = _encode(head.fields(self.kind))[:-1] + b',"choices":['
        self._start = b"data: " + start
        self._stop = b"]" + (b',"usage":null' if head.has_usage else b"") + b"}\n\n"
        self._text_open = [self._start + self._opening(i, "text") for i in range(head.n_choices)]
        self._text_close = self._closing("text") + self._stop
        stream.head, stream.tail = self._text_open[0], self._text_close

    # what a delta looks like

    def _opening(self, index: int, kind: str) -> bytes:
        raise NotImplementedError

    def _closing(self, kind: str) -> bytes:
        raise NotImplementedError

    def _with_probs(self, index: int, text: str, probs: Sequence[Prob]) -> bytes:
        raise NotImplementedError

    def _end(self, index: int, end: End) -> bytes:
        raise NotImplementedError

    def _begin(self, index: int) -> bytes:
        return b""

    # the Sink

    def started(self) -> None:
        """First chunks, where the API has any."""
        for index in range(self._head.n_choices):
            if first := self._begin(index):
                self._write(self._start + first + self._stop)

    def rated(self, prompt: int) -> None:
        """What was found of a prompt, in chunks of their own."""
        self.release()
        for fields in self.ratings(prompt) if self.ratings is not None else ():
            self._write(b"data: " + _encode({**self._head.fields(self.kind), **({"usage": None} if self._head.has_usage else {}), **fields}) + b"\n\n")

    def text(self, index: int, text: str, probs: Sequence[Prob]) -> None:
        """A text delta."""
        if self._stream.is_behind or self._held:
            self._hold("text", index, text, probs)
        elif probs:
            self._write(self._start + self._with_probs(index, text, probs) + self._stop)
        elif text:
            write = self._write
            write(self._text_open[index])
            write(_encode(text))
            write(self._text_close)

    def lane(self, index: int) -> Lane | None:
        """Texts of a single choice, while none is held back."""
        return self._stream if self._head.n_choices == 1 and not self._held else None

    def reasoning(self, index: int, text: str) -> None:
        """A reasoning delta."""
        if self._stream.is_behind or self._held:
            self._hold("reasoning", index, text, ())
        else:
            encoded = _encode(text)
            self._write(self._start + self._opening(index, "reasoning").replace(b"%", encoded) + self._stop)

    def call(self, index: int, event: CallPart) -> None:
        """A tool call's start, or more of its arguments."""
        call: dict[str, Any] = {"index": event.index}
        if isinstance(event, CallStart):
            call |= {"id": event.id or call_id(), "type": "function", "function": {"name": event.name, "arguments": ""}}
        elif isinstance(event, CallArguments):
            call["function"] = {"arguments": event.text}
        else:
            return
        self.release()
        delta = {"index": index, "delta": {"tool_calls": [call]}, "logprobs": None, "finish_reason": None}
        self._write(self._start + _encode(delta) + self._stop)

    def ended(self, index: int, end: End) -> None:
        """The last chunk of a choice."""
        self.release()
        self._write(self._start + self._end(index, end) + self._stop)

    def flush(self) -> None:
        """One write for all of this step's chunks."""
        self._stream.flush()

    def close(self, usage: Usage) -> None:
        """The usage chunk where it was asked for, and the end."""
        self.release()
        if self._head.has_usage:
            self._write(
                b"data: "
                + _encode({**self._head.fields(self.kind), "choices": [], "usage": usage_json(usage)})
                + b"\n\n"
            )
        self._write(DONE)

    def release(self) -> None:
        """Turns what was held back into as few chunks as possible."""
        held, self._held = self._held, []
        for item in held:
            text = "".join(item.texts)
            if item.kind == "text":
                if item.probs:
                    self._write(self._start + self._with_probs(item.index, text, item.probs) + self._stop)
                else:
                    self._write(self._text_open[item.index] + _encode(text) + self._text_close)
            else:
                opening = self._opening(item.index, "reasoning").replace(b"%", _encode(text))
                self._write(self._start + opening + self._stop)

    def _hold(self, kind: str, index: int, text: str, probs: Sequence[Prob]) -> None:
        last = next((h for h in reversed(self._held) if h.index == index), None)
        if last is None or last.kind != kind:
            self._held.append(_Held(kind, index, [text], list(probs)))
        else:
            last.texts.append(text)
            last.probs.extend(probs)


class ChatChunks(Chunks):
    """chat.completion.chunk"""

    kind = "chat.completion.chunk"

    def _opening(self, index: int, kind: str) -> bytes:
        if kind == "reasoning":
            return (
                b'{"index":%d,"delta":{"reasoning":%%,"reasoning_content":%%},"logprobs":null,"finish_reason":null}'
                % index
            )
        return b'{"index":%d,"delta":{"content":' % index

    def _closing(self, kind: str) -> bytes:
        return b'},"logprobs":null,"finish_reason":null}'

    def _begin(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index

    def _with_probs(self, index: int, text: str, probs: Sequence[Prob]) -> bytes:
        return _encode(
            {
                "index": index, "delta": {"content": text},
                "logprobs": {"content": chat_entries(self._tokenizer, probs), "refusal": None}, "finish_reason": None,
            }
        )  # fmt: skip

    def _end(self, index: int, end: End) -> bytes:
        return _encode(
            {
                "index": index,
                "delta": {},
                "logprobs": None,
                "finish_reason": FINISH[end.reason],
                "stop_reason": end.stop,
            }
        )


class TextChunks(Chunks):
    """text_completion. echo: the text of each choice's prompt, sent first, or (is_rated) by `ratings`."""

    kind = "text_completion"

    def __init__(self, stream: EventStream, head: Head, tokenizer: Tokenizer, echo: Sequence[str] = (), is_rated: bool = False) -> None:
        super().__init__(stream, head, tokenizer)
        self._echo = () if is_rated else echo
        self._offsets = [len(text) for text in echo] or [0] * head.n_choices

    def started(self) -> None:
        """The prompts, where they are to be echoed."""
        for index, text in enumerate(self._echo):
            self._write(self._text_open[index] + _encode(text) + self._text_close)

    def _opening(self, index: int, kind: str) -> bytes:
        return b'{"index":%d,"text":' % index

    def _closing(self, kind: str) -> bytes:
        return b',"logprobs":null,"finish_reason":null}'

    def _with_probs(self, index: int, text: str, probs: Sequence[Prob]) -> bytes:
        shape = text_logprobs(self._tokenizer, probs, self._offsets[index])
        self._offsets[index] += len(text)
        return _encode({"index": index, "text": text, "logprobs": shape, "finish_reason": None})

    def _end(self, index: int, end: End) -> bytes:
        return _encode(
            {"index": index, "text": "", "logprobs": None, "finish_reason": FINISH[end.reason], "stop_reason": end.stop}
        )


def call_id() -> str:
    """A new id of a tool call."""
    return "call_" + secrets.token_hex(12)
