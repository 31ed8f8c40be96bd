"""One-way ring of records in shared memory, for one writer and one reader, with a wake-up for a reader that parked.

A record is 8 bytes of header (size u32 with the header, kind u16, 0) and a payload, 8-byte aligned, never split: a record that
does not fit before the end is preceded by a pad of kind 0. `head` counts bytes written, `tail` bytes read; each has one writer.
A record is visible when `publish` moves the head, so a writer that dies half-way leaves nothing half-written.
"""

from __future__ import annotations

import os
from struct import Struct
from threading import Lock

from ..errors import TooLarge

RECORD = Struct("<IHH")
HEADER_BYTES = 256
HEAD, TAIL, PARKED = 0, 8, 16
"""Word (u64) indices into the header: 64 bytes apart, so that the two sides do not share a cache line."""

_FENCE = Lock()


def fence() -> None:
    """A full memory barrier: taking a free lock is an atomic read-modify-write.

    Without it a store (head) could pass a later load (parked) and a wake-up be lost.
    """
    with _FENCE:  # waits: two threads of a process may both be here, and each must release only what it took
        pass


class Writer:
    """The writing end. `data` is the ring's byte area, `words` its header as u64."""

    __slots__ = ("_capacity", "_data", "_event_fd", "_head", "_tail", "_words")

    def __init__(self, header: memoryview, data: memoryview, event_fd: int) -> None:
        self._words = header.cast("Q")
        self._data = data
        self._capacity = len(data)
        self._event_fd = event_fd
        self._head = self._words[HEAD]
        self._tail = self._words[TAIL]

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload: half of the ring, so that a record fits wherever the head stands."""
        return self._capacity // 2 - RECORD.size

    @property
    def data(self) -> memoryview:
        """The byte area that `reserve` gives offsets into."""
        return self._data

    def reserve(self, kind: int, n_bytes: int) -> int:
        """Offset in `data` of room for a payload of n_bytes (a multiple of 8), or -1 when the ring is full.

        Raises: TooLarge when it could never fit.
        """
        total = n_bytes + 8
        capacity = self._capacity
        if total * 2 > capacity:
            raise TooLarge(
                f"a record of {total} bytes does not fit a ring of {capacity} bytes",
                size_bytes=total,
                max_bytes=capacity // 2,
            )
        head = self._head
        at = head % capacity
        pad = capacity - at if at + total > capacity else 0
        if head + pad + total - self._tail > capacity:
            self._tail = self._words[TAIL]
            if head + pad + total - self._tail > capacity:
                return -1
        if pad:
            RECORD.pack_into(self._data, at, pad, 0, 0)
            at = 0
        RECORD.pack_into(self._data, at, total, kind, 0)
        self._head = head + pad + total
        return at + 8

    def push(self, kind: int, payload: bytes | memoryview) -> bool:
        """Appends a record, unpublished. False when the ring is full (nothing changed). Raises: TooLarge."""
        n_bytes = len(payload)
        at = self.reserve(kind, n_bytes)
        if at < 0:
            return False
        self._data[at : at + n_bytes] = payload
        return True

    def publish(self) -> None:
        """Makes the appended records visible, and wakes the reader when it has parked."""
        words = self._words
        if words[HEAD] == self._head:
            return
        fence()
        words[HEAD] = self._head
        fence()
        if words[PARKED]:
            words[PARKED] = 0
            os.eventfd_write(self._event_fd, 1)

    @property
    def used_bytes(self) -> int:
        """Bytes that the reader has not given back."""
        return self._head - self._words[TAIL]

    def release(self) -> None:
        """Lets go of the shared memory."""
        self._words.release()
        self._data.release()


class Reader:
    """The reading end: `next` shows a record in place, `done` gives the room of all shown records back."""

    __slots__ = ("_at", "_capacity", "_data", "_event_fd", "_tail", "_words", "kind")

    def __init__(self, header: memoryview, data: memoryview, event_fd: int) -> None:
        self._words = header.cast("Q")
        self._data = data
        self._capacity = len(data)
        self._event_fd = event_fd
        self._tail = self._words[TAIL]
        self.kind = 0

    @property
    def is_empty(self) -> bool:
        """Nothing to read now."""
        return self._words[HEAD] == self._tail

    def next(self) -> memoryview | None:
        """The next record's payload, in place (its kind in `self.kind`), valid until `done`; None when there is none."""
        while True:
            tail = self._tail
            if self._words[HEAD] == tail:
                return None
            at = tail % self._capacity
            size, kind, _ = RECORD.unpack_from(self._data, at)
            self._tail = tail + size
            if kind:
                self.kind = kind
                return self._data[at + 8 : at + size]

    def done(self) -> None:
        """Gives the room of everything that `next` returned back to the writer."""
        if self._words[TAIL] != self._tail:
            fence()
            self._words[TAIL] = self._tail

    def park(self) -> bool:
        """Asks for a wake-up through the eventfd. False when there is something to read already (then not parked)."""
        self._words[PARKED] = 1
        fence()
        if self._words[HEAD] != self._tail:
            self._words[PARKED] = 0
            return False
        return True

    def unpark(self) -> None:
        """Takes the wish back and clears the eventfd."""
        self._words[PARKED] = 0
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            pass

    @property
    def event_fd(self) -> int:
        """The eventfd that becomes readable when the writer wakes a parked reader."""
        return self._event_fd

    def release(self) -> None:
        """Lets go of the shared memory."""
        self._words.release()
        self._data.release()
