"""Who uses a page cache: found out before a model is loaded for it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ..errors import Locked, UsageError


def make_folder(folder: Path) -> None:
    """A folder of pages, for its owner alone. Raises: UsageError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
    except OSError as error:
        raise _unusable(folder, error) from None


def lock(folder: Path, path: Path) -> int:
    """The descriptor of a file that is locked until it is closed, or its process ends. folder: what the file stands for.

    Raises: Locked, UsageError.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BlockingIOError:
        os.close(fd)
        raise Locked(f"the page cache {folder} is used by another runner", "give each runner its own --cache-dir") from None
    except OSError as error:
        os.close(fd)
        raise _unusable(folder, error) from None


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"the page cache {folder} cannot be used: {error.strerror}", "check --cache-dir")
