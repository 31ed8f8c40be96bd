"""Small files that several processes share: JSON written whole or not at all, a lock that also holds on network file systems,
and whether the process behind a number still runs.

A lease is a file created with O_EXCL that names its holder and is kept fresh; it is taken over only when its holder is dead (same
machine) or has not renewed it for a long time (another machine).
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from paddock_runner.errors import FileError, Locked

LAYOUT = 1
"""Version of the folder layout and of every record in it; a higher one is refused, not guessed at."""

RENEW_S = 10.0
STALE_S = 120.0


class Lease:
    """`with Lease(path):`. Raises: Locked, naming the process that holds it."""

    def __init__(self, path: Path, what: str = ""):
        self.path, self.what = path, what
        self._mine = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(3):
            if self._take():
                self._thread = threading.Thread(target=self._renew, daemon=True)
                self._thread.start()
                return self
            self._clear_stale()
        holder = _holder(self.path)
        pid, host = holder.get("pid", "?"), holder.get("host", "?")
        raise Locked(
            f"{self.what or self.path} is in use by process {pid} on {host}",
            "wait for it, or stop it",
            path=str(self.path),
            pid=pid,
            host=host,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if _holder(self.path).get("nonce") == self._mine:
            self.path.unlink(missing_ok=True)

    def _take(self) -> bool:
        self._mine = os.urandom(16).hex()
        body = {"pid": os.getpid(), "host": os.uname().nodename, "nonce": self._mine, "born": born(os.getpid())}
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(json.dumps(body))
        return True

    def _clear_stale(self) -> None:
        """Move a dead holder's file aside under a unique name, so that only one taker removes it."""
        try:
            age = time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return
        holder = _holder(self.path)
        here = holder.get("host") == os.uname().nodename
        if here:
            stale = not is_same_process(int(holder.get("pid", 0)), float(holder.get("born", 0)))
        else:
            stale = age > STALE_S or (not holder and age > 2.0)
        if stale:
            aside = self.path.with_name(f"{self.path.name}.{os.urandom(4).hex()}")
            try:
                os.rename(self.path, aside)
            except FileNotFoundError:
                return
            aside.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                os.utime(self.path)
            except OSError:
                return


def _holder(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def born(pid: int) -> float:
    """When a process started, in clock ticks since boot: tells it from a later one with the same number. 0 if unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return 0.0 if fields[0] == "Z" else float(fields[19])


def is_same_process(pid: int, born_at: float) -> bool:
    """Does this process still run? A zombie does not; born_at 0 means that only the number is compared."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    if not os.path.exists("/proc/self/stat"):
        return True
    now = born(pid)
    return now != 0.0 and (born_at == 0.0 or now == born_at)


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system that a path lies on ("ext4", "nfs4"), by the longest mount point above it; "" where that is not told."""
    try:
        rows = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return ""
    above = [(len(row[1]), row[2]) for row in rows if len(row) > 2 and path.resolve().is_relative_to(row[1].replace("\\040", " "))]
    return max(above)[1] if above else ""


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when the file is not there.

    Raises: FileError when it is there and damaged, or from a newer layout.
    """
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise FileError(
            f"{path}: damaged record", "remove it; files beside it can be added again", path=str(path)
        ) from None
    if not isinstance(body, dict):
        raise FileError(f"{path}: damaged record", "remove it; files beside it can be added again", path=str(path))
    layout = body.get("layout", LAYOUT)
    if not isinstance(layout, int) or layout > LAYOUT:
        raise FileError(
            f"{path}: layout {layout} is newer than this Paddock knows ({LAYOUT})", "update Paddock", path=str(path)
        )
    return body


def tail(log: Path, n_lines: int) -> list[str]:
    """The last lines of a log; none of one that is not there."""
    try:
        with log.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 64 * 1024 - 400 * n_lines))
            return f.read().decode("utf-8", "replace").splitlines()[-n_lines:] if n_lines else []
    except OSError:
        return []


def write_json(path: Path, body: dict[str, Any] | list[Any], mode: int = 0o644) -> None:
    """Write under a temporary name, sync, rename: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(body, indent=1, ensure_ascii=False)
    write_text(path, text.encode("utf-8", "backslashreplace").decode(), mode)  # bytes of names that are not UTF-8 as JSON's own escapes


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """As write_json, for any text."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # what a descriptor refuses names no file
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
