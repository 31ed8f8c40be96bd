"""Vectors of many inputs: asked for a few at a time, all of them or none.

numpy is imported where it is used: a runner whose model writes text starts without it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from ..errors import PackError
from ..wire.messages import Ask
from .desk import Desk
from .turn import Caller

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_OPEN = 64
"""Asks of one request that the engine has at a time: others get their turns."""
Rows: TypeAlias = "NDArray[np.float32]"


async def vectors(desk: Desk, prompts: Sequence[array[int]], caller: Caller) -> Rows:
    """[n, width] of these prompts, in their order. Raises: PaddockError of the first that failed; the others are ended then."""
    import numpy as np

    gate = asyncio.Semaphore(MAX_OPEN)
    deadline_ns, has_begun = caller.deadline_ns, False

    async def one(prompt: array[int]) -> Rows:
        nonlocal deadline_ns, has_begun
        async with gate:
            ask = Ask(
                desk.next_id(), prompt.tobytes(), caller.client, caller.salt, weight=caller.weight, deadline_ns=deadline_ns, received_ns=caller.received_ns,
                max_tokens=1, temperature=0.0, goes_on=has_begun,
            )  # fmt: skip
            found = await desk.vector(ask)
            deadline_ns, has_begun = 0, True  # what is left of the request waits for its own inputs
            return np.frombuffer(found, np.float32)

    tasks = [asyncio.ensure_future(one(p)) for p in prompts]
    try:
        rows = np.stack(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
    if not np.isfinite(rows).all():
        raise PackError("the model produced a NaN for this request", "try again; if it repeats, the weights or a kernel are at fault")
    return rows


def unit(rows: Rows, width: int = 0) -> Rows:
    """Rows of length 1; of their first `width` numbers when that is not 0 (matryoshka). Zeros stay zeros."""
    import numpy as np

    kept = rows[:, :width] if width else rows
    length = np.sqrt((kept.astype(np.float64) ** 2).sum(-1, keepdims=True))
    found: Rows = (kept / np.where(length > 0, length, 1)).astype(np.float32)
    return found
