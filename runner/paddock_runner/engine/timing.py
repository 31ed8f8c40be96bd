"""When a step is launched, and when prompts wait for company: a burst is read at once, where reading it piece by piece would take longer.

What is launched cannot be changed, so a step is launched as late as the device allows while someone may still come: a prompt that comes a moment after
it would wait for a step more. For devices with run-ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .cost import CostModel
from .slots import Chunk
from .step import Step

if TYPE_CHECKING:
    from .loop import Engine

GATHER_SHARE = 0.25
"""Prompts wait for company for at most this part of the time that it takes to read them."""
AWAITED_SHARE, AWAITED_QUIET = 0.5, 3.0
"""This part, and so many times as long after the last that came, while fewer have come than have ended lately: who was answered together asks again together."""
FIT_ERROR = 0.15
"""Nine in ten steps with prefill take at least all of what the fit says but so much."""
MAX_LATE_NS = 1_000_000_000
"""A step that takes so much longer than it was priced has perhaps hung: nothing is held back for it any more, so that the loop comes to wait for it with its limit."""


def hold_until_ns(engine: Engine, now_ns: int) -> int:
    """Until when the next step is not to be launched; 0: launch it now."""
    policy = engine.policy
    if engine.masked or not (engine.slots.n_free or engine.n_ending or (engine.scheduler.queue.n and engine.scheduler.could_yield)):
        return 0
    until = 0
    if engine.in_flight:
        until = _end_ns(engine, now_ns) - _lead_ns(engine) if policy.lead_ms else 0
    elif not engine.slots.decode:
        until = _gather_until_ns(engine, now_ns)
    return until if until > now_ns else 0


def price_us(cost: CostModel, step: Step, chunks: Sequence[Chunk]) -> float:
    """What a step is expected to take: one of decode rows alone as such were measured last, beside a part of the device as much longer as such were."""
    us = (cost.decode_us if chunks else cost.quiet_us)(step.n_decode, step.context)
    if chunks:
        us += sum([cost.chunk_us(n, request.done_tokens - n) for request, n, _ in chunks])
    if step.n_more:
        us += cost.chunk_us(step.n_more, 0)
    return us * cost.beside if step.is_beside else us


def waits_for_company(engine: Engine, now_ns: int) -> bool:
    """Whether those who have come leave this step to the rows that decode, because more are coming."""
    return engine.scheduler.queue.n >= 2 and _gather_until_ns(engine, now_ns) > now_ns


def _gather_until_ns(engine: Engine, now_ns: int) -> int:
    """Until when prompts that have not started wait for others: a moment after the last that came; 0: they do not."""
    policy, scheduler = engine.policy, engine.scheduler
    queue = scheduler.queue
    if not policy.gather_ms or not queue.n or scheduler.prefilling or scheduler.held or scheduler.preempted:
        return 0
    if queue.uncached_tokens >= engine.sizes.max_step_tokens:
        return 0
    if scheduler.fills_step(len(engine.slots.decode)):
        return 0
    price_us = scheduler.cost.decode_us(0) + scheduler.cost.chunk_us(queue.uncached_tokens, 0)
    share, quiet_ms = (AWAITED_SHARE, AWAITED_QUIET * policy.quiet_ms) if queue.n > 1 and queue.expects_more(now_ns) else (GATHER_SHARE, policy.quiet_ms)
    patience_ns = int(min(1e6 * policy.gather_ms, 1000 * share * price_us))
    return min(queue.last_arrival_ns + int(1e6 * quiet_ms), queue.first_arrival_ns + patience_ns)


def _lead_ns(engine: Engine) -> int:
    """How long before that end the next step is launched: as long as deciding takes, and by what the fit may be off, or the device waits for the decision."""
    fitted_us = sum(step.price_us for step in engine.in_flight if step.n_prefill)
    return int(1e6 * engine.policy.lead_ms + 1000 * FIT_ERROR * fitted_us)


def _end_ns(engine: Engine, now_ns: int) -> int:
    """When the last step in flight will be done, by the cost model; those behind the first begin now at the earliest, however long it takes."""
    first, *others = engine.in_flight
    first_ns = max(first.launched_ns, engine.last_done_ns) + int(1000 * first.price_us)
    begun_ns = max(first_ns, min(now_ns, first_ns + MAX_LATE_NS)) if others else first_ns
    return begun_ns + int(1000 * sum([step.price_us for step in others]))
