"""One answer of a turn: token ids in, pieces of text, reasoning and tool calls out, and how it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import Cancelled, PaddockError, ShuttingDown
from ..text.events import CallStart, Event, Text, Thought
from ..text.stream import TextStream
from ..wire.messages import ROW_LENGTH, ROW_NAN, ROW_STOP, Done, Reason, Refused, Started

if TYPE_CHECKING:
    from .constrain import Walk
    from .turn import Turn

Top = tuple[tuple[int, float], ...]
Prob = tuple[int, float, Top]
"""(token id, log-probability, the best (id, log-probability) pairs)."""
NO_PROBS: tuple[Prob, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """How an answer ended. reason: "stop", "length" or "calls". stop: the stop string or stop token that ended it, if any."""

    reason: str
    stop: str | int | None = None


class Reader(Protocol):
    """Splits an answer's text into events: thoughts, text, tool calls."""

    def push(self, text: str) -> Iterable[Event]:
        """The events that are certain now."""
        ...

    def finish(self) -> Iterable[Event]:
        """The rest, when the answer has ended."""
        ...


class Choice:
    """The answer `index` of a turn, to one of its prompts."""

    __slots__ = (
        "_begun", "_probs", "_reader", "_sink", "_sizes", "_text", "ask_id", "cached_tokens", "end", "index", "is_cached_known",
        "n_calls", "output_tokens", "prompt", "reasoning_tokens", "shown_bytes", "turn", "walk",
    )  # fmt: skip

    def __init__(
        self, turn: Turn, index: int, prompt: int, ask_id: int, text: TextStream, reader: Reader | None
    ) -> None:
        self.turn, self.index, self.prompt, self.ask_id = turn, index, prompt, ask_id
        self._text, self._reader, self._sink = text, reader, turn.sink
        self._probs: deque[tuple[int, Prob]] | None = deque() if turn.wish.n_logprobs >= 0 else None
        self._begun = 0
        self.shown_bytes = 0
        self.output_tokens = self.reasoning_tokens = self.cached_tokens = self.n_calls = 0
        self.end: End | None = None
        self.walk: Walk | None = None

    def take(self, token: int, flags: int, logprob: float, top: Top) -> None:
        """One token from the engine."""
        self.output_tokens += 1
        if self.output_tokens == 1:
            self.turn.on_first_token()
        if flags & (ROW_STOP | ROW_NAN):
            return
        if self.walk is not None and not flags & ROW_LENGTH:
            self.walk.take(token)
        try:
            text = self._text.push(token)
        except IndexError:  # a row of the embedding that the tokenizer has no text for
            text = ""
        if self._probs is not None:
            self._probs.append((self._begun, (token, logprob, top)))
            self._begun += self.turn.shown_bytes(token)
        if text:
            if self._reader is None:
                self._sink.text(self.index, text, NO_PROBS if self._probs is None else self._certain(text))
            else:
                self._read(self._reader.push(text), text)
        if self._text.matched is not None:
            self.turn.desk.abort(self.ask_id)
            self._finish("stop", self._text.matched)

    def on_started(self, event: Started) -> None:
        """The engine began with the prompt."""
        self.cached_tokens = event.cached_tokens
        self.turn.on_started(event.queued_ns)

    def on_ended(self, event: Done | Refused) -> None:
        """Nothing more will come from the engine."""
        if self.end is not None:
            return
        if isinstance(event, Refused) or event.reason == Reason.ERROR:
            self.turn.fail(event.to_error())
        elif event.reason == Reason.ABORT:
            self.turn.fail(ShuttingDown("the runner ended this request before it was complete"))
        else:
            self.cached_tokens = event.cached_tokens
            self._finish("length" if event.reason == Reason.LENGTH else "stop", None)

    def close(self, error: PaddockError | None = None) -> None:
        """Stops it, without an end."""
        if self.end is None:
            self.end = End("error" if error is not None and not isinstance(error, Cancelled) else "cancelled")
            self.turn.desk.abort(self.ask_id)

    def _finish(self, reason: str, stop: str | None) -> None:
        rest = self._text.finish()
        if self._reader is None:
            probs = self._rest_of_probs(stop is not None)
            if rest or probs:
                self._sink.text(self.index, rest, probs)
        else:
            if rest:
                self._read(self._reader.push(rest), rest)
            self._read(self._reader.finish(), "")
        if self.n_calls and reason == "stop":
            reason = "calls"
        self.end = End(reason, stop)
        self._sink.ended(self.index, self.end)
        self.turn.on_choice_ended()

    def _read(self, events: Iterable[Event], text: str) -> None:
        probs = NO_PROBS if self._probs is None else self._certain(text)
        has_thought = False
        for event in events:
            if isinstance(event, Text):
                self._sink.text(self.index, event.text, probs)
                probs = NO_PROBS
            elif isinstance(event, Thought):
                has_thought = True
                self._sink.reasoning(self.index, event.text)
            else:
                self.n_calls += isinstance(event, CallStart)
                self._sink.call(self.index, event)
        self.reasoning_tokens += has_thought

    def _certain(self, text: str) -> tuple[Prob, ...]:
        """Log-probabilities of the tokens that begin within the text shown so far."""
        assert self._probs is not None
        self.shown_bytes += len(text.encode())
        out = []
        while self._probs and self._probs[0][0] < self.shown_bytes:
            out.append(self._probs.popleft()[1])
        return tuple(out)

    def _rest_of_probs(self, is_cut: bool) -> tuple[Prob, ...]:
        if not self._probs or is_cut:
            return NO_PROBS
        return tuple(prob for _, prob in self._probs)
