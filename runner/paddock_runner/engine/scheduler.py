"""What runs next: which requests start, which prefill goes on and how far, who has to make room.

A function of queue, pages, slots and the time budget; it reads no clock, talks to no device and sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..cache.ledger import Ledger
from ..cache.prefix import Node
from .cost import CostModel
from .fetches import begin_fetch, is_fetching, let_go
from .pace import OWED_TOKENS, STARTS_PER_GAP, Pace
from .policy import Policy
from .queue import WaitQueue
from .request import NEVER, Phase, Request
from .room import LEAST_SLOTS, victim, yielder
from .sharing import awake, common_tokens, must_wait
from .slots import Chunk, SlotTable

MAX_LONG_STEPS = 2
"""Prompts that could be read in so many of the largest steps may hold up those who decode: a longer queue takes a while anyway."""
MAX_ASIDE = 2
"""Prompts of a client, and a quarter of the slots in all, that are read aside or ready to be."""
MAX_LOOKS = 16
"""Waiting requests that are compared with one that starts."""


class Scheduler:
    """Decides one step at a time. `on_start` hears of every request that gets a slot, before its first chunk."""

    __slots__ = (
        "_advanced", "_charged_seq", "_guest", "_is_stuck", "_ledger", "_lowest", "_n_started", "_policy", "_read_seq", "_slots", "aside",
        "aside_tokens", "begun_tokens", "cost", "held", "n_brought", "on_start", "pace", "preempted", "prefilling", "queue", "saves",
    )  # fmt: skip

    def __init__(
        self, policy: Policy, ledger: Ledger, slots: SlotTable, on_start: Callable[[Request, int], None], quantum: int = 1, cost: CostModel | None = None
    ) -> None:
        self._policy = policy
        self._ledger = ledger
        self._slots = slots
        self.on_start = on_start
        self.queue = WaitQueue(policy)
        self.cost = cost or CostModel()
        self.pace = Pace(policy, self.cost, quantum)
        self.prefilling: list[Request] = []
        self.aside: list[Request] = []
        """Prompts that a part of the device reads beside the steps."""
        self.aside_tokens = 0
        """Tokens of its steps; 0: there is no such part. The loop sets it."""
        self.held: list[Request] = []
        """Taken from the queue, waiting until another has computed what they share."""
        self.preempted: list[Request] = []
        """Had to make room; start again before anyone new, oldest first."""
        self.saves: list[tuple[Request, Node, int]] = []
        """States to be saved when the planned step has run: whose slot's, the node that ends there, and the place. The loop empties it."""
        self._read_seq = 0
        self.begun_tokens = 0
        """Tokens of prefill in the last steps, one after the other: prompts that come meanwhile came with those."""
        self.n_brought = 0
        """Pages that came from host memory with the planned step. The loop reads and resets it."""
        self._advanced: list[Request] = []
        """Whose prompts the last planned step has read further."""
        self._is_stuck = False
        self._guest: Request | None = None
        self._charged_seq = 0
        self._n_started = self._lowest = 0

    @property
    def has_prefill(self) -> bool:
        """There is something to start or to go on with."""
        return bool(self.prefilling or self.queue.n or self.held or self.preempted)

    @property
    def n_waiting(self) -> int:
        """Requests without a slot."""
        return self.queue.n + len(self.held) + len(self.preempted)

    @property
    def stuck(self) -> Request | None:
        """Who is next and has found too few pages, since something was freed last."""
        return None if not self._is_stuck else self.preempted[0] if self.preempted else self.queue.head()

    def freed(self) -> None:
        """Pages, slots or requests have come or gone: what did not fit may fit now."""
        self._is_stuck = False

    # ---- one step ----

    def pass_windows(self) -> None:
        """The planned step was given: what the next one does not see of prompts, in layers with a window, is given back."""
        for request in self._advanced:
            if request.holding is not None and request.done_tokens:
                self._ledger.pass_by(request.holding, request.done_tokens)
        self._advanced.clear()

    def plan(self, n_rows: int, now_ns: int, n_more: int = 0) -> list[Chunk]:
        """Prefill chunks for a step that already has n_rows decode rows, of n_more tokens more than rows. Admits as it goes.

        A request admitted here shares pages that an earlier chunk of the same step computes: the pack writes all KV of a layer
        before it reads any.
        """
        if not self.prefilling and not self.held and (self._is_stuck or not self._slots.n_free):
            return []
        sizes = self._slots.sizes
        if self._slots.seq != self._read_seq or self._slots.n_free == sizes.n_slots:
            self.begun_tokens = 0
        most = self._most_tokens(n_rows + n_more)
        tokens_left = most - n_rows - n_more
        rows_left = sizes.max_step_rows - n_rows
        us_left, part = self._budget(n_rows, tokens_left, now_ns)
        if us_left != math.inf and self.pace.saves_up(us_left, self.prefilling[0].done_tokens if self.prefilling else 0):
            return []
        us_all = us_left
        self._wake_held(now_ns)
        if self.queue.is_contested:
            self.charge_decoding()
        chunks: list[Chunk] = []
        skipped: set[int] = set()
        while tokens_left > 0 and rows_left > 0:
            if chunks and us_left != math.inf and self.cost.tokens_for(us_left, 0) < self._policy.min_chunk_tokens:
                break
            request = self._next(skipped, now_ns, n_rows)
            if request is None:
                break
            skipped.add(request.slot)
            if self._goes_aside(request, n_rows):
                self.prefilling.remove(request)
                request.aside_seq = self._slots.seq + 1
                self.aside.append(request)
                continue
            if request.holding is not None and request.holding.arrives >= 0:
                us_left -= self._bring(request, us_left)
                if request.holding.arrives >= 0:
                    continue
            unscored = request.unscored_tokens
            is_first = request is self.prefilling[0]
            room = min(tokens_left, OWED_TOKENS) if is_first and self.pace.owes and not self._policy.whole_prompts else tokens_left
            n = self._chunk_tokens(request, min(room, rows_left, unscored) if unscored else room, us_left, most - tokens_left)
            if n <= 0:
                continue
            self.pace.has_read(n, is_first)
            us_left -= self.cost.chunk_us(n, request.done_tokens)
            self.begun_tokens += n
            self._read_seq = self._slots.seq + 1
            tokens_left -= n
            rows_left -= n if unscored else 1
            chunks.append((request, n, self.book(request, n)))
            part -= n
            if part <= 0:
                break
        if us_all != math.inf:
            self.pace.spent(us_all - us_left)
        return chunks

    def _most_tokens(self, n_decode: int) -> int:
        """Of a step with so many tokens of decode rows. While a prompt is read aside none is so large that it would wait for the part, unless rows leave no room for others' prompts."""
        sizes = self._slots.sizes
        is_less = self.aside and 0 < sizes.beside_tokens < sizes.max_step_tokens and 2 * n_decode <= sizes.beside_tokens
        return sizes.beside_tokens if is_less else sizes.max_step_tokens

    def _goes_aside(self, request: Request, n_rows: int) -> bool:
        """Beside streams, a prompt that would hold them up for longer than they put up with at once is read by the device's part: all but its last token, however long that takes."""
        if not self.aside_tokens or not n_rows or request.unscored_tokens or request.is_coming:
            return False
        n = request.remaining_tokens if request.phase != Phase.WAITING else request.n_tokens - self._ledger.cached(request.tokens, request.salt)
        return n > 1 and self.cost.chunk_us(n, request.n_tokens - n) > self._policy.burst_ms * 1000

    def _waits_for_part(self, request: Request, n_rows: int) -> bool:
        """Enough prompts have slots while the part reads one of them, of its client or in all: it waits for one of those, and others may overtake it."""
        if len(self.aside) < MAX_ASIDE or not self._goes_aside(request, n_rows):
            return False
        own = [other for other in self.aside if other.client == request.client]
        group = own if len(own) >= MAX_ASIDE else self.aside if len(self.aside) >= max(MAX_ASIDE, self._slots.sizes.n_slots // 4) else []
        if not group:
            return False
        request.wait_for, request.wait_tokens = min(group, key=self.order), NEVER
        return True

    def take_back(self, request: Request) -> None:
        """What is left of a prompt that was read aside is read as others are."""
        self.aside.remove(request)
        self.prefilling.append(request)
        self.freed()

    def _bring(self, request: Request, us_left: float) -> float:
        """Brings pages of a request from host memory so that those who decode are not held up: as many as there is time for, or beside the steps; what it takes of this one."""
        holding, tiers = request.holding, self._ledger.tree.tiers
        assert holding is not None and tiers is not None
        n = self._ledger.bring(holding, request.tokens, tiers.due(len(holding.below), us_left))
        self.n_brought += n
        if n:
            holding.arrives = tiers.given
        if not holding.below and (us_left == math.inf or tiers.has_made(holding.arrives)):
            holding.arrives = -1  # before that a step with the request would wait, and hold up the others
        return 0.0 if tiers.is_beside else tiers.us("host", n)

    def _chunk_tokens(self, request: Request, tokens_left: int, us_left: float, n_before: int) -> int:
        """How far this prefill goes in this step, which has n_before tokens already; 0: it waits for a mask.

        Ends at page borders, except at the prompt's end, and so that the step's tokens fill the device's tiles.
        """
        remaining = request.remaining_tokens
        if request.use_mask and not request.has_mask(request.n_tokens - request.prompt_tokens):
            remaining -= 1
        if self._policy.whole_prompts:
            return remaining if remaining <= tokens_left else 0
        if request.marks:
            remaining = min(remaining, request.marks[0] - request.done_tokens)
        n = min(remaining, tokens_left)
        if us_left != math.inf:
            affordable = self.cost.tokens_for(us_left, request.done_tokens)
            n = min(n, max(affordable, self.pace.least_tokens(request.done_tokens)))
        if n < request.remaining_tokens:
            n = self.pace.whole_tiles(n, n_before, request.done_tokens)
            page_tokens = self._slots.sizes.page_tokens
            to_border = (request.done_tokens + n) // page_tokens * page_tokens - request.done_tokens
            n = to_border if to_border > 0 else n
        return n

    def book(self, request: Request, n: int) -> bool:
        """Books a chunk. True when it is the last, which draws a token."""
        request.done_tokens += n
        if self._ledger.windows is not None and request.holding is not None:
            self._advanced.append(request)
            if n_new := self._ledger.reach(request.holding, request.done_tokens):
                self._slots.write_windows(request, n_new)
        self._charge(request, request.done_tokens)
        self._settle(request, request.done_tokens)
        if self._ledger.states is not None:
            self._save(request, n)
        if request.done_tokens < request.n_tokens:
            return False
        request.is_scored = False
        self.prefilling.remove(request)
        request.move(Phase.DECODE)
        return True

    def _settle(self, request: Request, n_tokens: int) -> None:
        holding, page_bytes = request.holding, 4 * self._ledger.page_tokens
        assert holding is not None
        if holding.is_apart:
            return
        first, end = holding.n_settled * page_bytes, 4 * n_tokens // page_bytes * page_bytes
        if end > first:
            self._ledger.settle(holding, request.tokens[first:end])

    # ---- recurrent states ----

    def _mark(self, request: Request) -> None:
        """Where this prefill saves its states: where it leaves what is known, where others in the queue leave it, and at its last full page."""
        holding, page_tokens, share = request.holding, self._ledger.page_tokens, self._policy.share_tokens
        assert holding is not None
        done, n = request.done_tokens, request.n_tokens
        found = {holding.known_pages * page_tokens, n // page_tokens * page_tokens if n - done >= share else 0}
        for other in self.queue.waiting()[:MAX_LOOKS]:
            if other is not request and other.salt == request.salt:
                found.add(common_tokens(request, other) // page_tokens * page_tokens)
        request.marks = sorted(at for at in found if done + min(share, page_tokens) <= at <= n)

    def _save(self, request: Request, n: int) -> None:
        """Plans to save the states after a chunk of n tokens, where that was marked or is due."""
        states, holding, at = self._ledger.states, request.holding, request.done_tokens
        assert states is not None and holding is not None
        is_marked = False
        while request.marks and request.marks[0] <= at:
            is_marked |= request.marks.pop(0) == at
        every = self._policy.state_every_tokens
        if holding.is_apart or at % self._ledger.page_tokens or not (is_marked or at // every > (at - n) // every):
            return
        place = states.take()
        if place >= 0:
            self.saves.append((request, holding.node, place))

    # ---- who is next ----

    def _next(self, skipped: set[int], now_ns: int, n_rows: int) -> Request | None:
        """The running prefill or new request that goes next in this step; a new one is started."""
        if not skipped and self.prefilling and self.pace.owes:
            return self.prefilling[0]
        best, best_order = None, None
        for request in self.prefilling:
            if request.slot not in skipped:
                order = self.order(request)
                if best_order is None or order < best_order:
                    best, best_order = request, order
        while not self._is_stuck and self._slots.n_free:
            head = self.queue.head()
            if self.preempted and (head is None or head is not self._guest):
                request = self.preempted[0]
                if not self._start(request, now_ns):
                    break
                self.preempted.pop(0)
                return request
            if head is None or (best_order is not None and best_order <= self.order(head)):
                break
            if self._must_wait(head, n_rows) or begin_fetch(head, self._ledger, self.cost.reading_us, now_ns) or self._waits_for_part(head, n_rows):
                self.queue.drop(head)
                self.held.append(head)
                continue
            if not self._start(head, now_ns):
                break
            self.queue.take(head, now_ns)
            self._guest = None
            return head
        return best

    def order(self, request: Request) -> tuple[float, float]:
        """Who comes first: smaller ones."""
        age = request.arrival_ns / 1e6 * self._policy.ageing_tokens_per_ms
        key = request.key if request.phase == Phase.WAITING else request.remaining_tokens + age
        return self.queue.rank(request), key

    def _start(self, request: Request, now_ns: int) -> bool:
        """Gives the request pages and a slot, if they are there."""
        n_active = self._slots.sizes.n_slots - self._slots.n_free
        holding = self._ledger.open(request.tokens, request.salt, n_active)
        if holding is not None:
            request.done_tokens = holding.n_known * self._ledger.page_tokens
            if not self._slots.has_room(request, len(holding.pages)):
                self._ledger.close(holding)
                request.done_tokens = 0
                return False
        else:
            self._is_stuck = True
            return False
        request.holding = holding
        if request.fetch is not None:
            holding.arrives = max(holding.arrives, request.fetch.given)
            let_go(request)
        self._slots.take(request)
        request.move(Phase.PREFILL)
        if not request.order:
            self._n_started += 1
            self._lowest = min(self._lowest, request.priority)
            request.order = self._n_started
            request.cached_tokens = request.charged_tokens = request.done_tokens
        self.prefilling.append(request)
        if self._ledger.states is not None:
            self._mark(request)
        self.on_start(request, now_ns)
        self._slots.start(request)
        return True

    # ---- what others compute ----

    def _must_wait(self, request: Request, n_rows: int) -> bool:
        """Of prompts that wait for the part, whose turn may be far, only who is read by it as well waits for more than the next one."""
        aside = self.aside
        if len(aside) > 1 and not self._goes_aside(request, n_rows):
            aside = [min(aside, key=self.order)]
        return must_wait(request, [*self.prefilling, *aside], self.saves, self._ledger, self._policy.share_tokens)

    def _wake_held(self, now_ns: int) -> None:
        """Those who need not wait for another any more go back to the queue, at their old place."""
        if not self.held:
            return
        self.held, back = awake(self.held, lambda request: is_fetching(request, self._ledger, self.cost.reading_us, now_ns))
        for request in back:
            request.wait_for, request.wait_tokens = None, 0
            self.queue.put_back(request, self._ledger.cached(request.tokens, request.salt))
            self._is_stuck = False

    # ---- time ----

    def _budget(self, n_rows: int, tokens_left: int, now_ns: int) -> tuple[float, int]:
        """Time that prefill may add to this step, and tokens after which no other prompt is taken."""
        running, queue = self.prefilling, self.queue
        n_prompts = len(running) + (min(self.n_waiting, self._slots.n_free) if self._may_start else 0)
        position = running[0].done_tokens if running else 0
        n_tokens = sum([r.remaining_tokens for r in running]) + queue.uncached_tokens
        are_short = n_prompts >= 2 and n_tokens <= self._policy.packed_tokens * (len(running) + queue.n)
        us = self.pace.budget_us(n_rows, now_ns, n_prompts >= 2, self._shortest() if n_prompts < 2 else 0, position, self._slots.context, are_short)
        if us != math.inf and queue.is_contested and (light := self._light()):
            # It is read by itself: the others' prompts and rows would make its step longer.
            is_little = self.cost.chunk_us(light, position) <= us
            if is_little or self.pace.may_stall(n_rows, n_rows, True):
                self.pace.leave_rows_out()
                return us if is_little else math.inf, light
            return us, light
        if us != math.inf and n_prompts < 2:
            return us, tokens_left
        part = self.pace.part(n_tokens, self.begun_tokens)
        if us != math.inf and n_tokens <= MAX_LONG_STEPS * tokens_left and self.cost.chunk_us(min(n_tokens, part), 0) > us:
            n_step = min(n_tokens, part, tokens_left)
            if self.pace.may_stall(n_rows, n_prompts * n_step // n_tokens):
                us = math.inf
        return us, part if us == math.inf else tokens_left

    def fills_step(self, n_rows: int) -> bool:
        """Whether those who wait need no company: a step with n_rows decode rows has no room for one short prompt more."""
        queue, n = self.queue, min(self.queue.n, self._slots.n_free)
        if n < 2 or n_rows <= STARTS_PER_GAP * n or queue.uncached_tokens > self._policy.packed_tokens * queue.n:
            return False
        return self.cost.chunk_us(queue.uncached_tokens * (n + 1) // queue.n, 0) > self.pace.burst_us(n_rows, self._slots.context, True)

    def _light(self) -> int:
        """Tokens left of the prompt of a client with few requests beside one with many, if it is its turn; 0: none."""
        first: Request | None = min(self.prefilling, key=self.order, default=None)
        head = self.queue.head() if self._may_start else None
        if head is not None and (first is None or self.order(head) < self.order(first)):
            return head.uncached_tokens if self.queue.is_light(head.client) else 0
        return first.remaining_tokens if first is not None and self.queue.is_light(first.client) else 0

    @property
    def _may_start(self) -> bool:
        """There is a slot for somebody who waits, and as far as is known pages as well."""
        return self._slots.n_free > 0 and not self._is_stuck

    def _shortest(self) -> int:
        """Tokens of the shortest prompt that is read, or could be."""
        n = min((r.n_tokens - r.cached_tokens for r in self.prefilling), default=1 << 31)
        head = self.queue.head() if self._may_start else None
        return n if head is None else min(n, head.uncached_tokens)

    def charge_decoding(self) -> None:
        """Charges clients for the answers that grew since the last look."""
        slots = self._slots
        if self._charged_seq == slots.seq:
            return
        self._charged_seq = slots.seq
        for request in slots.request_of:
            if request is not None and request.phase == Phase.DECODE:
                self._charge(request, slots.launched(request.slot))

    def _charge(self, request: Request, n_tokens: int) -> None:
        """What a preemption makes necessary again is free."""
        if n_tokens > request.charged_tokens:
            self.queue.charge(request.client, n_tokens - request.charged_tokens)
            request.charged_tokens = n_tokens

    # ---- making room ----

    def victim(self) -> Request | None:
        """Who makes way when pages have run out; None: there is only one."""
        return victim([r for r in self._slots.request_of if r is not None and r.phase in (Phase.PREFILL, Phase.DECODE)], self.queue)

    @property
    def could_yield(self) -> bool:
        """Whether a client that comes now could get a slot though all are taken: another has many of them."""
        return max((c.n_open - c.n_waiting for c in self.queue.busy.values()), default=0) >= LEAST_SLOTS and not self._policy.whole_prompts

    def yielder(self) -> Request | None:
        """Who makes way for the queue's head, when all slots or all pages are taken. Pages only as far as they are its client's part."""
        is_full = not self._slots.n_free
        if not (is_full or self._is_stuck) or not (self.queue.is_contested or self.queue.highest > self._lowest) or self._policy.whole_prompts:
            return None
        head = self.queue.head()
        if head is None or not (is_full or self._ledger.pages_for(head.uncached_tokens) <= self._ledger.pool.n_usable // len(self.queue.busy)):
            return None
        decoding = [r for r in self._slots.request_of if r is not None and r.phase == Phase.DECODE]
        has_none = not any(r.client == head.client for r in (*self.prefilling, *self.aside, *self.preempted))
        found = yielder(head, decoding, self.queue, is_full, has_none)
        self._guest = head if found is not None else self._guest
        return found

    def preempt(self, request: Request) -> None:
        """Takes slot and pages from a running request; what it computed stays known as long as nobody needs the room.

        The caller has made sure that no step is in flight.
        """
        slots, slot, holding = self._slots, request.slot, request.holding
        assert holding is not None
        computed, kept = b"", list[tuple[int, int]]()
        if request.phase == Phase.DECODE:
            n, page_tokens = slots.launched(slot), self._ledger.page_tokens
            request.tokens = slots.tokens_of(request, 0, n + 1)
            request.n_tokens = n + 1
            computed = request.tokens[4 * holding.n_settled * page_tokens : 4 * (n // page_tokens * page_tokens)]
            kept = [(at // page_tokens, place) for at, place in request.kept]
            request.kept.clear()
        else:
            (self.aside if request in self.aside else self.prefilling).remove(request)
        slots.leave(slot)
        slots.give(slot)
        self._ledger.close(holding, computed, kept)
        request.holding = None
        request.slot = -1
        request.done_tokens = 0
        request.n_preempted += 1
        request.move(Phase.WAITING)
        self.preempted.append(request)
        self.preempted.sort(key=lambda r: r.order)
        self.freed()

    def remove(self, request: Request) -> None:
        """Takes a request out of every list here. Its slot and pages are the caller's business."""
        self.queue.drop(request)
        let_go(request)
        if request is self._guest:
            self._guest = None
        for group in (self.held, self.preempted, self.prefilling, self.aside):
            if request in group:
                group.remove(request)
        self.freed()
