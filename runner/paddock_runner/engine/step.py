"""A launched step: what the loop has to know of it until its results are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .request import Request

PAUSE_NS = 1_000_000
"""A step that was launched later than this after the one before ended did not wait for the host alone."""
TOP_BYTES = 8


class Step:
    """A launched step, until its results are read."""

    __slots__ = (
        "context",
        "done_ns",
        "drafts",
        "firsts",
        "half_ns",
        "has_singles",
        "has_top",
        "held",
        "is_beside",
        "is_plain",
        "launched_ns",
        "n_brought",
        "n_decode",
        "n_more",
        "n_prefill",
        "n_rows",
        "n_samples",
        "price_us",
        "seq",
        "sure",
        "waited_ns",
        "work",
    )

    def __init__(self) -> None:
        self.n_brought = self.seq = self.n_rows = self.n_samples = self.n_decode = self.n_prefill = self.n_more = self.context = 0
        self.work = self.price_us = 0.0
        self.launched_ns = self.done_ns = 0
        self.half_ns = self.waited_ns = 0
        """When its first half was done, where that is known; how long the second then waited for masks."""
        self.has_top = self.has_singles = self.is_beside = False
        self.is_plain = True
        self.drafts: Sequence[tuple[int, int]] = ()
        self.held: Sequence[Request] = ()
        """Requests whose rows wait for a mask, until the second half has been given."""
        self.sure: dict[int, list[int]] = {}
        """Tokens that a slot's row ran before the one that it drew, and that nobody has been told."""
        self.firsts: list[Request] | None = None

    def period_us(self, now_ns: int, last_done_ns: int) -> float:
        """From the end of the step before, the host's share between them and waiting for masks included, or from its launch if there was nothing to do."""
        begun_ns = self.launched_ns if self.launched_ns - last_done_ns > PAUSE_NS else last_done_ns
        return (now_ns - begun_ns) / 1000

def with_others(before: NDArray[np.int32], block: NDArray[np.int32]) -> NDArray[np.int32]:
    """The rows of a step without decode rows, and of those before it the slots that it has not. i32 [rows, 6], pk_result."""
    return np.concatenate([before[~np.isin(before[:, 0], block[:, 0])], block])


def best_of(top: memoryview, block: NDArray[np.int32], first: int, max_top: int) -> bytes:
    """The best tokens of the rows of a step, pk_top after pk_top. block: i32 [rows, 6], pk_result; first: its place in the ring of rows."""
    parts = []
    for i, n in enumerate(block[:, 5].tolist(), first):
        if n:
            at = i * max_top * TOP_BYTES
            parts.append(bytes(top[at : at + n * TOP_BYTES]))
    return b"".join(parts)
