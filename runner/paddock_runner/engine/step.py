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
        "has_singles",
        "has_top",
        "is_plain",
        "launched_ns",
        "n_brought",
        "n_decode",
        "n_prefill",
        "n_rows",
        "n_samples",
        "price_us",
        "seq",
        "work",
    )

    def __init__(self) -> None:
        self.n_brought = self.seq = self.n_rows = self.n_samples = self.n_decode = self.n_prefill = 0
        self.work = self.price_us = 0.0
        self.launched_ns = self.done_ns = 0
        self.has_top = self.has_singles = False
        self.is_plain = True
        self.drafts: Sequence[tuple[int, int]] = ()
        self.firsts: list[Request] | None = None
