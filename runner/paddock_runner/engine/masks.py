"""Requests whose every token waits for a mask from the front: which of them have a row in the next step, and when it waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .loop import Engine


def gathers(engine: Engine) -> bool:
    """Whether masks are on their way that are worth waiting for: a step without their rows costs nearly as much as one with them.

    It is waited for as long as the missing rows' share of such a step takes, so that what a late mask costs the others is bounded.
    """
    slots = engine.slots
    n_missing = sum(slots.launched(r.slot) + 1 - r.prompt_tokens not in r.masks for r in engine.masked)
    n_ready = len(slots.decode) + len(engine.masked) - n_missing
    engine.gather_until_ns = 0
    if not n_missing or not n_ready:
        return False
    if engine.in_flight:
        return n_missing >= n_ready
    until = engine.last_done_ns + engine.last_took_ns * n_missing // n_ready
    if engine.clock() >= until:
        return False
    engine.gather_until_ns = until
    return True


def with_mask(engine: Engine) -> list[int]:
    """Slots of masked requests whose next mask is here; stages the masks."""
    found = []
    for request in engine.masked:
        words = request.masks.pop(engine.slots.launched(request.slot) + 1 - request.prompt_tokens, None)
        if words is not None:
            engine.slots.write_mask(request.slot, words)
            found.append(request.slot)
    return found
