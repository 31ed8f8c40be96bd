"""The key of this machine's servers: made once, kept with mode 0600, never on a command line or in a log."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from paddock_runner.errors import FileError

from paddock_manager.disk import write_text
from paddock_manager.paths import Places


def key_file(places: Places) -> Path:
    """The file with the key; made when there is none.

    Raises: FileError when others may read it.
    """
    path = places.key_file
    if not path.exists():
        make(places)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FileError(f"{path} can be read by others", f"chmod 600 {path}, or `paddock key --new`", path=str(path))
    return path


def key(places: Places) -> str:
    """The key itself.

    Raises: FileError when the file is empty or open to others.
    """
    path = key_file(places)
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            return line.strip()
    raise FileError(f"{path} holds no key", "`paddock key --new` writes one", path=str(path))


def make(places: Places) -> str:
    """Write a new key over the old one."""
    path = places.key_file
    path.parent.mkdir(parents=True, exist_ok=True)
    os.chmod(path.parent, 0o700)
    fresh = "pk-" + secrets.token_urlsafe(32)
    write_text(path, fresh + "\n", mode=0o600)
    return fresh
