"""Tiers in the loop's turn: what came from disk is taken in, what may be written is handed over, and idle time is used to keep what is not kept yet."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..cache.claim import lock, make_folder
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

    def host_pages(self, page_bytes: int, other_bytes: int = 0) -> int:
        """Places for pages in host memory; 0: no tiers. other_bytes: of a slot's states, or of a page of layers with a window, where there are such."""
        n = self.host_bytes * (STATE_SHARE - bool(other_bytes)) // STATE_SHARE // page_bytes
        return max(n, STAGING_PAGES) if self.disk_bytes else n

    def host_others(self, other_bytes: int, n_least: int = STAGING_STATES) -> int:
        """Places for those in host memory. n_least: with a disk, so many in any case."""
        n = self.host_bytes // STATE_SHARE // other_bytes
        return max(n, n_least) if self.disk_bytes else n

    def store(self, sizes: StateSizes, page_bytes: int, facts: tuple[str, ...], other_bytes: int = 0) -> PageStore | None:
        """The model's folder, where a disk was asked for: of pages, or with other_bytes of those. facts: what else their bytes depend on.

        Raises: Locked, UsageError.
        """
        if not self.disk_bytes:
            return None
        name = self._name(sizes, page_bytes, facts)
        share = self.disk_bytes // STATE_SHARE
        if other_bytes:
            return PageStore(self.folder / f"{name}-{'windows' if sizes.n_window_pages else 'states'}", other_bytes, share)
        return PageStore(self.folder / name, page_bytes, self.disk_bytes - share * bool(sizes.recurrent_bytes or sizes.n_window_pages))

    @contextmanager
    def claimed(self, sizes: StateSizes, page_bytes: int, facts: tuple[str, ...]) -> Iterator[None]:
        """Nobody else opens this model's folder meanwhile: that can be told before the model is loaded, though scales of FP8 keys, which facts have then, are not known yet.

        Raises: Locked, UsageError.
        """
        if not self.disk_bytes:
            yield
            return
        make_folder(self.folder)
        fd = lock(self.folder, self.folder / f"{self._name(sizes, page_bytes, facts)}.lock")
        try:
            yield
        finally:
            os.close(fd)

    def _name(self, sizes: StateSizes, page_bytes: int, facts: tuple[str, ...]) -> str:
        window = [str(sizes.window_tokens)] if sizes.n_window_pages else []
        return folder_name((*self.model, *facts, str(sizes.page_tokens), str(sizes.max_ctx_tokens), str(page_bytes), str(sizes.recurrent_bytes), *window))


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

    def copied(self) -> tuple[int, int]:
        """Copies given so far, and made."""
        ...

    def settle(self) -> None:
        """Waits until every copy is made."""


class HostStates:
    """Recurrent states as the tiers see pages: a page that goes out is a snapshot's place, one that comes in a slot."""

    def __init__(self, device: StateDevice, n: int) -> None:
        self.n_host_pages, self.page_bytes = n, device.state_bytes
        self.page_out, self.page_in, self.host_page = device.state_out, device.state_in, device.host_state
        self.copied, self.settle = device.copied, device.settle
        device.alloc_host_states(n)


class WindowDevice(Protocol):
    """What a device has for pages of layers with a window in host memory."""

    @property
    def window_bytes(self) -> int:
        """Of such a page."""
        ...

    def alloc_host_windows(self, n: int) -> None:
        """Memory for n of them."""

    def window_out(self, page: int, place: int) -> None:
        """Copies one to host memory, in order with the steps."""

    def window_in(self, place: int, page: int) -> None:
        """Copies it back."""

    def host_window(self, place: int) -> memoryview:
        """Its bytes."""
        ...

    def copied(self) -> tuple[int, int]:
        """Copies given so far, and made."""
        ...

    def settle(self) -> None:
        """Waits until every copy is made."""


class HostWindows:
    """Pages of layers with a window as the tiers see pages."""

    def __init__(self, device: WindowDevice, n: int) -> None:
        self.n_host_pages, self.page_bytes = n, device.window_bytes
        self.page_out, self.page_in, self.host_page = device.window_out, device.window_in, device.host_window
        self.copied, self.settle = device.copied, device.settle
        device.alloc_host_windows(n)


class TierKeeper:
    """What a turn does about tiers. device: the engine's, with places in host memory. others: tiers of recurrent states or of pages of layers with a window,
    for models that have them."""

    __slots__ = ("_device", "_engine", "_kept_at", "_todo", "others", "tiers")

    def __init__(self, engine: Engine, device: HostPages, tiers: Tiers, others: Tiers | None = None) -> None:
        self._engine, self._device, self.tiers, self.others = engine, device, tiers, others
        self._kept_at = -1
        self._todo: Iterator[tuple[bytes, int]] = iter(())
        ledger = engine.ledger
        if ledger.is_shared and ((ledger.states is None and ledger.windows is None) or others is not None):
            ledger.use_tiers(tiers, others)

    @property
    def _all(self) -> tuple[Tiers, ...]:
        return (self.tiers,) if self.others is None else (self.tiers, self.others)

    def turn(self) -> None:
        """Before a step is launched."""
        engine = self._engine
        for tiers in self._all:
            if tiers.poll():
                engine.scheduler.freed()
            tiers.watch(engine.clock())
            if tiers.has_unwritten:
                tiers.write_out()

    def _keep_others(self) -> None:
        """Copies out states, or pages of layers with a window, that are only on the device, as far as there is room."""
        states, windows, others = self._engine.ledger.states, self._engine.ledger.windows, self.others
        if others is None:
            return
        found = windows.ends() if windows is not None else []
        if states is not None:
            found = [(state_key(node.keys[-1]), node.state) for node in states.nodes()[::-1] if node.keys]
        for key, place in found:
            if others.n_unwritten >= others.n_places // 2:
                return
            if not others.knows(key):
                others.copy_out(key, place)

    def idle(self) -> bool:
        """Nothing runs: pages that are only on the device are copied out, a few at a time. True while there are more."""
        engine, tiers = self._engine, self.tiers
        if engine.n_open or engine.in_flight or engine.ledger.tree.tiers is None:
            return False
        self._keep_others()
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
                tiers.write_out()

    def close(self, has_failed: bool = False) -> None:
        """Keeps what can be kept, and lets go of the disk. has_failed: the device has, and what is only there is lost."""
        while not has_failed and (self.idle() or any(tiers.has_unwritten for tiers in self._all)):
            if not any([tiers.poll() for tiers in self._all]):
                time.sleep(WRITE_WAIT_S)
        for tiers in self._all:
            tiers.close(has_failed)
