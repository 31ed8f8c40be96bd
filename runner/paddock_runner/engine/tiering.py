"""Tiers in the loop's turn: what came from disk is taken in, what may be written is handed over, and idle time is used to keep what is not kept yet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..cache.store import PageStore
from ..cache.tiers import HostPages, Tiers, folder_name, state_key
from ..memory.state import StateSizes
from .loop import Engine

WRITE_WAIT_S = 0.0005
STATE_SHARE = 4
"""One part in so many is for recurrent states, in models that have them."""
STAGING_STATES = 4
STAGING_PAGES = 64
"""Places in host memory that files are read into and written from, where no more were asked for."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """host_bytes of pages in host memory, disk_bytes in `folder`. model: what tells this model's files from others."""

    host_bytes: int
    disk_bytes: int
    folder: Path
    model: tuple[str, ...]

    def host_pages(self, page_bytes: int, state_bytes: int = 0) -> int:
        """Places for pages in host memory; 0: no tiers."""
        n = self.host_bytes * (STATE_SHARE - bool(state_bytes)) // STATE_SHARE // page_bytes
        return max(n, STAGING_PAGES) if self.disk_bytes else n

    def host_states(self, state_bytes: int) -> int:
        """Places for recurrent states in host memory."""
        n = self.host_bytes // STATE_SHARE // state_bytes
        return max(n, STAGING_STATES) if self.disk_bytes else n

    def store(self, sizes: StateSizes, page_bytes: int, facts: tuple[str, ...], state_bytes: int = 0) -> PageStore | None:
        """The model's folder, where a disk was asked for: of pages, or with state_bytes of states. facts: what else their bytes depend on.

        Raises: Locked, UsageError.
        """
        if not self.disk_bytes:
            return None
        name = folder_name((*self.model, *facts, str(sizes.page_tokens), str(sizes.max_ctx_tokens), str(page_bytes), str(sizes.recurrent_bytes)))
        share = self.disk_bytes // STATE_SHARE
        if state_bytes:
            return PageStore(self.folder / f"{name}-states", state_bytes, share)
        return PageStore(self.folder / name, page_bytes, self.disk_bytes - share * bool(sizes.recurrent_bytes))


class StateDevice(Protocol):
    """What a device has for recurrent states in host memory."""

    @property
    def state_bytes(self) -> int:
        """Of a slot's states."""
        ...

    def alloc_host_states(self, n: int) -> None:
        """Memory for n of them."""

    def state_out(self, place: int, host_place: int) -> None:
        """Copies a snapshot to host memory, in order with the steps."""

    def state_in(self, host_place: int, slot: int) -> None:
        """Copies it to a slot."""

    def host_state(self, host_place: int) -> memoryview:
        """Its bytes."""
        ...

    def settle(self) -> None:
        """Waits until every copy is made."""


class HostStates:
    """Recurrent states as the tiers see pages: a page that goes out is a snapshot's place, one that comes in a slot."""

    def __init__(self, device: StateDevice, n: int) -> None:
        self._device, self.n_host_pages, self.page_bytes = device, n, device.state_bytes
        device.alloc_host_states(n)

    def page_out(self, page: int, place: int) -> None:
        """A snapshot to host memory."""
        self._device.state_out(page, place)

    def page_in(self, place: int, page: int) -> None:
        """From host memory to a slot."""
        self._device.state_in(place, page)

    def host_page(self, place: int) -> memoryview:
        """The place's bytes."""
        return self._device.host_state(place)

    def settle(self) -> None:
        """Waits until every copy is made."""
        self._device.settle()


class TierKeeper:
    """What a turn does about tiers. device: the engine's, with places in host memory. states: tiers of recurrent states, for models that have them."""

    __slots__ = ("_device", "_engine", "_kept_at", "_todo", "states", "tiers")

    def __init__(self, engine: Engine, device: HostPages, tiers: Tiers, states: Tiers | None = None) -> None:
        self._engine, self._device, self.tiers, self.states = engine, device, tiers, states
        self._kept_at = -1
        self._todo: Iterator[tuple[bytes, int]] = iter(())
        # Pages of layers with a window have no tiers: the plan gives such layers none of their own where there are tiers.
        if engine.ledger.is_shared and engine.ledger.windows is None and (engine.ledger.states is None or states is not None):
            engine.ledger.use_tiers(tiers, states)

    @property
    def _all(self) -> tuple[Tiers, ...]:
        return (self.tiers,) if self.states is None else (self.tiers, self.states)

    def turn(self) -> None:
        """Before a step is launched."""
        engine = self._engine
        for tiers in self._all:
            if tiers.poll():
                engine.scheduler.freed()
            tiers.seq = engine.launched_seq + 2
            if tiers.has_unwritten:
                tiers.write_out(engine.read_seq)

    def _keep_states(self) -> None:
        """Copies out states that are only on the device, as far as there is room."""
        pool, states = self._engine.ledger.states, self.states
        if pool is None or states is None:
            return
        for node in pool.nodes()[::-1]:
            if states.n_unwritten >= states.n_places // 2:
                return
            if node.keys and not states.knows(key := state_key(node.keys[-1])):
                states.copy_out(key, node.state)

    def idle(self) -> bool:
        """Nothing runs: pages that are only on the device are copied out, a few at a time. True while there are more."""
        engine, tiers = self._engine, self.tiers
        if engine.n_open or engine.in_flight or engine.ledger.tree.tiers is None:
            return False
        self._keep_states()
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
        if any(tiers.has_unwritten for tiers in self._all):
            self._device.settle()
            for tiers in self._all:
                tiers.write_out(tiers.seq)

    def close(self) -> None:
        """Keeps what can be kept, and lets go of the disk."""
        while self.idle() or any(tiers.has_unwritten for tiers in self._all):
            if not any([tiers.poll() for tiers in self._all]):
                time.sleep(WRITE_WAIT_S)
        for tiers in self._all:
            tiers.close()
