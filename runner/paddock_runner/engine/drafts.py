"""Speculation by look-up: what followed the last few tokens when they came before is guessed to follow again, and checked in one row.

The sampler is a function of (seed, position), so a row that draws after each of its tokens finds exactly what steps of one token would have
found; guesses change the pace, never the answer. Whether they pay is measured: each request is looked at now and then as if it had been
guessed for; it is switched over when its share of right guesses, at what steps with guesses were seen to take, makes the whole
step worth more, and back when it no longer does, or when there is nothing to guess for a while. While anybody is guessed for, steps go one at a time,
because a guess starts from the last token. Source of the look-up: Saxena, Prompt Lookup Decoding, 2023.

Guesses for an answer that is held to a grammar go out to its front, too, which makes a mask for each place as far as the grammar allows them (masks.py).
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING

from ..wire.guesses import Guessed
from ..wire.messages import Kind
from .guess import WINDOW_TOKENS, common, look_up
from .request import Phase, Request
from .worth import Worth, expected

if TYPE_CHECKING:
    from .loop import Engine
    from .step import Step

PROBE_HEAD_TOKENS = 256
"""After so many tokens a model's own guesses are tried again for a request where they did not pay."""
WEIGH_EVERY = 2
"""Steps between two looks at how many tokens are best guessed."""
LEAST_PROBE = 4
"""Tokens that must have come before it is looked whether they could have been guessed."""
BLANK_STEPS = 4
"""Steps in a row with nothing to guess for a request, after which it has a standing row again."""
MASK_US = 40.0
"""What a mask is believed to add to a step before any was made for a guess."""


class Drafter:
    """Who is guessed for, and with how many tokens."""

    __slots__ = ("_counts", "_engine", "_n_weighed", "_weighed", "accepted", "drafted", "is_on", "requests", "worth")

    def __init__(self, engine: Engine, is_on: bool) -> None:
        self._engine = engine
        self.is_on = is_on
        most = engine.sizes.max_guesses if engine.sizes.recurrent_bytes else max(engine.policy.draft_tokens)
        self._counts = tuple(n for n in engine.policy.draft_tokens if n <= most) or (max(most, 1),)
        self._counts = (1,) if engine.policy.draft_head else self._counts
        self.requests: list[Request] = []
        """Those without a standing row, because they are guessed for."""
        self.drafted = self.accepted = 0
        self.worth = Worth()
        self._weighed, self._n_weighed = (0.0, 0), -1

    def may_guess(self, request: Request) -> bool:
        """Best tokens need one token at a time."""
        return request.n_logprobs <= 0

    def remove(self, request: Request) -> None:
        """It ends, or makes way."""
        if request in self.requests:
            request.walk_index = -1
            self.requests.remove(request)

    # ---- whether it pays ----

    def value(self, n_rows: int, n_guesses: int, n_more: float) -> float:
        """Tokens per time of a step of n_rows rows with guesses that bring n_more tokens, against one without."""
        engine = self._engine
        cost = engine.scheduler.cost
        base = self.worth.plain_us(n_rows, cost.decode_us(n_rows, self._engine.slots.context))
        believed = cost.chunk_us(n_guesses, 0) + (engine.policy.draft_gap_us if engine.run_ahead else 0.0)
        if engine.masked or any(request.use_mask for request in self.requests):
            believed += max(0.0, MASK_US * n_guesses - (base if engine.run_ahead else 0.0))  # a device computes meanwhile
        return (n_rows + n_more) / n_rows * base / (base + self.worth.extra_us(n_rows, n_guesses, believed))

    def best(self, rates: list[float], n_rows: int) -> tuple[float, int]:
        """How many tokens are best guessed for each of those with these rates, and what that is worth."""
        found = (0.0, 0)
        for n in self._counts:
            if found[1] and n * len(rates) > self._room(n_rows):
                break
            found = max(found, (self.value(n_rows, n * len(rates), sum(expected(rate, n) for rate in rates)), n))
        return found

    def consider(self) -> None:
        """Looks at standing requests as if they had been guessed for; switches those over for which it would pay."""
        engine = self._engine
        slots, policy = engine.slots, engine.policy
        n_rows = self._n_rows()
        if n_rows == len(self.requests) or n_rows > policy.draft_rows:
            return
        found: list[tuple[float, int, Request]] = []
        for slot in (*slots.decode, *(request.slot for request in engine.masked)):
            request = slots.request_of[slot]
            if request is None or request.phase != Phase.DECODE or not self.may_guess(request) or engine.read_seq < request.first_seq:
                continue
            if slots.launched(slot) >= request.guess.next_probe:
                n_known = engine.given_tokens(request) + request.prompt_tokens
                if self._probe(request, n_known):
                    found.append((request.guess.rate, n_known, request))
        if not found:
            return
        found.sort(key=lambda one: -one[0])
        rates = [r.guess.rate for r in self.requests]
        need = min(1.0, policy.draft_gain) * self.best(rates, n_rows)[0] if rates else policy.draft_gain
        options = [(*self.best([*rates, *(rate for rate, _, _ in found[:k])], n_rows), k) for k in range(1, len(found) + 1)]
        worth, n, k = max(options)
        if worth <= need:
            self.worth.fade(n_rows, n * (len(rates) + k))
            return
        for _, n_known, request in found[:k]:
            self._switch(request, n_known)

    def _probe(self, request: Request, n_known: int) -> bool:
        """Whether there is something to guess for it; its share of right guesses is known better then."""
        guess, most = request.guess, max(self._counts)
        if self._engine.policy.draft_head:
            guess.next_probe = n_known + PROBE_HEAD_TOKENS
            guess.believe(self._engine.policy.head_rate)
            return True
        n = min(most, n_known - request.prompt_tokens)
        guess.next_probe = n_known + LEAST_PROBE
        if n < LEAST_PROBE:
            return False
        text = self._engine.slots.tokens_of(request, max(0, n_known - WINDOW_TOKENS), n_known)
        cut = len(text) - 4 * n
        found, _ = look_up(text[:cut], n)
        n_right = common(found, text[cut:])
        guess.see(n_right, len(found) // 4 or 1)
        guess.next_probe = n_known + max(n_right, LEAST_PROBE)
        return n_right > 0

    def _switch(self, request: Request, n_known: int) -> None:
        """From now on it is guessed for."""
        slots = self._engine.slots
        if request.use_mask:
            self._engine.masked.remove(request)
        slots.leave(request.slot)
        slots.mark(request, slots.launched(request.slot))
        request.guess.begin(self._engine.launched_seq)
        slots.read_length[request.slot] = n_known
        self.requests.append(request)

    def _stop(self, request: Request, n_known: int) -> None:
        """It has a standing row again, and is left alone for a while if guesses did not pay."""
        guess = request.guess
        self.requests.remove(request)
        if self._engine.policy.draft_head:
            guess.next_probe = n_known + PROBE_HEAD_TOKENS
        else:
            guess.next_probe = n_known + guess.pause()
        request.walk_index = -1
        self._engine.slots.join(request, n_known - 1, not request.use_mask)
        if request.use_mask:
            self._engine.masked.append(request)

    # ---- rows ----

    def _n_rows(self) -> int:
        """Decode rows of a step, whatever they wait for."""
        return len(self._engine.slots.decode) + len(self._engine.masked) + len(self.requests)

    def _room(self, n_rows: int) -> int:
        """Guesses that a step with so many rows can have in all."""
        sizes = self._engine.sizes
        return min(sizes.max_step_rows, sizes.max_step_tokens) - n_rows

    def rows(self, has_prefill: bool) -> list[tuple[int, int]]:
        """(slot, tokens) of the rows of a step, guesses staged; with prefill beside them nobody is guessed for."""
        engine = self._engine
        slots, sizes, policy = engine.slots, engine.sizes, engine.policy
        n_rows = self._n_rows()
        room = self._room(n_rows)
        ready = [r for r in self.requests if r.guess.last_seq <= engine.read_seq]
        if self._n_weighed != len(ready) or not engine.launched_seq % WEIGH_EVERY:
            self._weighed, self._n_weighed = self.best([r.guess.rate for r in ready], n_rows), len(ready)
        worth, most = self._weighed
        is_worth = worth >= min(1.0, policy.draft_gain)
        found = []
        for request in ready:
            slot = request.slot
            n_known = int(slots.read_length[slot])
            slots.mark(request, n_known - 1)
            if not is_worth or request.guess.n_blank >= BLANK_STEPS:
                self._stop(request, n_known)
                continue
            if request.wary_draws and request.use_mask and not request.has_mask(n_known - request.prompt_tokens):
                continue
            assert request.holding is not None
            n = min(most, room, len(request.holding.pages) * sizes.page_tokens - n_known, request.max_length - n_known - 1)
            n = 0 if has_prefill else self._stage(request, n_known, n)
            room -= n
            found.append((slot, 1 + n))
        return found

    def _stage(self, request: Request, n_known: int, n: int) -> int:
        """How many of n guesses there are for a request; they stand in its text."""
        slots = self._engine.slots
        if request.use_mask and n > 0:
            return self._stage_held(request, n_known, n)
        if n <= 0 or self._engine.policy.draft_head:  # the model's own guess stands there already
            return max(n, 0) if request.guess.has_own else 0
        guess = request.guess.go_on(partial(slots.tokens_of, request), n_known, n)
        if not guess:
            first = max(0, n_known - WINDOW_TOKENS)
            guess, at = look_up(slots.tokens_of(request, first, n_known), n)
            request.guess.found(at + first if at >= 0 else -1, n_known)
        request.guess.n_blank = 0 if guess else request.guess.n_blank + 1
        if guess:
            slots.write_text(request.slot, n_known, guess)
        return len(guess) // 4

    def _stage_held(self, request: Request, n_known: int, n: int) -> int:
        """The same for a request that is held to a grammar: tokens that are certain come first, and its front is told."""
        engine, index = self._engine, n_known - request.prompt_tokens
        if request.walk_index == index:  # its row was left out: the same again
            guess = request.guessed[: 4 * n]
        else:
            sure = array("i", request.sure_from(index)[:n]).tobytes()
            guess = sure + (self._behind(request, n_known, n - len(sure) // 4, sure) if len(sure) < 4 * n else b"")
            request.walk_index, request.guessed = index, guess
            request.walked = None if len(guess) > len(sure) else {}
            if request.walked is None:
                told = Guessed(request.ask_id, index, array("i", guess))
                engine.ports[request.port].send(Kind.GUESS, told.encode())
        request.guess.n_blank = 0 if guess or engine.policy.draft_head else request.guess.n_blank + 1
        if guess:
            engine.slots.write_text(request.slot, n_known, guess)
        return len(guess) // 4

    def _behind(self, request: Request, n_known: int, n: int, sure: bytes) -> bytes:
        """At most n guesses behind the known tokens of a request and those that are sure."""
        slots = self._engine.slots
        if self._engine.policy.draft_head:
            return array("i", [self._engine.device.text_token(request.slot, n_known)]).tobytes() if request.guess.has_own and not sure else b""
        if not sure and (guess := request.guess.go_on(partial(slots.tokens_of, request), n_known, n)):
            return guess
        first = max(0, n_known - WINDOW_TOKENS)
        guess, at = look_up(slots.tokens_of(request, first, n_known) + sure, n)
        request.guess.found(at + first - len(sure) // 4 if at >= 0 else -1, n_known)
        return guess

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
            n_drawn = n_known - slots.launched(slot) - 1
            if not n_drawn:
                continue  # it was left out
            n_right = n_drawn - 1
            slots.mark(request, n_known - 1)
            if request.use_mask:
                request.pass_by(n_known - request.prompt_tokens)
            request.guess.has_own = True
            if n > 1:
                request.guess.see(n_right, n - 1)
                request.guess.count(n - 1, n_right)
                self.drafted += n - 1
                self.accepted += n_right
