"""Speculation by look-up: what followed the last few tokens when they came before is guessed to follow again, and checked in one row.

The sampler is a function of (seed, position), so a row that draws after each of its tokens finds exactly what steps of one token would have
found; guesses change the pace, never the answer. Whether they pay is measured: each request is looked at now and then as if it had been
guessed for; it is switched over when its share of right guesses, at the cost of a token that the cost model has learned, makes the whole
step worth more. While anybody is guessed for, steps go one at a time, because a guess starts from the last token.
Source of the look-up: Saxena, Prompt Lookup Decoding, 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .guess import WINDOW_TOKENS, common, look_up
from .request import Phase, Request

if TYPE_CHECKING:
    from .loop import Engine
    from .step import Step

PROBE_HEAD_TOKENS = 256
"""After so many tokens a model's own guesses are tried again for a request where they did not pay."""
FADE = 0.99
"""What is believed of the cost of guesses fades with each look, so that it is measured again some day."""


class Drafter:
    """Who is guessed for, and with how many tokens."""

    __slots__ = ("_counts", "_engine", "_extra_us", "_turn", "accepted", "drafted", "is_on", "requests")

    def __init__(self, engine: Engine, is_on: bool) -> None:
        self._engine = engine
        self.is_on = is_on
        most = engine.sizes.max_guesses if engine.sizes.recurrent_bytes else max(engine.policy.draft_tokens)
        self._counts = tuple(n for n in engine.policy.draft_tokens if n <= most) or (max(most, 1),)
        self._counts = (1,) if engine.policy.draft_head else self._counts
        self.requests: list[Request] = []
        """Those without a standing row, because they are guessed for."""
        self.drafted = self.accepted = self._turn = 0
        self._extra_us = 0.0
        """What guesses add to a step, as measured; 0 while that is not known."""

    def may_guess(self, request: Request) -> bool:
        """Masks and best tokens need one token at a time."""
        return not request.use_mask and request.n_logprobs <= 0

    def remove(self, request: Request) -> None:
        """It ends, or makes way."""
        if request in self.requests:
            self.requests.remove(request)

    # ---- whether it pays ----

    def value(self, rate: float, n: int, n_rows: int) -> float:
        """Tokens per time with n guesses in one of n_rows rows, against none."""
        cost = self._engine.scheduler.cost
        base = cost.decode_us(n_rows)
        gap = self._engine.policy.draft_gap_us if self._engine.run_ahead else 0.0
        extra = max(cost.chunk_us(n, 0) + gap, self._extra_us)
        expected = rate * (1 - rate**n) / (1 - rate) if rate < 1 else n
        return (n_rows + expected) / n_rows * base / (base + extra)

    def best(self, rate: float, n_rows: int) -> tuple[float, int]:
        """The number of guesses that is worth most, and what it is worth."""
        return max((self.value(rate, n, n_rows), n) for n in self._counts)

    def consider(self) -> None:
        """Looks at one standing request as if it had been guessed for; switches it over when that would pay."""
        engine = self._engine
        slots = engine.slots
        decode = slots.decode
        n_rows = len(decode) + len(self.requests)
        if not decode or n_rows > engine.policy.draft_rows:
            return
        self._turn += 1
        request = slots.request_of[decode[self._turn % len(decode)]]
        if request is None or request.phase != Phase.DECODE or not self.may_guess(request):
            return
        most = max(self._counts)
        if slots.launched(request.slot) < request.guess.next_probe:
            return
        n_known = engine.given_tokens(request) + request.prompt_tokens
        request.guess.next_probe = n_known + most
        if engine.policy.draft_head:
            request.guess.rate = engine.policy.head_rate
            self._switch(request, n_known, n_rows)
            return
        self._extra_us *= FADE
        if n_known - most <= request.prompt_tokens:
            return
        text = slots.tokens_of(request, max(0, n_known - WINDOW_TOKENS), n_known)
        cut = len(text) - 4 * most
        guess = look_up(text[:cut], most)
        request.guess.see(common(guess, text[cut:]), len(guess) // 4 or 1)
        self._switch(request, n_known, n_rows)

    def _switch(self, request: Request, n_known: int, n_rows: int) -> None:
        """From now on it is guessed for, if that would pay."""
        engine, slots = self._engine, self._engine.slots
        if self.best(request.guess.rate, n_rows)[0] > engine.policy.draft_gain:
            slots.leave(request.slot)
            slots.mark(request, slots.launched(request.slot))
            request.guess.last_seq = engine.launched_seq
            slots.read_length[request.slot] = n_known
            self.requests.append(request)

    # ---- rows ----

    def rows(self, has_prefill: bool) -> list[tuple[int, int]]:
        """(slot, tokens) of the rows of a step, guesses staged; with prefill beside them nobody is guessed for."""
        engine = self._engine
        slots, sizes = engine.slots, engine.sizes
        found = []
        room = sizes.max_step_rows - len(slots.decode) - len(self.requests) - len(engine.masked)
        room = min(room, sizes.max_step_tokens - len(slots.decode) - len(self.requests) - len(engine.masked))
        n_rows = len(slots.decode) + len(self.requests)
        for request in list(self.requests):
            slot = request.slot
            if request.guess.last_seq > engine.read_seq:
                continue
            n_known = int(slots.read_length[slot])
            slots.mark(request, n_known - 1)
            worth, n = self.best(request.guess.rate, n_rows)
            if worth < min(1.0, engine.policy.draft_gain):
                self.requests.remove(request)
                request.guess.next_probe = n_known + (PROBE_HEAD_TOKENS if engine.policy.draft_head else 8 * n)
                slots.join(request, n_known - 1)
                continue
            assert request.holding is not None
            n = min(n, room, len(request.holding.pages) * sizes.page_tokens - n_known, request.max_length - n_known - 1)
            guess = b""
            if engine.policy.draft_head:
                n_head = int(n > 0 and not has_prefill)  # the guess stands in the slot's text already
                room -= n_head
                found.append((slot, 1 + n_head))
                continue
            if n > 0 and not has_prefill:
                guess = look_up(slots.tokens_of(request, max(0, n_known - WINDOW_TOKENS), n_known), n)
            if guess:
                slots.write_text(slot, n_known, guess)
                room -= len(guess) // 4
            elif not has_prefill:
                request.guess.see(0, 1)
            found.append((slot, 1 + len(guess) // 4))
        return found

    def see(self, n_rows: int, us: float) -> None:
        """Learns from a step with guesses. The cost model does not: what they add is not what prefill adds."""
        extra = max(0.0, us - self._engine.scheduler.cost.decode_us(n_rows))
        self._extra_us += 0.1 * (extra - self._extra_us) if self._extra_us else extra

    def launched(self, rows: list[tuple[int, int]], seq: int) -> None:
        """A step with these rows has been given."""
        for slot, _ in rows:
            request = self._engine.slots.request_of[slot]
            assert request is not None
            request.guess.last_seq = seq

    def read(self, step: Step) -> None:
        """The results of a step with rows of guesses are in."""
        slots = self._engine.slots
        for slot, n in step.drafts:
            request = slots.request_of[slot]
            if request is None or request.holding is None:
                continue
            n_known = int(slots.read_length[slot])
            n_right = max(0, n_known - slots.launched(slot) - 2)
            slots.mark(request, n_known - 1)
            if n > 1:
                request.guess.see(n_right, n - 1)
                request.guess.drafted += n - 1
                request.guess.accepted += n_right
                self.drafted += n - 1
                self.accepted += n_right
