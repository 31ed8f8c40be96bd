"""The keys of a file as it is now: who is let in changes while a server runs, without a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..errors import FileError
from .auth import Key, read_keys

LOOK_S = 1.0
"""For so long a change may go unnoticed."""


class KeyFile:
    """The keys of a file. It is looked at when somebody calls, once in LOOK_S at most, and read when it is another than before.

    A file that holds no keys any more, or cannot be read, changes nothing: those before stay, and tell hears of it once.
    Raises: FileError when the first reading fails.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self._path, self._tell = path, tell
        self._seen = self._look()
        self._keys = read_keys(path)
        self._has_failed = False
        self._next_s = time.monotonic() + LOOK_S

    def now(self) -> tuple[Key, ...]:
        """Whoever is let in now."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + LOOK_S
            seen = self._look()
            if (is_other := seen != self._seen) or self._has_failed:
                self._seen = seen
                self._read(is_other)
        return self._keys

    def _read(self, is_told: bool) -> None:
        try:
            self._keys = read_keys(self._path)
            self._has_failed = False
        except FileError as error:
            self._has_failed = True  # it is tried again: that no more files can be opened, say, passes, and leaves the file as it was
            if is_told:
                self._tell(f"{error}; the keys of before are let in")

    def _look(self) -> tuple[int, int, int]:
        """What changes with the file's content."""
        try:
            facts = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (facts.st_ino, facts.st_ctime_ns, facts.st_size)
