"""Requests whose every token waits for a mask from the front: their rows run before the mask is there, and draw when it has come.

A step with such rows is given in two halves (pk_step, pk_finish). While the first half runs, which is nearly all of it, the front makes the
masks of the tokens that the step before drew. A mask that is late is waited for as long as it would cost the other rows little; then its row
is left out, which costs it that run, and never draws without. A request that was late waits for its mask before it runs again, the longer
the more often that happened.

Tokens that a grammar is certain of are not drawn, where that pays: their row runs them all at once.

A row of guesses (drafts.py) draws under a mask at each place. The front walks the guessed tokens while they run; where its grammar refuses one, or where
the front does not say in time, there are no masks, and the row draws no further.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..memory.state import StateSizes
from .request import Phase, Request
from .slots import Chunk
from .step import Step

if TYPE_CHECKING:
    from .loop import Engine

HEAD = Struct("<Qii")
FADE = 0.999
"""What is believed of the cost of rows of several tokens fades with each look, so that it is measured again some day."""
MOST_WARY = 63
"""Draws after which a request is trusted again, however often it was late."""
RESTART_NS = 50_000_000
"""How long a mask is waited for at least where leaving the row out means computing its recurrent states anew."""
WALK_NS = 5_000_000
"""How long masks of guesses are waited for where no other row waits with them."""


class MaskBlock:
    """The input of pk_finish, in one preallocated block in the layout of rare.h."""

    __slots__ = ("_block", "_n_words", "address")

    def __init__(self, sizes: StateSizes) -> None:
        self._n_words = sizes.mask_words
        block = np.zeros((HEAD.size + 4 * sizes.max_step_rows * (1 + sizes.mask_words)) // 8 + 1, np.uint64)
        self.address = int(block.ctypes.data)
        self._block = block.data.cast("B")

    def compose(self, seq: int, masks: list[tuple[int, bytes]]) -> None:
        """Writes the masks (slot, words) of a step, those of a row of guesses one after the other."""
        block, n = self._block, len(masks)
        HEAD.pack_into(block, 0, seq, n, 0)
        at = HEAD.size + 4 * n
        block[HEAD.size : at] = np.array([slot for slot, _ in masks], np.int32).tobytes()
        for _, words in masks:
            end = at + len(words)
            block[at:end] = words
            at = end


    def only(self, token: int) -> bytes:
        """The mask of one token."""
        words = np.zeros(self._n_words, np.uint32)
        words[token >> 5] = 1 << (token & 31)
        return words.tobytes()


class Masking:
    """Which masked requests have a row in the next step, and when the step that waits for their masks is finished."""

    __slots__ = ("_block", "_engine", "_extra_us", "late", "open", "until_ns")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._block = MaskBlock(engine.sizes)
        self._extra_us = 0.0
        """What rows of several tokens add to a step, as measured; 0 while that is not known."""
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

    def rows(self, n_others: int, n_guesses: int, has_prefill: bool) -> list[tuple[Request, int]]:
        """The decoding requests whose rows of the next step wait for masks, and how many tokens each of them runs; n_others: rows beside them, n_guesses: of these.

        A row runs tokens that its grammar is certain of without drawing them, where a step with more tokens pays.
        """
        engine = self._engine
        slots, sizes = engine.slots, engine.sizes
        found: list[tuple[Request, int]] = []
        n_more, room = 0, sizes.max_step_tokens - n_others - n_guesses - len(engine.masked)
        for request in engine.masked:
            index = slots.launched(request.slot) + 1 - request.prompt_tokens
            n = 0
            if request.sure and request.n_logprobs < 0:
                most = min(slots.left(request.slot) - 1, room - n_more)
                while n < most and (token := request.sure.get(index + n)) is not None and token not in request.stop:
                    n += 1
                n_more += n
            if n or not request.wary_draws or request.has_mask(index):
                found.append((request, 1 + n))
        if n_more and not self._pays(n_more, n_others + len(found), has_prefill):
            found = [(request, 1) for request, _ in found]
        for request, n in found:
            request.run_tokens = n - 1
            if n > 1:
                first = slots.launched(request.slot) + 1
                index = first - request.prompt_tokens
                slots.write_text(request.slot, first, array("i", [request.sure[index + i] for i in range(n - 1)]).tobytes())
        return found

    def begin(self, step: Step, rows: Sequence[tuple[Request, int]], chunks: Sequence[Chunk]) -> None:
        """A step has been given. When somebody's first token, these rows, or guesses wait for masks, it was only its first half."""
        slots = self._engine.slots
        for request, n in rows:
            slots.count_row(request.slot, n)
            request.draw_index, request.n_draws = slots.launched(request.slot) - request.prompt_tokens, 0
        held = [request for request, _ in rows]
        for request, _, samples in chunks:
            if samples and request.use_mask:
                request.run_tokens = request.n_draws = 0
                request.draw_index = request.n_tokens - request.prompt_tokens
                held.append(request)
        for slot, n in step.drafts:
            guessed = slots.request_of[slot]
            if guessed is not None and guessed.use_mask:
                guessed.draw_index, guessed.n_draws = slots.launched(slot) + 1 - guessed.prompt_tokens, n
                held.append(guessed)
        if held:
            step.held = held
            step.half_ns, step.done_ns = step.done_ns, 0
            self.open = step

    def finish(self) -> bool:
        """Gives the second half, once all masks are there or those that are missing are no longer waited for. True when it did."""
        step, engine = self.open, self._engine
        assert step is not None
        ready: list[Request] = []
        missing: list[Request] = []
        n_unwalked = 0
        for request in step.held:
            if request.phase == Phase.DECODE:
                (ready if request.has_mask(request.draw_index) else missing).append(request)
                n_unwalked += request.n_draws > 1 and request.walked is None
        if missing and not self._is_over(step, len(missing)):
            return False
        if n_unwalked and not missing and not self._is_walk_over(step, n_unwalked):
            return False
        for request in missing:
            self._leave_out(request)
        self._block.compose(step.seq, [(request.slot, words) for request in ready for words in self._take(request, step)])
        step.waited_ns = max(0, engine.clock() - self._half_ns(step))
        self.open = None
        self.until_ns = 0
        step.held = ()
        engine.device.finish(self._block.address)
        if not engine.run_ahead:
            step.done_ns = engine.clock()
        return True

    def spell_out(self, step: Step, block: NDArray[np.int32]) -> memoryview:
        """The rows of a step as fronts are to see them: what rows ran without drawing it stands before what they drew.

        block: i32 [rows, 6], pk_result. The tokens are noted in the slots' history.
        """
        slots, parts = self._engine.slots, []
        for row in block:
            slot, token, _, length = row[:4].tolist()
            if token >= 0 and (sure := step.sure.pop(slot, None)):
                first = length - len(sure)
                slots.history[slot, first:length] = sure
                told = np.zeros((len(sure), 6), np.int32)
                told[:, 0], told[:, 1], told[:, 3] = slot, sure, range(first, length)
                parts.append(told)
                self._engine.counters.output_tokens += len(sure)
            parts.append(row[None])
        step.sure.clear()
        return np.concatenate(parts).data.cast("B")

    def _take(self, request: Request, step: Step) -> list[bytes]:
        """The masks with which the request's row draws now; what came before that of a single one is forgotten."""
        index = request.draw_index
        if request.wary_draws:
            request.wary_draws -= 1
        elif request.n_late:
            request.n_late -= 1
        if request.n_draws:
            found = list[bytes]()
            while len(found) < request.n_draws and (place := request.place_of(index + len(found))) is not None:
                found.append(self._block.only(place) if isinstance(place, int) else place)
            return found
        if request.run_tokens:
            step.sure[request.slot] = [request.sure.pop(index - request.run_tokens + i) for i in range(request.run_tokens)]
        words = request.masks.pop(index, None)
        return [self._block.only(request.sure.pop(index)) if words is None else words]

    def _pays(self, n_more: int, n_rows: int, has_prefill: bool) -> bool:
        """Whether so many tokens more are worth what they add to a step: on a GPU rows of several tokens cost what prefill costs beside decode rows."""
        cost = self._engine.scheduler.cost
        self._extra_us *= FADE
        extra_us = cost.chunk_us(n_more, 0)
        return n_more * cost.decode_us(n_rows, self._engine.slots.context) > n_rows * (extra_us if has_prefill else max(extra_us, self._extra_us))

    def see(self, step: Step, us: float) -> None:
        """Learns from a step without prefill whose rows ran several tokens."""
        extra = max(0.0, us - self._engine.scheduler.cost.decode_us(step.n_decode, step.context))
        self._extra_us += 0.1 * (extra - self._extra_us) if self._extra_us else extra

    def restarts(self) -> list[Request]:
        """Those that are late, once: nothing is in flight, and the caller preempts them."""
        late, self.late = self.late, []
        found = [request for request in late if request.phase == Phase.DECODE]
        for request in found:
            self._uncount(request)
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

    def _is_walk_over(self, step: Step, n_unwalked: int) -> bool:
        """The same for masks of guesses: without them their rows draw one token."""
        if not self.is_waiting:
            return False
        n_ready, half_ns = step.n_rows - n_unwalked, self._half_ns(step)
        took = int(1000 * step.price_us)
        self.until_ns = half_ns + (min(took, took * n_unwalked // n_ready) if n_ready > 0 else max(took, WALK_NS))
        return self._engine.clock() >= self.until_ns

    def _has_prompts(self) -> bool:
        """Somebody could be read in a step of their own; who waits for the first mask could not."""
        scheduler = self._engine.scheduler
        return bool(scheduler.queue.n or scheduler.held or scheduler.preempted) or any(
            not r.use_mask or r.remaining_tokens > 1 or r.has_mask(r.n_tokens - r.prompt_tokens) for r in scheduler.prefilling
        )

    def _leave_out(self, request: Request) -> None:
        """It does not draw in this step, and has its mask before it runs again."""
        request.n_late = request.wary_draws = min(2 * request.n_late + 1, MOST_WARY)
        self._engine.counters.late_masks += 1
        if self._engine.sizes.recurrent_bytes:
            self.late.append(request)
        else:
            self._uncount(request)

    def _uncount(self, request: Request) -> None:
        """Its row was left out. Rows of guesses are counted when they are read."""
        if not request.n_draws:
            self._engine.slots.count_row(request.slot, -1 - request.run_tokens)
