"""Tiers below the device: pages that the prefix tree forgets go to host memory, and from there to disk; they come back when that is cheaper
than computing them again.

A page is known by its key: a hash of its salt and of all tokens up to its end, so the same key always means the same content. Copies between
device and host are made by the device as if in order with the steps; one that runs steps ahead makes them beside those that do not touch these pages. Files are written by one thread and read by a few, which touch only host memory that the
engine has handed to them; the engine never waits for them.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import inf
from queue import SimpleQueue
from threading import Thread
from time import perf_counter_ns
from typing import Protocol

from .store import KEY_BYTES, PageStore

FIRST_RATE = {"host": 5e9, "disk": 5e8}
"""Bytes per second that are believed before anything was measured."""
MOST_RATE = 1e11
READERS = 4
"""Threads that read files: one alone waits for the disk, copies and sums up in turn, and leaves it idle meanwhile."""
LEAST_PAGES = 4
"""Pages that come from host memory with a step, however little time there is."""
LINK_US, MOST_PAGES = 20_000.0, 256
"""Copying that is asked for ahead where it runs beside the steps: more than a step takes, so that the link is never idle, and so many pages at most."""
PINNED_SHARE = 0.75
"""Of the places, that may hold what is read for somebody: the others are for what is forgotten meanwhile."""
MAX_WRITES = 64
"""Pages that may wait to be written; more are not kept on disk."""


Job = tuple[str, bytes, memoryview]
"""What a file thread is to do: "read" or "write", a page's key, and its place in host memory."""


def root_key(salt: int) -> bytes:
    """The key before the first page."""
    return blake2b(salt.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


def page_keys(before: bytes, tokens: bytes, page_bytes: int) -> list[bytes]:
    """Keys of the whole pages of `tokens` (int32) that follow a page with the key `before`."""
    keys = []
    for at in range(0, len(tokens) - page_bytes + 1, page_bytes):
        before = blake2b(tokens[at : at + page_bytes], digest_size=KEY_BYTES, key=before).digest()
        keys.append(before)
    return keys


def state_key(page_key: bytes) -> bytes:
    """The key of the recurrent states after the page with that key."""
    return blake2b(b"states", digest_size=KEY_BYTES, key=page_key).digest()


class HostPages(Protocol):
    """What the tiers need of a device: places in host memory, each as large as a page."""

    @property
    def n_host_pages(self) -> int:
        """Places."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        ...

    def page_out(self, page: int, place: int, /) -> None:
        """Copies a page of the device to a place, in order with the steps."""

    def page_in(self, place: int, page: int, /) -> None:
        """Copies it back."""

    def host_page(self, place: int, /) -> memoryview:
        """The place's bytes."""
        ...

    def copied(self) -> tuple[int, int]:
        """Copies given so far, and how many of them are made with all before them: only then may the host use its places."""
        ...

    def settle(self) -> None:
        """Waits until every copy is made."""


class Tiers:
    """Where forgotten pages are. wake: called by a file thread when a page has come from disk, or was written. is_beside: copies do not hold up steps."""

    def __init__(
        self, device: HostPages, store: PageStore | None, wake: Callable[[], None] = lambda: None, is_beside: bool = False
    ) -> None:
        self._device = device
        self._store = store
        self._wake = wake
        self._free = list(range(device.n_host_pages - 1, -1, -1))
        self._host: OrderedDict[bytes, int] = OrderedDict()
        self._busy: dict[bytes, int] = {}
        """Places that file threads fill (keys not in _host) or write from (keys in _host)."""
        self._unwritten: deque[tuple[int, bytes]] = deque()
        """Copies to host memory, by number, whose pages are to be written."""
        self.is_beside = is_beside
        self._given = self._made = self._seen_ns = 0
        """Copies given and made, as far as seen, and when that was looked at while some were under way."""
        self._writes: SimpleQueue[Job | None] = SimpleQueue()
        self._reads: SimpleQueue[Job | None] = SimpleQueue()
        self._done: deque[tuple[str, bytes, bool, int, int]] = deque()
        self._read_ns, self._read_end_ns = 0.0, 0
        self._n_writing = 0
        self.rate = dict(FIRST_RATE)
        self.n_out = self.n_in = self.n_read = self.n_written = self.n_lost = 0
        """Pages that went to host memory, came back, were read from disk, were written there, and were given up."""
        self._pins: dict[bytes, int] = {}
        """Pages in host memory that requests are about to bring back, or that are read for them: how many."""
        self.n_reading = 0
        """Pages that are to be read, or being read."""
        self.version = 0
        """Grows with what file threads have done."""
        queues = [self._writes, *([self._reads] * READERS)] if store is not None else []
        self._threads = [Thread(target=self._work, args=(jobs,), name="tiers", daemon=True) for jobs in queues]
        for thread in self._threads:
            thread.start()

    # ---- out ----

    def spill(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """The device's pages are about to be forgotten: they go to host memory, as far as there is room that nobody uses."""
        for key, page in zip(keys, pages, strict=True):
            if key in self._host:
                self._host.move_to_end(key)
            elif key not in self._busy and (self._store is None or key not in self._store):
                self.copy_out(key, page)

    def copy_out(self, key: bytes, page: int) -> bool:
        """One page to host memory. False when every place is in use by the file thread."""
        place = self._take()
        if place < 0:
            self.n_lost += 1
            return False
        self._device.page_out(page, place)
        self._host[key] = place
        self.n_out += 1
        self._look()
        if self._store is not None:
            self._unwritten.append((self._given, key))
        return True

    def _look(self) -> bool:
        """True when every copy is made."""
        self._given, self._made = self._device.copied()
        return self._made == self._given

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        for key in self._host:
            if key not in self._busy and key not in self._pins:
                return self._host.pop(key)
        return -1

    def write_out(self) -> None:
        """Hands pages in host memory to the file thread, whose copies are made."""
        if self._unwritten and self._unwritten[0][0] > self._made:
            self._look()
        while self._unwritten and self._n_writing < MAX_WRITES and self._unwritten[0][0] <= self._made:
            key = self._unwritten.popleft()[1]
            place = self._host.get(key)
            if place is not None and key not in self._busy:
                self._busy[key] = place
                self._n_writing += 1
                self._writes.put(("write", key, self._device.host_page(place)))

    @property
    def has_unwritten(self) -> bool:
        """Something is to be written, or being written."""
        return bool(self._unwritten or self._n_writing)

    @property
    def n_unwritten(self) -> int:
        """Pages that are to be written, or being written."""
        return len(self._unwritten) + self._n_writing

    @property
    def n_places(self) -> int:
        """Places in host memory."""
        return self._device.n_host_pages

    def report(self) -> dict[str, int | float]:
        """Pages by tier, and what went where."""
        return {
            "host_places": self._device.n_host_pages, "host": len(self._host), "disk": len(self._store) if self._store is not None else 0,
            "disk_bytes": self._store.n_bytes if self._store is not None else 0, "spilled": self.n_out, "restored": self.n_in,
            "read": self.n_read, "written": self.n_written, "lost": self.n_lost, "disk_bytes_per_s": round(self.rate["disk"]),
        }  # fmt: skip

    @property
    def is_empty(self) -> bool:
        """Nothing is here, in host memory or on disk."""
        return not self._host and (self._store is None or not len(self._store))

    def knows(self, key: bytes) -> bool:
        """The page is on disk, or on its way; without a disk: in host memory."""
        return key in self._host or (self._store is not None and key in self._store)

    # ---- in ----

    def find(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """How many of the leading keys are in host memory, and how many in host memory or on disk."""
        host = n = 0
        is_host = True
        for key in keys:
            if key in self._host:
                host += is_host
            elif self._store is not None and (key in self._store or key in self._busy):
                is_host = False
            else:
                break
            n += 1
        return host, n

    def is_here(self, key: bytes) -> bool:
        """The page is in host memory."""
        return key in self._host

    def is_reading(self, key: bytes) -> bool:
        """The page is on its way from disk."""
        return key in self._busy and key not in self._host

    def ask(self, key: bytes) -> bool:
        """Pins a page, and has it read from disk where it is not in host memory. False: there is no room for so many, or it is nowhere."""
        if len(self._pins) + len(self._busy) - self.n_reading >= self.n_places * PINNED_SHARE:  # what is read is pinned as well
            return False
        place = -1
        if key in self._host:
            self._host.move_to_end(key)
        elif key not in self._busy:
            place = self._take() if self._store is not None and key in self._store else -1
            if place < 0:
                return False
        self.pin([key])
        if place >= 0:
            if not self._look():
                self._device.settle()  # a copy out of this place may still be on its way
            self._busy[key] = place
            self.n_reading += 1
            self._reads.put(("read", key, self._device.host_page(place)))
        return True

    def pin(self, keys: Sequence[bytes]) -> None:
        """Pages in host memory stay there until they are unpinned as often."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Sequence[bytes]) -> None:
        """They may go again."""
        for key in keys:
            if self._pins[key] > 1:
                self._pins[key] -= 1
            else:
                del self._pins[key]

    def bring(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Copies pinned pages in host memory to pages of the device; they are no longer pinned."""
        for key, page in zip(keys, pages, strict=True):
            self._host.move_to_end(key)
            self._device.page_in(self._host[key], page)
        self.unpin(keys)
        self.n_in += len(keys)
        self._look()

    @property
    def given(self) -> int:
        """Number of the last copy."""
        return self._given

    def n_under_way(self) -> int:
        """Copies that are not made yet."""
        if self._made < self._given:
            self._look()
        return self._given - self._made

    def has_made(self, number: int) -> bool:
        """A copy is made, and all before it."""
        if number > self._made:
            self._look()
        return number <= self._made

    def due(self, n_below: int, us_left: float) -> int:
        """How many of a request's n_below pages to bring with a step that has so much time left for it, which is endless when nobody decodes."""
        if us_left == inf:
            return n_below
        us = self.us("host", 1)
        return max(0, min(MOST_PAGES, int(LINK_US / us) + 1) - self.n_under_way()) if self.is_beside else max(LEAST_PAGES, int(us_left / us))

    def see(self, n_pages: int, us: float) -> None:
        """n_pages came back from host memory with a step that took so much longer for it."""
        if n_pages and us > 0 and not self.is_beside:
            self._see_rate(n_pages, us)

    def watch(self, now_ns: int) -> None:
        """Sees how fast copies beside the steps are made, from turn to turn, while the link has enough to do."""
        if not self.is_beside or self._made == self._given:
            self._seen_ns = 0
            return
        before, is_idle = self._made, self._look()
        if self._seen_ns and self._made > before and not is_idle:
            self._see_rate(self._made - before, (now_ns - self._seen_ns) / 1000)
        if self._made > before or not self._seen_ns:
            self._seen_ns = 0 if is_idle else now_ns

    def _see_rate(self, n_pages: int, us: float) -> None:
        self.rate["host"] += 0.2 * (min(MOST_RATE, n_pages * self._device.page_bytes / max(us, 1e-3) * 1e6) - self.rate["host"])

    def us(self, tier: str, n_pages: int) -> float:
        """What bringing n_pages from a tier is expected to take."""
        return n_pages * self._device.page_bytes / self.rate[tier] * 1e6

    # ---- file threads ----

    def poll(self) -> bool:
        """Takes in what file threads have done. True when pages have come or places are free again."""
        done = self._done
        has_news = bool(done)
        while done:
            kind, key, is_good, begun_ns, end_ns = done.popleft()
            self.version += 1
            place = self._busy.pop(key)
            if kind == "read":
                self.n_reading -= 1
                if is_good:
                    self._host[key] = place
                    self.n_read += 1
                    self._see_read(begun_ns, end_ns)
                else:
                    self._free.append(place)
            else:
                self._n_writing -= 1
                self.n_written += is_good
        return has_news

    def _see_read(self, begun_ns: int, end_ns: int) -> None:
        """A page has been read. Several are read at once: what one takes is the time since the one before has come."""
        took = max(0, end_ns - max(begun_ns, self._read_end_ns))
        self._read_end_ns = max(self._read_end_ns, end_ns)
        self._read_ns += 0.1 * (took - self._read_ns) if self._read_ns else took
        self.rate["disk"] = min(MOST_RATE, self._device.page_bytes / max(self._read_ns, 1) * 1e9)

    def _work(self, jobs: SimpleQueue[Job | None]) -> None:
        assert self._store is not None
        while (job := jobs.get()) is not None:
            kind, key, view = job
            begun = perf_counter_ns()
            try:
                if kind == "read":
                    is_good = key in self._pins and self._store.read(key, view)  # nobody may want it any more
                else:
                    self._store.append(key, view)
                    is_good = True
            except OSError:
                is_good = False
            self._done.append((kind, key, is_good, begun, perf_counter_ns()))
            self._wake()

    def close(self, has_failed: bool = False) -> None:
        """Writes what is to be written and lets go of the disk. has_failed: the device has, which is not waited for."""
        if self._threads and self._store is not None:
            if not has_failed:
                self._device.settle()
            while self._unwritten and not has_failed:
                self.write_out()
                if self._unwritten:
                    self.poll()
            for jobs in (self._writes, *([self._reads] * READERS)):
                jobs.put(None)
            for thread in self._threads:
                thread.join()
            self.poll()
            self._store.close()
            self._threads.clear()


def folder_name(facts: Sequence[str]) -> str:
    """The name of the store for one model on one kind of device: any change of what a page means gives another name."""
    return blake2b("\0".join(facts).encode(), digest_size=12).hexdigest()


def file_facts(path: os.PathLike[str]) -> str:
    """What tells one version of a file from another without reading it all."""
    found = os.stat(path)
    with open(path, "rb") as file:
        head = blake2b(file.read(1 << 16), digest_size=12).hexdigest()
    return f"{found.st_size}:{found.st_mtime_ns}:{head}"
