"""Tensors from files to memory that a device copies from: several threads read ahead, in parts of whole rows."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import FileError
from ..files.view import TensorView

READERS = 12
PIECE_BYTES = 8 << 20
PART_BYTES = 64 << 20
"""Rows that are read, copied and repacked together: large enough that the bus is busy, small enough that pinning memory for them takes no time."""
ROWS = 128
"""Parts end at multiples of it (pk_source)."""
BUFFERS = 3


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a matrix, one after the other in its file."""

    view: TensorView
    first_row: int
    n_rows: int

    @property
    def start(self) -> int:
        """Bytes of the rows before."""
        return self.view.weight_bytes // self.view.shape[0] * self.first_row

    @property
    def n_bytes(self) -> int:
        """Bytes of these rows."""
        return self.view.weight_bytes // self.view.shape[0] * self.n_rows

    @property
    def stop(self) -> int:
        """Bytes up to their end."""
        return self.start + self.n_bytes


def parts_of(view: TensorView, is_whole: bool) -> list[Part]:
    """A matrix in parts of PART_BYTES, or as a whole."""
    rows = view.shape[0]
    step = rows if is_whole else max(1, PART_BYTES * rows // view.weight_bytes // ROWS) * ROWS
    return [Part(view, at, min(step, rows - at)) for at in range(0, rows, step)]


class Staging:
    """One buffer that grows to the largest tensor; tensors are read into it with pread, so that page cache is not counted as ours.

    What is large is read in pieces by several threads: one copies from page cache at a fraction of the memory's speed, and leaves a disk's
    queue empty. ahead: buffers that parts are read into before they are asked for, () for none. parts: all of them, in the order of `next`.
    """

    def __init__(self, ahead: Sequence[memoryview] = (), parts: Sequence[Part] = ()) -> None:
        self._files: dict[Path, int] = {}
        self._buffer = mmap.mmap(-1, 1 << 20)
        self._readers = ThreadPoolExecutor(READERS, "reader")
        self._ahead = ahead
        self._turn = 0
        self._planned = deque(parts)
        self._coming: deque[tuple[memoryview, list[Future[None]]]] = deque()

    def next(self) -> memoryview:
        """The bytes of the next part; valid until the next `next`, or the next `read` where nothing is read ahead. Raises: FileError."""
        if not self._ahead:
            part = self._planned.popleft()
            return self._read(part.view, part.start, part.n_bytes)
        self._begin(max(1, len(self._coming)))
        target, reading = self._coming.popleft()
        self._begin(len(self._ahead) - 1)  # all buffers but the one that is given out
        return _finished(target, reading)

    def read(self, view: TensorView) -> memoryview:
        """The tensor's bytes; valid until the next read. Raises: FileError when the file is shorter than its header says."""
        return self._read(view, 0, view.n_bytes)

    def _begin(self, n: int) -> None:
        """Starts to read parts until n are on their way."""
        while self._planned and len(self._coming) < n:
            part = self._planned.popleft()
            target = self._ahead[self._turn][: part.n_bytes]
            self._turn = (self._turn + 1) % len(self._ahead)
            self._coming.append((target, self._start(part.view, part.start, target)))

    def _read(self, view: TensorView, start: int, n_bytes: int) -> memoryview:
        if len(self._buffer) < n_bytes:
            self._buffer.close()
            self._buffer = mmap.mmap(-1, n_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # making gigabytes page by page takes longer than reading them
                self._buffer.madvise(mmap.MADV_HUGEPAGE)
        target = memoryview(self._buffer)[:n_bytes]
        if n_bytes <= PIECE_BYTES:  # not behind all that is read ahead
            self._read_piece(view, start, target, slice(0, n_bytes))
            return target
        return _finished(target, self._start(view, start, target))

    def _start(self, view: TensorView, start: int, target: memoryview) -> list[Future[None]]:
        self._handle(view)
        pieces = [slice(at, min(at + PIECE_BYTES, len(target))) for at in range(0, len(target), PIECE_BYTES)]
        return [self._readers.submit(self._read_piece, view, start, target, piece) for piece in pieces]

    def _handle(self, view: TensorView) -> int:
        if view.path not in self._files:
            self._files[view.path] = os.open(view.path, os.O_RDONLY)
        return self._files[view.path]

    def _read_piece(self, view: TensorView, start: int, target: memoryview, piece: slice) -> None:
        handle, done = self._handle(view), piece.start
        while done < piece.stop:
            n = os.preadv(handle, [target[done : piece.stop]], view.offset + start + done)
            if n == 0:
                raise FileError(
                    f"{view.path}: truncated: tensor {view.name} needs bytes up to {view.offset + view.n_bytes}, the file ends at {os.fstat(handle).st_size}",
                    "download it again, or run paddock verify",
                )
            done += n

    def close(self) -> None:
        """Closes files and gives the buffer back."""
        self._readers.shutdown(cancel_futures=True)
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        with suppress(BufferError):  # an error on its way may still hold a view of it
            self._buffer.close()


def _finished(target: memoryview, reading: list[Future[None]]) -> memoryview:
    for piece in reading:
        piece.result()
    return target
