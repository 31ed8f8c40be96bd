"""One answer of a turn: token ids in, pieces of text, reasoning and tool calls out, and how it ended."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import Cancelled, PaddockError, ShuttingDown
from ..text.events import CallEnd, CallStart, Event, Text, Thought
from ..text.stream import TextStream
from ..wire.messages import ROW_NAN, ROW_SCORE, ROW_STOP, Done, Reason, Refused, Started

if TYPE_CHECKING:
    from .constrain import Walk
    from .lane import Lane
    from .turn import Turn

Top = tuple[tuple[int, float], ...]
Prob = tuple[int, float, Top]
"""(token id, log-probability, the best (id, log-probability) pairs)."""
NO_PROBS: tuple[Prob, ...] = ()
RARE = ROW_STOP | ROW_NAN | ROW_SCORE


@dataclass(frozen=True, slots=True)
class End:
    """How an answer ended. reason: "stop", "length" or "calls". stop: the stop string or stop token that ended it, if any."""

    reason: str
    stop: str | int | None = None


class Reader(Protocol):
    """Splits an answer's text into events: thoughts, text, tool calls."""

    @property
    def passes(self) -> bool:
        """Whether all that comes is text, as it is."""
        ...

    def push(self, text: str) -> Iterable[Event]:
        """The events that are certain now."""
        ...

    def finish(self) -> Iterable[Event]:
        """The rest, when the answer has ended."""
        ...


class Choice:
    """The answer `index` of a turn, to one of its prompts."""

    __slots__ = (
        "_begun",
        "_is_apart",
        "_is_broken",
        "_is_plain",
        "_is_resumed",
        "_is_thinking",
        "_kept",
        "_max_reasoning",
        "_probs",
        "_reader",
        "_sink",
        "_text",
        "accepted_tokens",
        "ask_id",
        "cached_tokens",
        "drafted_tokens",
        "end",
        "index",
        "lane",
        "n_calls",
        "n_preempted",
        "output_tokens",
        "pieces",
        "prompt",
        "prompt_probs",
        "reasoning_tokens",
        "shown_bytes",
        "times",
        "tokens",
        "turn",
        "walk",
    )  # fmt: skip

    def __init__(
        self, turn: Turn, index: int, prompt: int, ask_id: int, text: TextStream, reader: Reader | None
    ) -> None:
        self.turn, self.index, self.prompt, self.ask_id = turn, index, prompt, ask_id
        self._text, self._reader, self._sink = text, reader, turn.sink
        self._probs: deque[tuple[int, Prob]] | None = deque() if turn.wish.n_logprobs >= 0 else None
        self._kept: tuple[Prob, ...] = NO_PROBS
        """Of text that the reader has not shown yet: it may be the beginning of something else."""
        self._begun = 0
        self.shown_bytes = 0
        self.output_tokens = self.reasoning_tokens = self.cached_tokens = self.n_calls = 0
        self.drafted_tokens = self.accepted_tokens = self.n_preempted = 0
        self.times = array("q")
        """When each token came, time.monotonic_ns()."""
        self.end: End | None = None
        self.walk: Walk | None = None
        self.prompt_probs: list[Prob] = []
        """Of the prompt's tokens but the first, when they were asked for; all of them again when the ask had to make way."""
        self._max_reasoning = turn.wish.max_reasoning if turn.reasoning_end and reader is not None else -1
        self._is_resumed = self._is_thinking = self._is_broken = self._is_apart = False
        self.tokens: array[int] | None = array("i") if self._max_reasoning >= 0 else None
        """The answer's tokens, kept while its reasoning may have to be ended."""
        self._is_plain = self._probs is None and not text.has_stops
        self.lane: Lane | None = None
        """The short way of the next token: for a token whose entry in `pieces` is there, nothing more is to be done than `output_tokens` and `times`."""
        self.pieces = text.json

    def take(self, token: int, flags: int, logprob: float, top: Top) -> None:
        """One token from the engine."""
        if flags & RARE:
            self._take_rare(token, flags, logprob, top)
            return
        self._count()
        if self.walk is not None and self.tokens is not None and not flags:
            self.walk.take(token)  # the end of its reasoning may be put in before it is followed; others' were followed before anything was written
        try:
            text = self._text.push(token)
        except IndexError:  # a row of the embedding that the tokenizer has no text for
            text = ""
        if self._probs is not None:
            self._probs.append((self._begun, (token, logprob, top[: self.turn.wish.n_logprobs])))
            self._begun += self.turn.shown_bytes(token)
        if text:
            if self._reader is None:
                self._sink.text(self.index, text, NO_PROBS if self._probs is None else self._certain(text))
            else:
                self._read(self._reader.push(text), text)
        if self._is_plain and (self._reader is None or self._reader.passes):
            self._try_lane(token)
        elif self._text.matched is not None:
            self.turn.desk.abort(self.ask_id)
            self._finish("stop", self._text.matched)
        elif self.tokens is not None:
            self.tokens.append(token)
            if self._is_thinking and 0 <= self._max_reasoning <= self.reasoning_tokens and not flags:
                self._end_reasoning(self.tokens)

    def _try_lane(self, token: int) -> None:
        """Takes the short way from here, if it can be taken, also for this token the next time."""
        if self.walk is not None and self.tokens is not None:
            self._is_plain = False
            return
        self.lane = self._sink.lane(self.index) if self._text.is_settled else None
        if self.lane is not None:
            self._text.remember(token)

    def _take_rare(self, token: int, flags: int, logprob: float, top: Top) -> None:
        """A token of the prompt that was rated, or one that ends the answer and is not shown."""
        if flags & ROW_SCORE:
            self.prompt_probs.append((token, logprob, top[: self.turn.wish.n_prompt_logprobs]))
            return
        self._count()

    def _count(self) -> None:
        self.output_tokens += 1
        self.times.append(self.turn.desk.now_ns)
        if self.output_tokens == 1:
            self.turn.on_first_token(self)

    def _end_reasoning(self, tokens: array[int]) -> None:
        """The reasoning has had its tokens: what ends it is put in, and the model goes on from there.

        An answer that waits for masks gets it by these; another is asked for anew, with the answer so far as a part of the prompt.
        """
        closing, self._max_reasoning, self.tokens = self.turn.reasoning_end, -1, None
        if self.walk is not None:
            self.walk.forced = closing
            self.turn.desk.hold(self, self.walk)
            return
        for token in closing:
            if self.end is None:
                self.take(token, 0, 0.0, ())
        if self.end is not None:
            return
        turn, self._is_resumed = self.turn, True
        turn.desk.abort(self.ask_id)
        if self.output_tokens >= (turn.wish.max_tokens or turn.served.max_ctx_tokens - len(turn.prompts[self.prompt])):
            self._finish("length", None)
        else:
            turn.resume(self, tokens + array("i", closing))

    def on_started(self, event: Started) -> None:
        """The engine began with the prompt."""
        if not self._is_resumed:
            self.cached_tokens = event.cached_tokens
        self.turn.on_started(event, self.prompt)

    def on_ended(self, event: Done | Refused) -> None:
        """Nothing more will come from the engine."""
        if isinstance(event, Done):
            self.drafted_tokens += event.drafted_tokens
            self.accepted_tokens += event.accepted_tokens
            self.n_preempted += event.n_preempted
        if self.end is not None:
            return
        if isinstance(event, Refused) or event.reason == Reason.ERROR:
            self.turn.fail(event.to_error())
        elif event.reason == Reason.ABORT:
            self.turn.fail(ShuttingDown("the runner ended this request before it was complete"))
        else:
            if not self._is_resumed:
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
        if self.n_calls and reason == "stop" and not self._is_broken:  # who is told of calls takes their arguments for JSON
            reason = "calls"
        self.end = End(reason, stop)
        self._sink.ended(self.index, self.end)
        self.turn.on_choice_ended()

    def _read(self, events: Iterable[Event], text: str) -> None:
        probs = NO_PROBS if self._probs is None else self._kept + self._certain(text)
        has_thought = ends_apart = False
        for event in events:
            self._is_thinking = False
            is_behind, self._is_apart = self._is_apart, not isinstance(event, Text)
            ends_apart = self._is_apart
            if isinstance(event, Text):
                self._sink.text(self.index, event.text, self._last(probs, event.text) if is_behind else probs)
                probs = NO_PROBS
            elif isinstance(event, Thought):
                has_thought = self._is_thinking = True
                self._sink.reasoning(self.index, event.text)
            else:
                self.n_calls += isinstance(event, CallStart)
                self._is_broken |= isinstance(event, CallEnd) and not event.is_complete
                self._sink.call(self.index, event)
        self.reasoning_tokens += has_thought
        self._kept = NO_PROBS if ends_apart else probs

    def _last(self, probs: tuple[Prob, ...], text: str) -> tuple[Prob, ...]:
        """Of the tokens behind a thought or a call those that make up the text: others before it ended what was there."""
        n, n_bytes = len(probs), len(text.encode())
        while n and n_bytes > 0:
            n -= 1
            n_bytes -= self.turn.shown_bytes(probs[n][0])
        return probs[n:]

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
