"""How long a step with prefill may take: what streams that decode put up with, against prompts that wait.

Knows numbers, not requests: the scheduler says who waits, and asks. The rules, from the first that fits on:

1. Nobody decodes: as long as it takes.
2. Two prompts or more wait, or a short one comes and there is credit: a few decode steps (burst_ratio), or 12 ms where that is more.
3. One prompt is read: little more than a decode step (steady_ratio).
4. What 2 or 3 leave does not buy a tile of the device: rounds of a step with a chunk and some without.

Beside these, prompts that come together may be read in one long step (may_stall), in two parts where they do not fit into it (part), and a light client's prompt
in a step without decode rows (leave_rows_out).
"""

from __future__ import annotations

import math

from .cost import CostModel
from .policy import Policy

MAX_SAVED = 8
"""Steps in a row that may go without prefill, so that there is time for a chunk afterwards."""
SPLIT = 1.8
"""Of prompts that come together and do not fit into one step, the first is full, and a later one ends where one part in so many of all tokens has been read: more than half of them start early."""
STARTS_PER_GAP = 2
"""Streams that may be held up for each prompt that starts in a long step."""
OWED_TOKENS = 512
"""So far at most the prompt that has been read for longest goes before others when it has been overtaken."""
FEW_TILES = 4
"""Tiles of products: of fewer, the last one that is not full takes less than a step loses that ends before it."""


class Pace:
    """Budgets of steps, and what was spent beyond the steady pace. quantum: tokens of prefill below which a step gets no cheaper."""

    __slots__ = (
        "_carry_us", "_cost", "_credit_ns", "_credit_us", "_gap_credit", "_gaps_apart", "_gaps_seen", "_n_overtaking", "_n_saved", "_policy", "_quantum", "_rest", "is_apart", "n_gaps",
    )  # fmt: skip

    def __init__(self, policy: Policy, cost: CostModel, quantum: int = 1) -> None:
        self._policy, self._cost, self._quantum = policy, cost, quantum
        self._rest = 0.0
        self._credit_us = policy.burst_ms * 1000
        self._credit_ns = 0
        self._gap_credit = float(policy.long_gaps)
        self._gaps_seen = 0
        self.n_gaps = 0
        """Decode rows launched so far: each ends a gap between two tokens of a stream."""
        self._gaps_apart = -1
        self.is_apart = False
        """The planned step leaves decode rows out."""
        self._n_saved = self._n_overtaking = 0
        self._carry_us = 0.0
        """Time for prefill that was too little for a chunk, and is added to the next step's."""

    def budget_us(self, n_rows: int, now_ns: int, is_burst: bool, short_tokens: int, position: int = 0, context: int = 0, are_short: bool = False) -> float:
        """Time that prefill may add to a step with n_rows decode rows: all of it when nobody decodes; 0: none in this step.

        is_burst: two prompts or more wait. short_tokens: the length of the shortest prompt. position: where the one that goes on stands. context: tokens before the decode rows.
        are_short: the prompts that wait are short ones.
        """
        policy = self._policy
        self.is_apart = False
        if not n_rows:
            self._carry_us = 0.0
            self._gap_credit = max(self._gap_credit, 0.0)  # streams that begin have not been held up
            return math.inf
        base = self._cost.decode_us(n_rows, context)
        us = base * (policy.steady_ratio - 1)
        self._refill(now_ns)
        if is_burst or ((self._credit_us > 0 or self._buys_no_tile(us, position)) and self.is_short(short_tokens)):
            us = max(us, self.burst_us(n_rows, context, are_short))
        if policy.long_delay > 1 and base > 0 and self._buys_no_tile(us, position):
            return self._round_us(us, self._cost.quiet_us(n_rows, context) or base, position)
        return us + self._carry_us

    def burst_us(self, n_rows: int, context: int, are_short: bool) -> float:
        """Time that prompts that come together may add to a step with n_rows decode rows; the parameters are budget_us's."""
        policy, cost = self._policy, self._cost
        ratio = policy.blind_burst_ratio if not cost.knows_contexts else policy.packed_ratio if are_short else policy.burst_ratio
        return max(ratio * cost.quiet_us(n_rows, context), 1000 * policy.burst_step_ms) - cost.decode_us(n_rows, context)

    def _refill(self, now_ns: int) -> None:
        """Burst credit comes back as streams decode at the steady pace."""
        policy = self._policy
        elapsed_us = min(now_ns - self._credit_ns, 1_000_000_000) / 1000
        self._credit_ns = now_ns
        self._credit_us = min(policy.burst_ms * 1000, self._credit_us + elapsed_us * (1 - 1 / policy.steady_ratio))

    def _buys_no_tile(self, us: float, position: int) -> bool:
        """On devices whose products come in tiles: so much time is not worth a launch."""
        return self._quantum > 1 and self._cost.tokens_for(us, position) < self._quantum

    def _round_us(self, us: float, base: float, position: int) -> float:
        """A round is one step with prefill and some without. Decode rows take (1 + rests) * base of it: so much may delay the prompt."""
        policy = self._policy
        if self._rest >= 1:
            self._rest -= 1
            return 0.0
        least_us = self._cost.chunk_us(self.least_tokens(position) + 1, position)
        us = max(us, least_us, (1 + policy.rest_steps) * base / (policy.long_delay - 1))
        self._rest += max(policy.rest_steps, us * (policy.long_delay - 1) / base - 1)
        return us

    def least_tokens(self, position: int) -> int:
        """The smallest chunk that is worth its time, `position` tokens into its prompt."""
        policy = self._policy
        return policy.deep_chunk_tokens if self.is_deep(position) else max(self._quantum, policy.min_chunk_tokens)

    def is_deep(self, position: int) -> bool:
        """Whether a chunk at that position is mostly attention, on devices where that makes a difference."""
        return self._quantum > 1 and position >= self._policy.deep_tokens

    def whole_tiles(self, n: int, n_before: int, position: int) -> int:
        """The chunk of at most n tokens that fills tiles, in a step that has n_before tokens already."""
        is_few = self.is_deep(position) and n_before + n < FEW_TILES * self._quantum
        tile, n_before = (self._policy.deep_chunk_tokens, 0) if is_few else (self._quantum, n_before)
        whole = (n_before + n) // tile * tile - n_before
        return whole if whole > 0 else n

    def saves_up(self, us: float, position: int) -> bool:
        """Whether the time is too little for a chunk at that position: then it is kept for the next step."""
        least = self.least_tokens(position)
        if not us or (self._n_saved < MAX_SAVED and self._cost.tokens_for(us, position) < least):
            self._carry_us = us
            self._n_saved += 1
            return True
        self._carry_us = 0.0
        self._n_saved = 0
        return False

    def is_short(self, n_tokens: int) -> bool:
        """A prompt of that length could be computed within the burst credit."""
        return self._cost.chunk_us(n_tokens, 0) <= self._policy.burst_ms * 1000

    def spent(self, us: float) -> None:
        """Prefill has been planned that takes so long."""
        self._credit_us -= max(0.0, us)

    def may_stall(self, n_rows: int, n_starting: int, is_light: bool = False) -> bool:
        """Whether n_rows streams may wait for one long step in which n_starting prompts are read to their end; if so, that is booked.

        is_light: for a light client's prompt, which may go as far into debt as there is credit to begin with; bursts wait until that is paid.
        """
        policy = self._policy
        self._gap_credit = min(policy.long_gaps, self._gap_credit + policy.long_gap_share * (self.n_gaps - self._gaps_seen))
        self._gaps_seen = self.n_gaps
        if n_rows > STARTS_PER_GAP * n_starting or n_rows > self._gap_credit + is_light * policy.long_gaps:
            return False
        self._gap_credit -= n_rows
        return True

    def leave_rows_out(self) -> None:
        """The planned step reads one prompt by itself, where its tiles would be longer with decode rows. Not twice in a row: these lose a short step each time."""
        if self._quantum > 1 and self.n_gaps > self._gaps_apart:
            self.is_apart = True
            self._gaps_apart = self.n_gaps

    def has_read(self, n_tokens: int, is_first: bool) -> None:
        """So much of a prompt is read. is_first: of the one that has been read for longest."""
        self._n_overtaking = max(0, self._n_overtaking - self._policy.oldest_every * n_tokens) if is_first else self._n_overtaking + n_tokens

    @property
    def owes(self) -> bool:
        """Others have read policy.oldest_every times as much as the prompt that has been read for longest may read now: it goes first, since there may always be another client before it."""
        return self._n_overtaking >= self._policy.oldest_every * OWED_TOKENS

    def part(self, n_waiting: int, n_begun: int) -> int:
        """Tokens after which a step takes no more prompts: of those that come together, n_waiting tokens wait and n_begun were in steps before."""
        first = math.ceil((n_waiting + n_begun) / SPLIT)
        is_cut = 0 < n_begun < first and n_waiting >= self._policy.split_tokens
        return first - n_begun if is_cut else n_waiting
