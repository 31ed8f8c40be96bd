"""Requests whose every token waits for a mask from the front: their rows run before the mask is there, and draw when it has come.

A step with such rows is given in two halves (pk_step, pk_finish). While the first half runs, which is nearly all of it, the front makes the
masks of the tokens that the step before drew. A mask that is late is waited for as long as it would cost the other rows little; then its row
is left out, which costs it that run, and never draws without. A request that was late waits for its mask before it runs again, the longer
the more often that happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np

from ..memory.state import StateSizes
from .request import Phase, Request
from .slots import Chunk
from .step import Step

if TYPE_CHECKING:
    from .loop import Engine

HEAD = Struct("<Qii")
MOST_WARY = 63
"""Draws after which a request is trusted again, however often it was late."""
RESTART_NS = 50_000_000
"""How long a mask is waited for at least where leaving the row out means computing its recurrent states anew."""


class MaskBlock:
    """The input of pk_finish, in one preallocated block in the layout of rare.h."""

    __slots__ = ("_block", "address")

    def __init__(self, sizes: StateSizes) -> None:
        block = np.zeros((HEAD.size + 4 * sizes.n_slots * (1 + sizes.mask_words)) // 8 + 1, np.uint64)
        self.address = int(block.ctypes.data)
        self._block = block.data.cast("B")

    def compose(self, seq: int, masks: list[tuple[int, bytes]]) -> None:
        """Writes the masks (slot, words) of a step."""
        block, n = self._block, len(masks)
        HEAD.pack_into(block, 0, seq, n, 0)
        at = HEAD.size + 4 * n
        block[HEAD.size : at] = np.array([slot for slot, _ in masks], np.int32).tobytes()
        for _, words in masks:
            end = at + len(words)
            block[at:end] = words
            at = end


class Masking:
    """Which masked requests have a row in the next step, and when the step that waits for their masks is finished."""

    __slots__ = ("_block", "_engine", "late", "open", "until_ns")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._block = MaskBlock(engine.sizes)
        self.late: list[Request] = []
        """Requests whose row was left out and whose recurrent states have to be made anew."""
        self.open: Step | None = None
        """The step whose second half has not been given."""
        self.until_ns = 0
        """When it is given without the masks that are missing; 0: that is not known yet, or there is none."""

    @property
    def is_waiting(self) -> bool:
        """Nothing but masks is waited for: the device has, or will soon have, run everything that it was given."""
        in_flight = self._engine.in_flight
        return self.open is not None and in_flight[0] is self.open

    def rows(self) -> list[Request]:
        """The decoding requests whose rows of the next step wait for masks."""
        slots = self._engine.slots
        return [
            r for r in self._engine.masked
            if not r.wary_draws or slots.launched(r.slot) + 1 - r.prompt_tokens in r.masks
        ]  # fmt: skip

    def begin(self, step: Step, held: list[Request], chunks: Sequence[Chunk]) -> None:
        """A step has been given. When somebody's first token or the rows of `held` wait for masks, it was only its first half."""
        for request in held:
            self._engine.slots.count_row(request.slot)
        held += [request for request, _, samples in chunks if samples and request.use_mask]
        if held:
            step.held = held
            step.half_ns, step.done_ns = step.done_ns, 0
            self.open = step

    def finish(self) -> bool:
        """Gives the second half, once all masks are there or those that are missing are no longer waited for. True when it did."""
        step, engine = self.open, self._engine
        assert step is not None
        slots = engine.slots
        masks, missing = [], []
        for request in step.held:
            if request.phase != Phase.DECODE:
                continue
            words = request.masks.get(slots.launched(request.slot) - request.prompt_tokens)
            if words is None:
                missing.append(request)
            else:
                masks.append((request, words))
        if missing and not self._is_over(step, len(missing)):
            return False
        for request in missing:
            self._leave_out(request)
        for request, _ in masks:
            del request.masks[slots.launched(request.slot) - request.prompt_tokens]
            if request.wary_draws:
                request.wary_draws -= 1
            elif request.n_late:
                request.n_late -= 1
        self._block.compose(step.seq, [(request.slot, words) for request, words in masks])
        now = engine.clock()
        step.waited_ns = max(0, now - self._half_ns(step))
        self.open = None
        self.until_ns = 0
        step.held = ()
        engine.device.finish(self._block.address)
        if not engine.run_ahead:
            step.done_ns = engine.clock()
        return True

    def restarts(self) -> list[Request]:
        """Those that are late, once: nothing is in flight, and the caller preempts them."""
        late, self.late = self.late, []
        found = [request for request in late if request.phase == Phase.DECODE]
        for request in found:
            self._engine.slots.count_row(request.slot, -1)
        return found

    def _half_ns(self, step: Step) -> int:
        """When its first half is done: by the clock, or by the cost model."""
        begun = max(step.launched_ns, self._engine.last_done_ns)
        return step.half_ns or begun + int(1000 * step.price_us)

    def _is_over(self, step: Step, n_missing: int) -> bool:
        """The time for these masks is up: others have waited for their share of the step, or for a whole one, or a prompt has."""
        engine = self._engine
        if not self.is_waiting:
            return False
        n_ready = step.n_rows - n_missing
        half_ns = self._half_ns(step)
        took = step.half_ns - step.launched_ns if step.half_ns else int(1000 * step.price_us)
        if n_ready > 0:
            until = half_ns + min(took, took * n_missing // n_ready)
        elif self._has_prompts():
            until = half_ns + took
        else:
            self.until_ns = 0
            return False
        if engine.sizes.recurrent_bytes:
            until = max(until, half_ns + RESTART_NS)
        self.until_ns = until
        return engine.clock() >= until

    def _has_prompts(self) -> bool:
        """Somebody could be read in a step of their own; who waits for the first mask could not."""
        scheduler = self._engine.scheduler
        return bool(scheduler.queue.n or scheduler.held or scheduler.preempted) or any(
            not r.use_mask or r.remaining_tokens > 1 or r.n_tokens - r.prompt_tokens in r.masks for r in scheduler.prefilling
        )

    def _leave_out(self, request: Request) -> None:
        """It does not draw in this step, and has its mask before it runs again."""
        request.n_late = request.wary_draws = min(2 * request.n_late + 1, MOST_WARY)
        self._engine.counters.late_masks += 1
        if self._engine.sizes.recurrent_bytes:
            self.late.append(request)
        else:
            self._engine.slots.count_row(request.slot, -1)
