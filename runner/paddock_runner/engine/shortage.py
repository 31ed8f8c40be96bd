"""When others have the device's memory: who is next, with nobody running, and still gets too few pages, is told so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..wire.messages import ErrorCode, Reason

if TYPE_CHECKING:
    from .loop import Engine


def gives_up(engine: Engine) -> bool:
    """Ends who is next if nobody holds pages and the device has no memory for as many as it needs. True when it did."""
    request, pool = engine.scheduler.stuck, engine.ledger.pool
    if request is None or not pool.is_short or engine.slots.n_free < engine.sizes.n_slots:
        return False
    engine.end(request, Reason.ERROR, ErrorCode.MEMORY)
    pool.is_short = False  # the next one asks the device again
    engine.scheduler.freed()
    return True
