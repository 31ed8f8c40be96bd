"""One turn: owns a request from its prompt until the last byte. Knows no vendor: what it yields goes to a Sink."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Protocol

from ..errors import Cancelled, PaddockError, UsageError
from ..text.events import CallArguments, CallEnd, CallStart
from ..text.stream import TextStream
from ..text.tools import Schemas, Takes
from ..wire.messages import Ask, Miss, Started
from .choice import Choice, End, Prob, Reader
from .constrain import Guide
from .desk import Desk
from .lane import Lane
from .served import Served
from .usage import Timing, Usage
from .wish import Wish

RESUMED = 1000
"""Added to the priority of an answer that goes on: it has waited once."""
SHOWN_TOKENS = 8
"""Tokens of the prompt that a client is shown where it leaves the cache."""
CallPart = CallStart | CallArguments | CallEnd


class Sink(Protocol):
    """Where a turn's answers go. `index`: which answer. All calls come from the event loop; `flush` once per step at most."""

    def started(self) -> None:
        """The engine began: nothing can be refused any more."""

    def rated(self, prompt: int) -> None:
        """The log-probabilities of a prompt's tokens, which were asked for, are there (Turn.prompt_probs); before any of its first answer."""

    def text(self, index: int, text: str, probs: Sequence[Prob]) -> None:
        """More of the answer, with the log-probabilities of its tokens when they were asked for."""

    def lane(self, index: int) -> Lane | None:
        """The short way for the texts that come next, where there is one; asked again after anything else was said."""

    def reasoning(self, index: int, text: str) -> None:
        """More of the reasoning."""

    def call(self, index: int, event: CallPart) -> None:
        """A new tool call, more of one's arguments, or its end."""

    def ended(self, index: int, end: End) -> None:
        """This answer is complete."""

    def flush(self) -> None:
        """Write what came since the last flush."""


@dataclass(frozen=True, slots=True)
class CacheNote:
    """What the prefix cache knew of a prompt: why not more, tokens that were cached, of how many, and up to where it is known."""

    miss: Miss
    cached_tokens: int
    prompt_tokens: int
    known_tokens: int


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a turn runs. client: for fairness. salt: prefixes are shared only among turns of one salt.

    weight: the client's share, beside those of weight 1. deadline_ns: until when it may wait in the queue, 0: as long as it takes.
    """

    client: int = 0
    salt: int = 0
    received_ns: int = 0
    weight: int = 1
    deadline_ns: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer's text is read. reader: makes the parser of one answer, None: text is content. visible: special tokens it needs.

    guide: what the answers are held to, a walk for each of them.
    """

    reader: Callable[[], Reader] | None = None
    visible: frozenset[int] = frozenset()
    guide: Guide | None = None

    @classmethod
    def of(cls, served: Served, prompt: str, schemas: Schemas, takes: Callable[[], Takes] | None = None) -> Reading:
        """For answers to a rendered prompt. schemas: parameters of the tools that may be called, by name. takes: makes what AnswerFormat.parser is given of that name, for each answer."""
        if served.format.parser(prompt, schemas).is_plain:
            return PLAIN
        return cls(lambda: served.format.parser(prompt, schemas, takes=takes() if takes is not None else None), served.format.visible(bool(schemas)))


PLAIN = Reading()


class Turn:
    """Prompts (each with wish.n answers), sent as asks; `ended` tells when the last answer is complete, or why not.

    reading: how thoughts and tool calls are found in the answers.
    """

    def __init__(
        self,
        desk: Desk,
        served: Served,
        prompts: Sequence[array[int]],
        wish: Wish,
        sink: Sink,
        caller: Caller,
        reading: Reading = PLAIN,
    ) -> None:
        self.desk, self.served, self.prompts, self.wish, self.sink, self.caller = (
            desk,
            served,
            prompts,
            wish,
            sink,
            caller,
        )
        self._reading = reading
        self._visible = served.tokenizer.special_ids if wish.shows_special else reading.visible
        self.reasoning_end: Sequence[int] = ()
        """Tokens that end reasoning which has had as many as it may; () where it may have any number."""
        if wish.max_reasoning >= 0 and (text := served.format.reasoning_end):
            self.reasoning_end = served.tokenizer.encode(text, add_special=False)
        self.choices: list[Choice] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.timing = Timing(received_ns=caller.received_ns)
        self.cache: CacheNote | None = None
        self.on_cache: Callable[[CacheNote, str], None] | None = None
        """Told, before anything is written, what the cache knew of the first prompt, and how that goes on after it."""
        self.is_started = False
        self.is_touched = False
        self._begun: set[int] = set()
        self._n_open = 0

    def start(self) -> None:
        """Sends the asks, all or none. Raises: UsageError, ContextTooLong, Busy, PackError."""
        self.wish.check(self.served)
        n_asks = len(self.prompts) * self.wish.n
        if n_asks > self.served.max_asks:
            raise UsageError(
                f"{len(self.prompts)} prompts of {self.wish.n} answers each are {n_asks} answers, {self.served.max_asks} can wait and run here",
                "send them in several requests, or start the runner with a larger --max-queue", param="n" if self.wish.n > 1 else "prompt",
            )  # fmt: skip
        for prompt in self.prompts:
            self.served.require_room(len(prompt), self.wish.max_tokens)
        tokenizer, wish = self.served.tokenizer, self.wish
        try:
            for i, prompt in enumerate(self.prompts):
                for j in range(wish.n):
                    ask = self._ask(prompt, j)
                    starts_text = tokenizer.is_special(prompt[-1])
                    text = TextStream(tokenizer, wish.stop, wish.includes_stop, self._visible, starts_text)
                    reader = self._reading.reader() if self._reading.reader is not None else None
                    choice = Choice(self, i * wish.n + j, i, ask.ask_id, text, reader)
                    if self._reading.guide is not None:
                        choice.walk = self._reading.guide.walks[choice.index]
                        ask.use_mask = True
                    self.desk.send(ask, choice, choice.walk.begin(choice) if choice.walk is not None else ())
                    self.choices.append(choice)
                    self._n_open += 1
        except PaddockError as error:
            self._close(error)
            raise

    def resume(self, choice: Choice, tokens: array[int]) -> None:
        """Asks for the rest of an answer, behind its prompt and its tokens so far; before others that wait, however long that has taken. Its old ask was aborted."""
        wish = self.wish
        ask = self._ask(self.prompts[choice.prompt] + tokens, choice.index % wish.n)
        ask.max_tokens = wish.max_tokens and wish.max_tokens - len(tokens)
        ask.min_tokens, ask.priority = max(0, wish.min_tokens - len(tokens)), wish.priority + RESUMED
        ask.goes_on, ask.deadline_ns = True, 0
        ask.is_scored, ask.salt, ask.n_logprobs = False, self.caller.salt, wish.n_logprobs
        choice.ask_id = ask.ask_id
        try:
            self.desk.send(ask, choice)
        except PaddockError as error:
            self.fail(error)

    def _ask(self, prompt: array[int], number: int) -> Ask:
        ask = self.wish.ask(self.desk.next_id(), prompt, number, self.served.tokenizer.stop_ids)
        caller = self.caller
        ask.client, ask.salt, ask.received_ns = caller.client, caller.salt, caller.received_ns
        ask.weight, ask.deadline_ns = caller.weight, caller.deadline_ns
        if ask.is_scored:
            ask.salt = secrets.randbits(63)  # what is cached is not computed, and so cannot be rated
        return ask

    def cancel(self) -> None:
        """The client has gone: every open ask is aborted. Harmless when the turn has ended."""
        self.fail(Cancelled("the client left"))

    def abandon(self) -> None:
        """Nobody waits any longer: what is open is aborted. Harmless when the turn has ended."""
        if not self.ended.done():
            self._close(Cancelled("abandoned"))
            self.ended.cancel()

    def fail(self, error: PaddockError) -> None:
        """Ends the turn with an error."""
        self._close(error)
        if not self.ended.done():
            self.ended.set_exception(error)

    def on_started(self, event: Started, prompt: int) -> None:
        """Called by a choice that the engine began, with the number of its prompt."""
        self._begun.add(prompt)
        if not self.is_started:
            self.is_started = True
            self.timing.started_ns = self.desk.now_ns
            self.timing.queued_ns = event.queued_ns
            self.cache = CacheNote(event.miss, event.cached_tokens, event.prompt_tokens, event.known_tokens)
            if self.on_cache is not None:
                self.on_cache(self.cache, self._goes_on(prompt, event))
            self.sink.started()

    def _goes_on(self, prompt: int, event: Started) -> str:
        """How the prompt goes on where it leaves what is known: a few tokens of the client's own text."""
        if event.miss not in (Miss.NEW, Miss.DIFFERS):
            return ""
        at = event.known_tokens
        return self.served.tokenizer.decode(self.prompts[prompt][at : at + SHOWN_TOKENS], skip_special=False)

    def on_first_token(self, choice: Choice) -> None:
        """Called by a choice that got its first token: all of its prompt's have been rated then, if they were to be."""
        if not self.timing.first_token_ns:
            self.timing.first_token_ns = self.desk.now_ns
            self.desk.begins(self)
        if self.wish.n_prompt_logprobs >= 0 and choice.index % self.wish.n == 0:
            self.sink.rated(choice.prompt)

    def on_choice_ended(self) -> None:
        """Called by a choice that is complete."""
        self._n_open -= 1
        if self._n_open == 0 and not self.ended.done():
            self.timing.last_token_ns = self.desk.now_ns
            self.ended.set_result(None)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        n = self.wish.n
        return Usage(
            sum(len(p) for p in self.prompts),
            sum(c.cached_tokens for c in self.choices[::n]),
            sum(c.output_tokens for c in self.choices),
            sum(c.reasoning_tokens for c in self.choices),
            sum(c.drafted_tokens for c in self.choices),
            sum(c.accepted_tokens for c in self.choices),
        )

    @property
    def begun_tokens(self) -> int:
        """Tokens of the prompts that the engine began: what was refused, or waited until its client left, was never read."""
        return sum(len(self.prompts[i]) for i in self._begun)

    @property
    def gaps_ns(self) -> list[int]:
        """Times between an answer's tokens, of all answers, the shortest first."""
        return sorted(gap for c in self.choices for gap in map(sub, c.times[1:], c.times))

    @property
    def n_preempted(self) -> int:
        """How often its answers had to make way for others."""
        return sum(c.n_preempted for c in self.choices)

    def prompt_probs(self, prompt: int) -> list[Prob]:
        """Log-probabilities of a prompt's tokens but the first; [] when they were not asked for."""
        n = len(self.prompts[prompt]) - 1
        return self.choices[prompt * self.wish.n].prompt_probs[-n:] if n else []

    def shown_bytes(self, token: int) -> int:
        """Bytes of text that a token stands for; 0 for one that is left out."""
        tokenizer = self.served.tokenizer
        if token >= tokenizer.n_vocab or (tokenizer.is_special(token) and token not in self._visible):
            return 0
        return len(tokenizer.pieces[token])

    def _close(self, error: PaddockError) -> None:
        for choice in self.choices:
            choice.close(error)
