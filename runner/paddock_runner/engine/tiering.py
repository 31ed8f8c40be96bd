"""Tiers in the loop's turn: what came from disk is taken in, what may be written is handed over, and idle time is used to keep what is not kept yet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..cache.store import PageStore
from ..cache.tiers import HostPages, Tiers, folder_name
from ..memory.state import StateSizes
from .loop import Engine

WRITE_WAIT_S = 0.0005
STAGING_PAGES = 64
"""Places in host memory that files are read into and written from, where no more were asked for."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """host_bytes of pages in host memory, disk_bytes in `folder`. model: what tells this model's files from others."""

    host_bytes: int
    disk_bytes: int
    folder: Path
    model: tuple[str, ...]

    def host_pages(self, page_bytes: int) -> int:
        """Places in host memory; 0: no tiers."""
        n = self.host_bytes // page_bytes
        return max(n, STAGING_PAGES) if self.disk_bytes else n

    def store(self, sizes: StateSizes, page_bytes: int, facts: tuple[str, ...]) -> PageStore | None:
        """The model's folder, where a disk was asked for. facts: what else a page's bytes depend on. Raises: Locked, UsageError."""
        if not self.disk_bytes:
            return None
        name = folder_name((*self.model, *facts, str(sizes.page_tokens), str(sizes.max_ctx_tokens), str(page_bytes)))
        return PageStore(self.folder / name, page_bytes, self.disk_bytes)


class TierKeeper:
    """What a turn does about tiers. device: the engine's, with places in host memory."""

    __slots__ = ("_device", "_engine", "_kept_at", "_todo", "tiers")

    def __init__(self, engine: Engine, device: HostPages, tiers: Tiers) -> None:
        self._engine, self._device, self.tiers = engine, device, tiers
        self._kept_at = -1
        self._todo: Iterator[tuple[bytes, int]] = iter(())
        if engine.ledger.is_shared and engine.ledger.states is None:
            engine.ledger.use_tiers(tiers)

    def turn(self) -> None:
        """Before a step is launched."""
        engine, tiers = self._engine, self.tiers
        if tiers.poll():
            engine.scheduler.freed()
        tiers.seq = engine.launched_seq + 2
        if tiers.has_unwritten:
            tiers.write_out(engine.read_seq)

    def idle(self) -> bool:
        """Nothing runs: pages that are only on the device are copied out, a few at a time. True while there are more."""
        engine, tiers = self._engine, self.tiers
        if engine.n_open or engine.in_flight or engine.ledger.tree.tiers is None:
            return False
        if self._kept_at != engine.launched_seq:
            self._kept_at = engine.launched_seq
            self._todo = iter(
                [pair for node in engine.ledger.tree.nodes() for pair in zip(node.keys, node.pages, strict=True)]
            )
        room = self._device.n_host_pages // 2 - tiers.n_unwritten
        if room <= 0:  # one page more would push out one that is not written yet
            self._flush()
            return False
        for key, page in self._todo:
            if not tiers.knows(key):
                tiers.copy_out(key, page)
                room -= 1
            if room <= 0:
                break
        else:
            self._flush()
            return False
        self._flush()
        return not tiers.n_unwritten

    def _flush(self) -> None:
        if self.tiers.has_unwritten:
            self._device.settle()
            self.tiers.write_out(self.tiers.seq)

    def close(self) -> None:
        """Keeps what can be kept, and lets go of the disk."""
        while self.idle() or self.tiers.has_unwritten:
            if not self.tiers.poll():
                time.sleep(WRITE_WAIT_S)
        self.tiers.close()
