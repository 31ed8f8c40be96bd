"""A launched step: what the loop has to know of it until its results are read."""

from __future__ import annotations

from collections.abc import Sequence

from .request import Request


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
