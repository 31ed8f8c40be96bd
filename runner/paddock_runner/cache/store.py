"""Pages on disk: segments of records with checksums, found again by scanning, so that a crash at any moment leaves a good store.

A folder (mode 0700) holds `NNNNNNNN.kv` files (0600). A segment is a row of records of one size: a header (magic, key, payload's CRC-32, the
header's own CRC-32) and the payload. Nothing is ever written in place: a record is appended whole, or it is cut off when the folder is opened next; a
payload that does not have its checksum is not given out. There is no index to keep right: the headers are read when the folder is opened.
When the quota is reached the oldest segment goes. One process at a time: the folder is locked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from threading import Lock
from zlib import crc32

from .claim import lock, make_folder

MAGIC = b"PDKKV001"
HEADER = Struct("<8s16sQII24x")
"""magic, key, payload bytes, CRC-32 of the payload, CRC-32 of the header before this field; 64 bytes."""
KEY_BYTES = 16
SEGMENT_BYTES = 256 << 20
Part = bytes | bytearray | memoryview


def pack_header(key: bytes, n_bytes: int, payload_crc: int) -> bytes:
    """A record's header."""
    head = HEADER.pack(MAGIC, key, n_bytes, payload_crc, 0)
    return HEADER.pack(MAGIC, key, n_bytes, payload_crc, crc32(head[:36]))


class PageStore:
    """A folder of segments. quota_bytes: of all segments together. Payloads have page_bytes each.

    `append` may be called by one other thread and `read` by any number, `close` when they have ended. Raises: Locked, UsageError when the folder cannot be used.
    """

    def __init__(self, folder: Path, page_bytes: int, quota_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder, self.page_bytes, self.quota_bytes = folder, page_bytes, quota_bytes
        self._record = HEADER.size + page_bytes
        self._per_segment = max(1, min(segment_bytes, quota_bytes // 2) // self._record)
        self._index: dict[bytes, tuple[int, int]] = {}
        self._files: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._guard = Lock()
        """Of the three above: a segment does not go while a reader finds its file."""
        self.n_cut = self.n_bad = self.n_dropped = 0
        """Records that were cut off at the opening, found bad when read, and dropped with old segments."""
        make_folder(folder)
        self._lock = lock(folder, folder / "lock")
        for path in sorted(folder.glob("????????.kv")):
            self._scan(int(path.stem, 16), path)
        self._make_room()

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def n_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(self._sizes.values())

    def append(self, key: bytes, payload: bytes | memoryview) -> None:
        """Keeps a page. Raises: OSError (a full disk); then nothing was kept."""
        if key in self._index:
            return
        number = max(self._files, default=0)
        if not number or self._sizes[number] >= self._per_segment * self._record:
            number = self._begin(number + 1)
        fd, at = self._files[number], self._sizes[number]
        n = self._whole(os.pwritev, fd, [pack_header(key, len(payload), crc32(payload)), payload], at)
        if n != self._record:
            os.ftruncate(fd, at)
            raise OSError(28, "the page cache's disk is full")
        with self._guard:
            self._sizes[number] = at + n
            self._index[key] = (number, at)
            self._make_room()

    def read(self, key: bytes, into: memoryview) -> bool:
        """Fills `into` with a page. False when there is none, or when it is not what was written: it is forgotten then."""
        with self._guard:
            where = self._index.get(key)
            fd = os.dup(self._files[where[0]]) if where is not None else -1
        if where is None:
            return False
        head = bytearray(HEADER.size)
        try:
            n = self._whole(os.preadv, fd, [head, into], where[1])
        except OSError:
            n = 0
        finally:
            os.close(fd)
        if n == self._record and self._is_whole(bytes(head), key) and HEADER.unpack(head)[3] == crc32(into):
            return True
        with self._guard:
            self.n_bad += 1
            if self._index.get(key) == where:
                del self._index[key]
        return False

    def _whole(self, call: Callable[..., int], fd: int, parts: Sequence[Part], at: int) -> int:
        """Reads or writes the parts (os.preadv, os.pwritev), however few bytes the system gives or takes at a time; how many there were."""
        done = call(fd, parts, at)
        while 0 < done < self._record:
            n = call(fd, _rest(parts, done), at + done)
            if not n:
                break
            done += n
        return done

    def close(self) -> None:
        """Lets go of the folder."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._index.clear()
        os.close(self._lock)

    def _is_whole(self, head: bytes, key: bytes = b"") -> bool:
        magic, found, n_bytes, _, crc = HEADER.unpack(head)
        is_ours = magic == MAGIC and n_bytes == self.page_bytes and crc == crc32(head[:36])
        return is_ours and (not key or found == key)

    def _scan(self, number: int, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        size, at = os.fstat(fd).st_size, 0
        while at + self._record <= size:
            head = os.pread(fd, HEADER.size, at)
            if not self._is_whole(head):
                break
            self._index[HEADER.unpack(head)[1]] = (number, at)
            at += self._record
        if at < size:
            self.n_cut += -(-(size - at) // self._record)
            os.ftruncate(fd, at)
        self._files[number], self._sizes[number] = fd, at

    def _begin(self, number: int) -> int:
        path = self.folder / f"{number:08x}.kv"
        self._files[number] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._sizes[number] = 0
        return number

    def _make_room(self) -> None:
        while len(self._files) > 1 and self.n_bytes > self.quota_bytes:
            oldest = min(self._files)
            gone = [key for key, (number, _) in self._index.items() if number == oldest]
            for key in gone:
                del self._index[key]
            self.n_dropped += len(gone)
            os.close(self._files.pop(oldest))
            del self._sizes[oldest]
            (self.folder / f"{oldest:08x}.kv").unlink(missing_ok=True)


def _rest(parts: Sequence[Part], done: int) -> list[memoryview]:
    """What follows the first `done` bytes of the parts."""
    found = []
    for part in parts:
        view = memoryview(part)
        found.append(view[min(done, len(view)) :])
        done -= min(done, len(view))
    return [view for view in found if len(view)]
