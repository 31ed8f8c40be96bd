"""Long prompts beside streams: a part of the device reads them while the rest goes on decoding.

A prompt is read aside when that takes longer than what streams put up with at once, and somebody decodes. It starts as others do, in a step of the loop, whose input brings
its tokens and pages; then steps of the part read it, up to its last token, which runs in a step of the loop again and draws. What such a step computed counts when it is done.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import PackError
from .device import PartDevice
from .request import Phase, Request
from .slots import HEAD, ROW

if TYPE_CHECKING:
    from .loop import Engine

WAIT_US = 200


class Reading(NamedTuple):
    """A step of the part on its way."""

    seq: int
    request: Request
    n: int
    launched_ns: int


class Aside:
    """What the part of a device does for one engine; without a part it does nothing."""

    def __init__(self, engine: Engine, part: PartDevice | None) -> None:
        self._engine = engine
        self._part = part
        self.in_flight: deque[Reading] = deque()
        self.n_tokens = 0
        """Tokens read aside so far."""
        self._seq = int(part.done[0]) if part is not None else 0
        self._gives_way = False
        # What saves a slot's states on the way must be done before the part goes on: then one step at a time.
        self._depth = 0 if part is None else 1 if engine.sizes.recurrent_bytes else 1 + part.facts.run_ahead
        self._block = np.zeros((HEAD.size + ROW.size) // 8 + 1, np.uint64)

    @property
    def is_on(self) -> bool:
        """Steps of the loop run on what the part leaves."""
        return self._gives_way

    def holds(self, request: Request) -> bool:
        """Steps on their way read this prompt: its slot and pages must stay."""
        return any(reading.request is request for reading in self.in_flight)

    def turn(self) -> bool:
        """Books what has been read, and goes on. True when something was booked."""
        if self._part is None or not (self.in_flight or self._engine.scheduler.aside):
            return False
        has_landed = self._land()
        engine = self._engine
        if not (engine.slots.decode or engine.masked or engine.drafter.requests):
            for request in [r for r in engine.scheduler.aside if not self.holds(r)]:
                engine.scheduler.take_back(request)
        elif not engine.must_drain:
            while len(self.in_flight) < self._depth and self._launch():
                pass
        if self._gives_way != bool(self.in_flight):
            self._gives_way = not self._gives_way
            engine.device.give_way(self._gives_way)
        return has_landed

    def wait(self) -> None:
        """Waits a moment for the oldest step of the part. Raises: PackError when it hangs."""
        assert self._part is not None
        oldest, engine = self.in_flight[0], self._engine
        if not self._part.wait(oldest.seq, WAIT_US):
            os.sched_yield()
        if engine.clock() - oldest.launched_ns > engine.policy.device_timeout_s * 1e9:
            raise PackError(f"step {oldest.seq} of the device's part has not finished for {engine.policy.device_timeout_s:.0f} s", "the device hangs; see dmesg")

    def _land(self) -> bool:
        assert self._part is not None
        engine, scheduler = self._engine, self._engine.scheduler
        done, n_before = self._part.done[0], len(self.in_flight)
        if self.in_flight and self.in_flight[0].seq > done:
            self._part.wait(self.in_flight[0].seq, 0)  # tells of a step that failed
        while self.in_flight and self.in_flight[0].seq <= done:
            _, request, n, _ = self.in_flight.popleft()
            if request.phase == Phase.ENDED:
                if not self.holds(request):
                    engine.retire(request)
                continue
            self.n_tokens += n
            engine.counters.prefill_tokens += n
            scheduler.book(request, n)
            scheduler.pass_windows()
            if scheduler.saves:
                engine.states.save_planned(scheduler)
                request.aside_seq = engine.launched_seq + 1  # a step that is given after the copies has seen them done
            if request.remaining_tokens == 1:
                scheduler.take_back(request)
        return len(self.in_flight) < n_before

    def _launch(self) -> bool:
        """Gives the part its next step, if a prompt is there whose start the device has seen."""
        assert self._part is not None
        engine, scheduler = self._engine, self._engine.scheduler
        ready = [r for r in scheduler.aside if r.aside_seq <= engine.read_seq and self._left(r) > 0]
        request = min(ready, key=self._order, default=None)
        if request is None:
            return False
        n = min(scheduler.aside_tokens, self._left(request))
        if request.marks:
            n = min(n, request.marks[0] - request.done_tokens)
        if engine.ledger.windows is not None and self._waits_for_windows(request, n):
            return False
        self._seq += 1
        data = self._block.data.cast("B")
        HEAD.pack_into(data, 0, self._seq, n, 1, 0, 0, 0, 0, 0, 0)
        ROW.pack_into(data, HEAD.size, request.slot, n, 0, 0)
        self.in_flight.append(Reading(self._seq, request, n, engine.clock()))
        self._part.step(int(self._block.ctypes.data))
        return True

    def _order(self, request: Request) -> tuple[bool, tuple[float, float]]:
        """Who comes first: as everywhere, but for prompts that have pages of windows ahead of them, which are few."""
        assert request.holding is not None
        is_ahead = len(request.holding.windows) * self._engine.sizes.page_tokens > request.done_tokens
        return not is_ahead, self._engine.scheduler.order(request)

    def _waits_for_windows(self, request: Request, n: int) -> bool:
        """Pages of layers with a window for the next n tokens, and as many more, are brought by a step of the loop: what was on them may still be read, or copied, by steps before that one."""
        engine, holding = self._engine, request.holding
        assert holding is not None
        end = request.n_tokens - 1 - self._left(request) + n
        if len(holding.windows) * engine.sizes.page_tokens >= end:
            return False
        n_new = engine.ledger.reach(holding, min(request.n_tokens - 1, end + engine.scheduler.aside_tokens))
        engine.slots.write_windows(request, n_new)
        request.aside_seq = engine.launched_seq + 1
        return True

    def _left(self, request: Request) -> int:
        """Tokens that no step reads yet, but for the last one."""
        return request.remaining_tokens - 1 - sum(reading.n for reading in self.in_flight if reading.request is request)
