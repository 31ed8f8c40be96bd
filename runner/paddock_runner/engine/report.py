"""The engine's state as a plain dictionary: for /metrics, /v1/paddock/state, and tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..cache.ledger import Ledger
from ..wire.messages import Miss
from .request import Phase, Request

if TYPE_CHECKING:
    from .loop import Engine


MOST_TIMES = 1024
RECENT_TIMES = 64
IDLE_NS = 50_000_000
"""A longer gap between two steps is not the engine being late: nobody wanted anything."""


def device_us(times: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Of the last steps, as the device saw them: how long a step took and how long it then waited for the next, microseconds."""
    steps = sorted(end - begin for begin, end in times)
    gaps = sorted(b[0] - a[1] for a, b in pairwise(times) if b[0] - a[1] < IDLE_NS)
    found: dict[str, float] = {"steps": len(steps)}
    for name, values in (("step", steps), ("gap", gaps)):
        if values:
            found[f"{name}_p50"] = values[len(values) // 2] / 1e3
            found[f"{name}_p99"] = values[min(len(values) - 1, len(values) * 99 // 100)] / 1e3
    return found


def report(engine: Engine) -> dict[str, Any]:
    """Counters (totals since the start), gauges, pages, the fitted cost model, what the start took, and one entry per running request.

    Page counts leave out the scratch page. Times in microseconds.
    """
    ledger, slots, scheduler, counters = engine.ledger, engine.slots, engine.scheduler, engine.counters
    pool, tree = ledger.pool, ledger.tree
    running = [r for r in slots.request_of if r is not None and r.phase != Phase.ENDED]
    return {
        "counters": {
            "requests": counters.requests,
            "prompt_tokens": counters.prompt_tokens,
            "cached_tokens": counters.cached_tokens,
            "prefill_tokens": counters.prefill_tokens,
            "aside_tokens": engine.aside.n_tokens,
            "output_tokens": counters.output_tokens,
            "preempted": counters.preempted,
            "late_masks": counters.late_masks,
            "steps": engine.launched_seq,
            "drafted_tokens": engine.drafter.drafted,
            "accepted_tokens": engine.drafter.accepted,
            "evicted_pages": tree.n_evicted,
            "ended": {reason.name.lower(): n for reason, n in counters.ended.items()},
            "refused": {code.name.lower(): n for code, n in counters.refused.items()},
        },
        "queue": {
            "waiting": scheduler.n_waiting,
            "preempted": len(scheduler.preempted),
            "limit": engine.policy.max_queue,
            "clients": len(scheduler.queue.busy),
        },
        "slots": {
            "all": engine.sizes.n_slots,
            "free": slots.n_free,
            "prefill": sum(r.phase == Phase.PREFILL for r in running),
            "decode": sum(r.phase == Phase.DECODE for r in running),
            "aside": len(scheduler.aside),
        },
        "pages": {
            "all": pool.n_usable,
            "attached": pool.n_attached - 1,
            "free": pool.n_free,
            "prefix": tree.n_pages,
            "evictable": tree.n_evictable,
            "tokens": engine.sizes.page_tokens,
        },
        "windows": _windows(ledger),
        "states": _states(engine),
        "tiers": tree.tiers.report() if tree.tiers is not None else {},
        "experts": engine.experts(),
        "memory": dict(engine.device.allocated),
        "prefix_nodes": tree.n_nodes,
        "in_flight": len(engine.in_flight),
        "run_ahead": engine.run_ahead,
        "cost_us": dict(zip(("step", "decode_rows_16", "prefill_256", "context_2048_256", "decode_rows_16_context_2048"), scheduler.cost.terms, strict=True)),
        "start": list(engine.start),
        "device_us": device_us(engine.device.times(MOST_TIMES)),
        "recent_us": device_us(engine.device.times(RECENT_TIMES)),
        "running": [
            {
                "slot": r.slot,
                "phase": r.phase.name.lower(),
                "prompt_tokens": r.prompt_tokens,
                "cached_tokens": r.cached_tokens,
                "done_tokens": r.done_tokens,
                "output_tokens": engine.given_tokens(r),
                "max_tokens": r.max_length - r.prompt_tokens,
                "pages": len(r.holding.pages) if r.holding is not None else 0,
                "preempted": r.n_preempted,
                "drafted_tokens": r.guess.drafted,
                "accepted_tokens": r.guess.accepted,
                "priority": r.priority,
            }
            for r in running
        ],
    }


def _windows(ledger: Ledger) -> dict[str, int]:
    """Pages of layers with a window."""
    pool = ledger.windows
    if pool is None:
        return {"all": 0, "free": 0, "prefix": 0, "evicted": 0}
    return {"all": pool.n_pages - 1, "free": pool.n_free, "prefix": pool.n_kept, "evicted": pool.n_evicted}


def _states(engine: Engine) -> dict[str, int]:
    """Snapshots of recurrent states."""
    pool, keeper = engine.ledger.states, engine.states
    places = {"all": 0, "free": 0, "prefix": 0, "evicted": 0} if pool is None else {"all": pool.n_places, "free": pool.n_free, "prefix": pool.n_kept, "evicted": pool.n_evicted}
    return {**places, "saved": keeper.n_saved, "loaded": keeper.n_loaded}


def miss_of(ledger: Ledger, request: Request) -> tuple[Miss, int]:
    """Why not more of the prompt was cached, and up to which token it is known. Asked before it enters the tree itself."""
    page_tokens = ledger.page_tokens
    if not ledger.is_shared:
        return Miss.OFF, 0
    known, differs = ledger.known(request.tokens, request.salt)
    if min(known, request.n_tokens - 1) // page_tokens * page_tokens > request.done_tokens:
        return Miss.STATE, known
    return (Miss.NEW if not known else Miss.DIFFERS if differs else Miss.NONE), known
