"""Bytes of one file, near or far: a mapped local file, or a window that grows by range requests."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import FileError, UnknownModel

MAX_HEADER_BYTES = 256 << 20
"""No header may be longer than this; real ones are up to about 20 MiB."""

WINDOWS = (8 << 20, 24 << 20, 40 << 20)
"""How much of a remote file is here after the first, second and third request."""

SAFETENSORS_WINDOW = 128 << 10
"""The first window of a safetensors file, whose first eight bytes say how long its header is."""


def first_window(name: str) -> int:
    """How much of a remote file the first request asks for."""
    return SAFETENSORS_WINDOW if name.endswith(".safetensors") else WINDOWS[0]


class WindowTooSmall(Exception):
    """A parser ran off the window although the file goes on. Caught by the parser's entry point, which lets the source grow."""


class LocalFile:
    """A regular file, mapped read-only.

    Raises: UnknownModel when there is none; FileError when it is empty, not a regular file or unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            facts = os.stat(path)
        except OSError as e:
            raise UnknownModel(f"{path}: {e.strerror or 'cannot be opened'}", name=str(path)) from None
        if not stat.S_ISREG(facts.st_mode):
            raise FileError(f"{path}: not a regular file", path=str(path))
        self.size = facts.st_size
        if self.size == 0:
            raise FileError(f"{path}: the file is empty (0 bytes)", path=str(path), need=1, have=0)
        self._identity = (facts.st_size, facts.st_mtime_ns, facts.st_ino)
        try:
            with open(path, "rb") as f:
                self.buffer: mmap.mmap | bytes = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as e:
            raise FileError(f"{path}: cannot be read: {e}", path=str(path)) from None

    def grow(self) -> None:
        """A mapped file is here completely: running off it means that it is truncated."""
        raise FileError(
            f"{self.path}: truncated, {self.size} bytes are not enough", path=str(self.path), have=self.size
        )

    def read(self, offset: int, n_bytes: int) -> memoryview:
        """Those bytes, not copied. Raises: FileError when the file changed since it was opened, or is too short."""
        try:
            facts = os.stat(self.path)
            now = (facts.st_size, facts.st_mtime_ns, facts.st_ino)
        except OSError:
            now = (-1, 0, 0)
        if now != self._identity:
            raise FileError(f"{self.path}: the file was changed or removed while it was in use", path=str(self.path))
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.size:
            raise FileError(
                f"{self.path}: truncated, need {offset + n_bytes} bytes, have {self.size}",
                path=str(self.path),
                need=offset + n_bytes,
                have=self.size,
            )
        return memoryview(self.buffer)[offset : offset + n_bytes]


class RemoteFile:
    """The head of a file elsewhere, fetched by at most three range requests.

    read(offset, n_bytes) returns those bytes (fewer at the end of the file). size: of the whole file, or None when unknown.
    Raises what `read` raises.
    """

    def __init__(self, name: str, read: Callable[[int, int], bytes], size: int | None = None) -> None:
        self.path = Path(name)
        self._read = read
        self.n_requests = 0
        self.size = size if size is not None else 1 << 62
        self._size_known = size is not None
        self.buffer: mmap.mmap | bytes = b""
        self.grow()
        if not self.buffer:
            raise FileError(f"{name}: the file is empty (0 bytes)", path=name, need=1, have=0)

    def grow(self) -> None:
        """One more request. Raises: FileError when the header is over the limit."""
        have = len(self.buffer)
        if self.n_requests >= len(WINDOWS) or have >= self.size:
            raise FileError(
                f"{self.path}: the header is longer than {have} bytes, the limit", path=str(self.path), have=have
            )
        want = min(self._window(), self.size) - have
        got = self._read(have, want)
        self.n_requests += 1
        self.buffer = bytes(self.buffer) + bytes(got[:want])
        if len(got) < want:
            if self._size_known:
                raise FileError(
                    f"{self.path}: the server sent {len(got)} bytes at {have}, not {want}",
                    path=str(self.path),
                    need=want,
                    have=len(got),
                )
            self.size, self._size_known = have + len(got), True

    def _window(self) -> int:
        """How much is to be here after the next request."""
        if self.n_requests == 0:
            return first_window(str(self.path))
        if self.n_requests == 1 and self.path.suffix == ".safetensors":
            told = 8 + int.from_bytes(self.buffer[:8], "little")
            return min(max(told, 2 * SAFETENSORS_WINDOW), WINDOWS[-1])
        return WINDOWS[self.n_requests]


Source = LocalFile | RemoteFile
