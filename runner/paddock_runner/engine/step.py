"""A launched step: what the loop has to know of it until its results are read."""

from __future__ import annotations

from collections.abc import Sequence

from .request import Request

PAUSE_NS = 1_000_000
"""A step that was launched later than this after the one before ended did not wait for the host alone."""


class Step:
    """A launched step, until its results are read."""

    __slots__ = (
        "done_ns",
        "drafts",
        "firsts",
        "half_ns",
        "has_singles",
        "has_top",
        "held",
        "is_plain",
        "launched_ns",
        "n_brought",
        "n_decode",
        "n_prefill",
        "n_rows",
        "n_samples",
        "price_us",
        "seq",
        "waited_ns",
        "work",
    )

    def __init__(self) -> None:
        self.n_brought = self.seq = self.n_rows = self.n_samples = self.n_decode = self.n_prefill = 0
        self.work = self.price_us = 0.0
        self.launched_ns = self.done_ns = 0
        self.half_ns = self.waited_ns = 0
        """When its first half was done, where that is known; how long the second then waited for masks."""
        self.has_top = self.has_singles = False
        self.is_plain = True
        self.drafts: Sequence[tuple[int, int]] = ()
        self.held: Sequence[Request] = ()
        """Requests whose rows wait for a mask, until the second half has been given."""
        self.firsts: list[Request] | None = None

    def period_us(self, now_ns: int, last_done_ns: int) -> float:
        """From the end of the step before, the host's share between them included, or from its launch if there was nothing to do."""
        begun_ns = self.launched_ns if self.launched_ns - last_done_ns > PAUSE_NS else last_done_ns
        return (now_ns - begun_ns - self.waited_ns) / 1000
