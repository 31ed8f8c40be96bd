"""Memory that nobody needs goes back to the device while the runner is idle: cached pages move together, what lies above them is let go.

Nothing that the prefix cache knows is forgotten. The next requests get memory again as they need it.
"""

from __future__ import annotations

from .loop import Engine

MOVES = 128
"""Pages that are moved between two looks for new requests."""
PIECE_PAGES = 512
"""Pages whose memory is let go between two looks."""


class Giver:
    """What an idle engine does about its memory."""

    __slots__ = ("_engine", "_is_done", "_seq", "_since_ns")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seq, self._since_ns, self._is_done = -1, 0, False

    def turn(self) -> int | None:
        """When it is to be called next, if nothing comes, in ms; None: not at all."""
        engine = self._engine
        after_s = engine.policy.idle_release_s
        if not after_s or engine.n_open or engine.in_flight or engine.retiring:
            return None
        now = engine.clock()
        if self._seq != engine.launched_seq:
            self._seq, self._since_ns, self._is_done = engine.launched_seq, now, False
        if self._is_done:
            return None
        left_ns = self._since_ns + int(1e9 * after_s) - now
        if left_ns > 0:
            return left_ns // 1_000_000 + 1
        self._is_done = not self._give()
        return None if self._is_done else 0

    def _give(self) -> bool:
        """One piece of the work. True while there is more."""
        engine, ledger = self._engine, self._engine.ledger
        pool = ledger.pool
        keep = min(pool.n_pages, 1 + ledger.tree.n_pages + engine.low_pages)
        if keep >= pool.n_attached:
            return False
        if ledger.gather(keep, MOVES, engine.device.copy_page):
            return True
        before = pool.n_attached
        least = max(keep, before - PIECE_PAGES)
        pool.shrink(least)
        pool.grow(engine.device.shrink_pages(least))
        return pool.n_attached < before and least > keep
