"""The loop: read results, publish, take in, decide, launch. One thread, token ids only.

It never waits for a front and never looks at a token; per-request work happens only where a request comes, ends or needs a page.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns

import numpy as np

from ..cache.pages import PageFault
from ..errors import PackError, UsageError
from ..memory.state import StateSizes
from ..pack.abi import PK_ROW_LENGTH, PK_ROW_NAN, PK_ROW_SCORE, PK_ROW_STOP
from ..wire.messages import BIND, Done, ErrorCode, Kind, Reason, Refused, RefusedCode, Started
from ..wire.port import EnginePort
from .accounts import GROW_PAGES, open_ledger
from .aside import Aside
from .cost import CostModel, chunk_work
from .counters import Counters
from .device import StepDevice
from .drafts import Drafter
from .learning import learn
from .masks import Masking
from .policy import Policy
from .report import miss_of
from .request import NEVER, Phase, Request
from .scheduler import Scheduler
from .shortage import gives_up
from .slots import Chunk, SlotTable, draws_come_first
from .states import StateKeeper
from .step import Step, best_of, with_others
from .timing import hold_until_ns, price_us, waits_for_company
from .vectors import ReadVectors, send_vectors

WAIT_US = 50
"""After so long a wait makes way, for a moment, for whoever was woken on this processor."""
LIFE_CHECK_NS = 100_000_000
CONSIDER_EVERY = 4
"""Steps between two looks at whether guessing tokens would pay."""
RESULT_BYTES = 24


class Engine:
    """Everything of one device's serving but the waiting (process.py) and the reading of records (intake.py)."""

    def __init__(
        self,
        sizes: StateSizes,
        device: StepDevice,
        ports: Sequence[EnginePort],
        policy: Policy | None = None,
        clock: Callable[[], int] = monotonic_ns,
        read_vectors: ReadVectors | None = None,
        cost: CostModel | None = None,
    ) -> None:
        self.sizes = sizes
        self.clock = clock
        self.device = device
        self.ports = list(ports)
        self.policy = policy or Policy()
        self.read_vectors = read_vectors
        self.start: Sequence[dict[str, object]] = ()
        self.experts: Callable[[], dict[str, float]] = dict
        # The vectors of a step lie where the next one puts its own.
        self.run_ahead = device.facts.run_ahead if read_vectors is None else 0
        if sizes.n_results < self.run_ahead + 2:
            raise UsageError(
                f"{self.run_ahead} steps of run-ahead need {self.run_ahead + 2} result blocks, {sizes.n_results} are planned",
                run_ahead=self.run_ahead, n_results=sizes.n_results,
            )  # fmt: skip
        self.slots = SlotTable(sizes)
        self.ledger = open_ledger(sizes, device, self.policy)
        self.states = StateKeeper(self.ledger, device)
        if sizes.n_snapshots:
            self.slots.border_tokens = sizes.page_tokens
        tile = self.policy.tile_tokens if self.run_ahead else 1
        self.scheduler = Scheduler(self.policy, self.ledger, self.slots, self._started, tile, cost)
        self.scheduler.aside_tokens = sizes.part_tokens if device.aside is not None else 0
        self.aside = Aside(self, device.aside)
        self.counters = Counters()
        self.requests: list[dict[int, Request]] = [{} for _ in ports]
        """Open requests by ask id, one dictionary per port."""
        self.masked: list[Request] = []
        """Decoding requests whose every token waits for its mask."""
        self.masking = Masking(self)
        self.drafter = Drafter(
            self, device.facts.has_drafts and (sizes.max_guesses > 0 or not sizes.recurrent_bytes)
        )
        self.in_flight: deque[Step] = deque()
        self.launched_seq = self.read_seq = int(device.done[0])
        self.retiring: deque[tuple[int, Request]] = deque()
        """Ended requests with the last step that may touch their pages."""
        self._free_steps = [Step() for _ in range(self.run_ahead + 2)]
        blocks = np.frombuffer(device.results, np.int32).reshape(sizes.n_results, sizes.max_step_rows, 6)
        self._blocks = [blocks[i] for i in range(sizes.n_results)]
        size = sizes.max_step_rows * RESULT_BYTES
        self._row_bytes = [device.results[i * size : (i + 1) * size] for i in range(sizes.n_results)]
        is_small = self.slots.history.size < 1 << 31
        self._cells = np.zeros(sizes.max_step_rows, np.int32 if is_small else np.int64)
        self._last_block = self._blocks[0][:0]
        self.last_done_ns = self.last_took_ns = 0
        self.hold_until_ns = 0
        """When the next step may be launched; 0: at once."""
        self.must_drain = False
        self.n_ending = 0
        """Requests whose last row is in flight: their slots will be free when it has been read."""
        self._ahead = self.run_ahead
        self.low_pages = min(2 * sizes.n_slots, sizes.n_pages // 16)

    @property
    def is_full(self) -> bool:
        """No step can be launched before one in flight has been read."""
        return len(self.in_flight) > self._ahead

    @property
    def n_open(self) -> int:
        """Requests that have not ended."""
        return sum(len(group) for group in self.requests)

    # ---- results ----

    def read_results(self) -> bool:
        """Takes in every finished step. True when there was one."""
        in_flight = self.in_flight
        if not in_flight:
            return False
        done = self.device.done[0]
        if in_flight[0].seq > done:
            return False
        is_alone = in_flight[0].seq == done
        while in_flight and in_flight[0].seq <= done:
            step = in_flight.popleft()
            self._read(step, is_alone)
            self._free_steps.append(step)
        if self.retiring:
            self._retire()
        return True

    def _read(self, step: Step, is_alone: bool) -> None:
        now = step.done_ns or self.clock()
        seq, n_rows = step.seq, step.n_rows
        self.read_seq = seq
        slots = self.slots
        index = seq % self.sizes.n_results
        block = self._blocks[index][:n_rows]
        if step.n_samples:
            rows = self.masking.spell_out(step, block) if step.sure else self._row_bytes[index][: n_rows * RESULT_BYTES]
            top = best_of(self.device.top, block, index * self.sizes.max_step_rows, self.sizes.max_top) if step.has_top else b""
            for port in self.ports:
                port.send_rows(seq, self.sizes.n_slots, rows, top)
        is_eventful = np.count_nonzero(block[:, 2]) > 0
        drawn = block[: step.n_samples]
        if is_eventful or not step.is_plain:
            drawn = block
            has_token = block[:, 1] >= 0
            if not has_token.all():
                drawn = block[has_token]
        slot, length = drawn[:, 0], drawn[:, 3]
        cell = self._cells[: len(slot)]
        np.multiply(slot, slots.row_stride, out=cell)
        np.add(cell, length, out=cell)
        slots.history_flat[cell] = drawn[:, 1]
        if step.has_singles or self.masked or self.drafter.requests:
            slots.read_length[slot] = length
        self._last_block = block if step.n_decode else with_others(self._last_block, block)
        if step.drafts:
            self.drafter.read(step)
        self.counters.output_tokens += len(slot)
        if step.firsts:
            if self.read_vectors is not None:
                send_vectors(self.read_vectors, step.firsts, self.ports)
            for request in step.firsts:
                request.first_ns = request.first_ns or now
            step.firsts = None
        self.last_took_ns = now - max(step.launched_ns, self.last_done_ns) - step.waited_ns
        learn(self, step, now, is_alone)
        self.last_done_ns = now
        if is_eventful:
            for i in np.flatnonzero(block[:, 2]).tolist():
                self._row_event(*block[i, :4].tolist())

    def _row_event(self, slot: int, token: int, flags: int, length: int) -> None:
        request = self.slots.request_of[slot]
        self.counters.output_tokens -= flags == PK_ROW_SCORE
        if request is None or not flags & (PK_ROW_STOP | PK_ROW_LENGTH | PK_ROW_NAN) or request.end_length >= 0:
            return
        request.end_length = length
        if flags & PK_ROW_NAN and request.holding is not None:
            request.is_poisoned = True
            self.ledger.distrust(request.holding)
        if request.phase == Phase.ENDED:
            return
        if flags & PK_ROW_NAN:
            self.end(request, Reason.ERROR, ErrorCode.NAN)
        else:
            self.end(request, Reason.STOP if flags & PK_ROW_STOP else Reason.LENGTH)

    # ---- ends ----

    def end(self, request: Request, reason: Reason, error: ErrorCode = ErrorCode.NONE) -> None:
        """Ends a request in whatever phase; its slot and pages follow when no step in flight has them."""
        now = self.clock()
        slot = request.slot
        is_told = request.end_length >= 0 and not request.is_poisoned
        n_output = request.end_length - request.prompt_tokens if is_told else self.given_tokens(request)
        started, first = request.started_ns, request.first_ns
        self._say(
            request,
            Kind.DONE,
            Done(
                request.ask_id, reason, error, request.prompt_tokens, request.cached_tokens, n_output, request.n_preempted,
                request.queued_ns if started else now - request.received_ns,
                (first or now) - started if started else 0, now - first if first else 0, request.guess.drafted, request.guess.accepted,
            ).encode(),
        )  # fmt: skip
        self.counters.ended[reason] += 1
        self.n_ending -= request.last_seq != NEVER
        self.scheduler.queue.left(now)
        self._forget(request)
        if slot >= 0:
            self._unlist(request)
            self.slots.leave(slot)
            if not self.aside.holds(request):
                self.retire(request)

    def given_tokens(self, request: Request) -> int:
        """Tokens of the answer that have been read so far.

        A standing row is in every step, so the last block that was read has it, or none has; rows that wait for masks are noted.
        """
        known, slot = request.n_tokens, request.slot
        if slot >= 0 and self.read_seq >= request.first_seq:
            block = self._last_block
            found = block[(block[:, 0] == slot) & (block[:, 1] >= 0), 3].tolist()
            known = max(known, int(self.slots.read_length[slot]), *found)
        given: int = known - request.prompt_tokens
        return given

    def refuse(self, request: Request, code: RefusedCode, need: int, have: int) -> None:
        """Ends a waiting request that has not started."""
        retry = self.scheduler.queue.retry_after_ms()
        self._say(request, Kind.REFUSED, Refused(request.ask_id, code, retry, need, have).encode())
        self.counters.refused[code] += 1
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.scheduler.queue.close(request.client)
        request.move(Phase.ENDED)
        request.masks.clear()
        request.sure.clear()
        del self.requests[request.port][request.ask_id]

    def _say(self, request: Request, kind: Kind, payload: bytes) -> None:
        self.ports[request.port].send(kind, payload)

    def retire(self, request: Request) -> None:
        """An ended request leaves as soon as the steps in flight that have a row of it are read."""
        if request.last_seq <= self.read_seq:
            self.retiring.appendleft((request.last_seq, request))
        else:
            self.retiring.append((self.launched_seq, request))
        if self.retiring[0][0] <= self.read_seq:
            self._retire()

    def _retire(self) -> None:
        """Frees slots and pages of ended requests that no step in flight can touch; what they computed stays known."""
        retiring, read = self.retiring, self.read_seq
        while retiring and retiring[0][0] <= read:
            request = retiring.popleft()[1]
            holding, slot = request.holding, request.slot
            assert holding is not None
            computed, kept = b"", list[tuple[int, int]]()
            if request.done_tokens >= request.n_tokens and not request.is_poisoned:
                n = request.end_length - 1 if request.end_length >= 0 else self.slots.launched(slot)
                first, full = holding.n_settled * self.sizes.page_tokens, n // self.sizes.page_tokens * self.sizes.page_tokens
                if full > first:
                    computed = self.slots.tokens_of(request, first, full)
                kept = self.states.let_go(request, n)
            elif request.kept:
                self.states.let_go(request, -1)
            self.ledger.close(holding, computed, kept)
            request.holding = None
            request.slot = -1
            self.slots.give(slot)
            self.scheduler.freed()

    # ---- launching ----

    def launch(self) -> bool:
        """Decides and launches one step, if one may be in flight and there is something to do."""
        scheduler, slots = self.scheduler, self.slots
        masking = self.masking
        if masking.open is not None:
            if not masking.finish():
                return False
            if not self.run_ahead:
                return True
        n_in_flight = len(self.in_flight)
        has_prefill = scheduler.has_prefill
        drafter, is_reading = self.drafter, has_prefill or self.aside.is_on
        if drafter.is_on and not is_reading and (self.launched_seq % CONSIDER_EVERY == 0 or drafter.requests):
            drafter.consider()
        self._ahead = (
            0 if drafter.requests else min(1, self.run_ahead) if has_prefill or self.masked else self.run_ahead
        )
        if n_in_flight > self._ahead or ((self.must_drain or masking.late) and n_in_flight):
            return False
        self.must_drain = False
        scheduler.pass_windows()
        if masking.late:
            for request in masking.restarts():
                self._preempt(request)
        if scheduler.queue.n and (victim := scheduler.yielder()) is not None:
            if n_in_flight:
                self.must_drain = True
                return False
            self._preempt(victim)
        if not self._make_way():
            self.must_drain = True
            return False
        drafts = drafter.rows(is_reading) if drafter.requests else ()
        n_decode, n_guesses = len(slots.decode) + len(drafts), sum([n - 1 for _, n in drafts])
        held = masking.rows(n_decode, n_guesses, has_prefill) if self.masked else ()
        n_decode += len(held)
        n_more = n_guesses + sum([n - 1 for _, n in held])
        now = self.clock()
        if self.run_ahead:
            self.hold_until_ns = hold_until_ns(self, now) if has_prefill or n_in_flight else 0
            if self.hold_until_ns:
                return False
            has_prefill = has_prefill and not waits_for_company(self, now)
        chunks = scheduler.plan(n_decode, now, n_more) if has_prefill else ()
        if not n_decode and not chunks:
            return gives_up(self)
        is_apart = bool(chunks) and scheduler.pace.is_apart and not (held or drafts)
        n_decode = 0 if is_apart else n_decode
        step = self._free_steps.pop()
        self.launched_seq += 1
        step.seq = self.launched_seq
        n_tokens, step.n_rows, step.n_samples = slots.compose(step.seq, chunks, [(r.slot, n) for r, n in held], drafts, is_apart)
        step.n_decode, step.n_more, step.n_prefill, step.context = n_decode, n_more, n_tokens - n_decode - n_more, 0 if is_apart else slots.context
        scheduler.pace.n_gaps += n_decode
        step.is_plain = step.n_samples <= n_decode + len(chunks) and not drafts and (len(chunks) < 2 or draws_come_first(chunks))
        step.drafts = drafts
        step.has_top = slots.n_top > 0
        step.has_singles = bool(held or drafts)
        step.done_ns = step.half_ns = step.waited_ns = 0
        step.is_beside = self.aside.is_on
        step.work = 0.0
        step.n_brought, scheduler.n_brought = scheduler.n_brought, 0
        step.launched_ns = now
        self.in_flight.append(step)
        if drafts and not self.run_ahead:
            self.publish()  # fronts walk guesses while they run
        self.device.step(slots.address)
        if not self.run_ahead:
            step.done_ns = self.clock()
        step.price_us = price_us(scheduler.cost, step, chunks)
        if held or chunks or drafts:
            masking.begin(step, held, chunks)
        if drafts:
            drafter.launched(drafts, step.seq)
        if chunks:
            self._after_chunks(step, chunks)
            if scheduler.saves:
                self.states.save_planned(scheduler)
        self.ledger.free_ahead(self.low_pages, GROW_PAGES)
        return True

    def _after_chunks(self, step: Step, chunks: Sequence[Chunk]) -> None:
        """Books the chunks of a launched step; those that drew a token decode from the next step on."""
        firsts = []
        for request, n, samples in chunks:
            step.work += chunk_work(n, request.done_tokens - n)
            if samples:
                firsts.append(request)
                request.first_seq = step.seq
                self.slots.join(request, request.n_tokens, not request.use_mask)
                if request.use_mask:
                    self.masked.append(request)
        step.firsts = firsts
        self.counters.prefill_tokens += step.n_prefill

    def _make_way(self) -> bool:
        """Pages for the rows that need one, and no row for those at their length. False: steps in flight must be read first."""
        slots = self.slots
        due = slots.due()
        if self.masked or self.drafter.requests:
            due += [r.slot for r in (*self.masked, *self.drafter.requests) if slots.is_spent(r.slot)]
        for slot in due:
            request = slots.request_of[slot]
            if request is None or request.phase != Phase.DECODE:
                continue
            n = slots.launched(slot)
            if n + 1 >= request.max_length:
                slots.leave(slot)
                self._unlist(request)
                request.last_seq = self.launched_seq
                self.n_ending += 1
                continue
            assert request.holding is not None
            if slots.border_tokens:
                self.states.keep(request, n)
                if n < len(request.holding.pages) * self.sizes.page_tokens:
                    slots.mark(request, n)
                    continue
            n_pages = min(slots.pages_ahead, self.ledger.pages_for(request.max_length - 1) - len(request.holding.pages))
            n_new = self.ledger.add_pages(request.holding, n_pages)
            while not n_new:
                if self.in_flight or self.aside.in_flight:
                    return False
                victim = self.scheduler.victim()
                if victim is None and self.ledger.pool.is_short:
                    self.end(request, Reason.ERROR, ErrorCode.MEMORY)
                    break
                if victim is None:
                    raise PageFault("one request alone has run out of pages", pages=self.ledger.pool.n_usable)
                self._preempt(victim)
                if victim is request:
                    break
                n_new = self.ledger.add_pages(request.holding, 1)
            if n_new:
                slots.write_pages(request, n_new)
                if self.ledger.windows is not None:
                    self.ledger.pass_by(request.holding, n)
                    slots.write_windows(request, self.ledger.reach(request.holding, len(request.holding.pages) * self.sizes.page_tokens))
                slots.mark(request, n)
        return True

    def _unlist(self, request: Request) -> None:
        """It is no longer one of those without a standing row."""
        if request.use_mask and request in self.masked:
            self.masked.remove(request)
        self.drafter.remove(request)

    def _preempt(self, victim: Request) -> None:
        self._unlist(victim)
        self.scheduler.preempt(victim)
        self._say(victim, Kind.BIND, BIND.pack(victim.ask_id, -1, 0))
        self.counters.preempted += 1

    def _started(self, request: Request, now_ns: int) -> None:
        """A request has got its slot."""
        self.states.start(request)
        if request.started_ns:
            self._say(request, Kind.BIND, BIND.pack(request.ask_id, request.slot, 0))
        else:
            request.started_ns = now_ns
            request.queued_ns = now_ns - request.received_ns
            self.counters.begun(request.prompt_tokens, request.cached_tokens)
            started = Started(
                request.ask_id, request.cached_tokens, request.prompt_tokens, request.queued_ns, request.slot, *miss_of(self.ledger, request)
            )
            self._say(request, Kind.STARTED, started.encode())

    # ---- the whole ----

    def wait(self) -> None:
        """Waits for the oldest step in flight, or until the next may be launched. Raises: PackError when it hangs."""
        oldest = self.in_flight[0]
        if self.hold_until_ns and not self.is_full:
            self.device.wait(oldest.seq, min(WAIT_US, max(1, (self.hold_until_ns - self.clock()) // 1000)))
            os.sched_yield()
            return
        limit = oldest.launched_ns + int(self.policy.device_timeout_s * 1e9)
        while not self.device.wait(oldest.seq, WAIT_US):
            os.sched_yield()
            if self.clock() > limit:
                raise PackError(f"step {oldest.seq} has not finished for {self.policy.device_timeout_s:.0f} s", "the device hangs; see dmesg")

    def publish(self) -> None:
        """Sends what has been said."""
        for port in self.ports:
            port.publish()

    def fail(self) -> None:
        """Ends every request because the device has failed, and says so."""
        for group in self.requests:
            for request in list(group.values()):
                self.end(request, Reason.ERROR, ErrorCode.DEVICE)
        self.publish()

    def check(self) -> None:
        """No page or slot is lost or shared wrongly. For tests. Raises: PageFault."""
        held = [r.holding for r in self.slots.request_of if r is not None and r.holding is not None]
        self.ledger.check(held)
        self.states.check(r for r in self.slots.request_of if r is not None)
        n_held = sum(r is not None for r in self.slots.request_of)
        if n_held + self.slots.n_free != self.sizes.n_slots:
            raise PageFault(f"{n_held} slots are held and {self.slots.n_free} free of {self.sizes.n_slots}", pages=[])
        if self.slots.context != (n := sum(map(self.slots.launched, self.slots.decode))):
            raise PageFault(f"decode rows have {n} tokens, not {self.slots.context}", pages=[])
        if self.n_ending != (n := sum(r.last_seq != NEVER for group in self.requests for r in group.values())):
            raise PageFault(f"{n} requests have their last row in flight, not {self.n_ending}", pages=[])
