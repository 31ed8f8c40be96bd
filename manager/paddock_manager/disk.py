"""Small files that several processes share: JSON written whole or not at all, a lock that also holds on network file systems,
and whether the process behind a number still runs.

A lease is a file created with O_EXCL that names its holder, is kept fresh, and is locked by its holder for as long as that lives. It is
taken over only when nobody locks it and its holder is dead (same machine) or has not renewed it for a long time (another machine).
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from paddock_runner.errors import FileError, Locked

LAYOUT = 1
"""Version of the folder layout and of every record in it; a higher one is refused, not guessed at."""

RENEW_S = 10.0
STALE_S = 120.0
TRIES, PAUSE_S = 5, 0.1
"""Commands such as `paddock rm` hold a lease for a moment only."""


class Lease:
    """`with Lease(path):`. Raises: Locked, naming the process that holds it."""

    def __init__(self, path: Path, what: str = ""):
        self.path, self.what = path, what
        self._mine, self._fd = "", -1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        for attempt in range(TRIES):
            time.sleep(PAUSE_S * min(attempt, 1))
            if self._take(is_last=attempt == TRIES - 1):
                self._thread = threading.Thread(target=self._renew, daemon=True)
                self._thread.start()
                return self
            self.clear_stale()
        holder = _holder(self.path)
        pid, host = holder.get("pid", "?"), holder.get("host", "?")
        away = "" if host == os.uname().nodename else f"; where that is gone for good, remove {self.path}"
        raise Locked(
            f"{self.what or self.path} is in use by process {pid} on {host}",
            f"wait for it, or stop it{away}",
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
        os.close(self._fd)

    def _take(self, is_last: bool) -> bool:
        """Create the file, lock it and name us in it. False when somebody has it, or took its folder away."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileNotFoundError:
            if is_last:
                raise
            return False
        except FileExistsError as error:
            if error.filename == str(self.path):
                return False
            raise
        try:
            is_locked = lock(fd, fcntl.LOCK_EX)
            self._mine = os.urandom(16).hex()
            body = {"pid": os.getpid(), "host": os.uname().nodename, "nonce": self._mine, "born": born(os.getpid()), "is_locked": bool(is_locked)}
            os.write(fd, json.dumps(body).encode())
        except BaseException as error:
            self.path.unlink(missing_ok=True)
            os.close(fd)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            raise
        if not is_at(fd, self.path):
            os.close(fd)
            return False
        self._fd = fd
        return True

    def clear_stale(self) -> None:
        """Remove a dead holder's file. Who holds that file's lock, and it alone, may: what lies there since is another's."""
        try:
            fd = os.open(self.path, os.O_RDWR if os.access(self.path, os.W_OK) else os.O_RDONLY)
        except OSError:
            return
        try:
            is_free = lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_free is not False and is_at(fd, self.path) and self._is_stale(os.fstat(fd).st_mtime, bool(is_free)):
                self.path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _is_stale(self, renewed_at: float, is_free: bool) -> bool:
        """is_free: nobody locks the file, and locks work here. A number of a process says nothing across containers; the lock does."""
        holder = _holder(self.path)
        if holder.get("host") == os.uname().nodename:
            is_dead = is_free and bool(holder.get("is_locked"))
            return is_dead or not is_same_process(_number(holder, "pid"), _number(holder, "born"))
        age_s = time.time() - renewed_at
        return age_s > STALE_S or (not holder and age_s > 2.0)

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


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else who asks so is between reading and writing a file of this folder, which is made, where its file system has locks."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        lock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def is_held(path: Path) -> bool:
    """Does anybody have this lease? A dead holder's goes."""
    Lease(path).clear_stale()
    return path.exists()


def _number(holder: dict[str, Any], key: str) -> int:
    value = holder.get(key, 0)
    return int(value) if isinstance(value, int | float) and 0 <= value < 1 << 53 else 0


def lock(fd: int, how: int) -> bool | None:
    """Lock a file; False when another has it, None where the file system has no locks."""
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_open(path: Path) -> bool:
    """Does somebody hold a lock of this file, as who writes a log does for as long as it lives?"""
    try:
        with path.open("rb") as f:
            return lock(f.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB) is False
    except OSError:
        return False


def remove_unlocked(path: Path) -> None:
    """Remove a file that nobody locks, and of which nobody can have the lock meanwhile. Raises: Locked, FileNotFoundError."""
    with path.open("rb") as f:
        if lock(f.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB) is False or not is_at(f.fileno(), path):
            raise Locked(f"{path} is in use", path=str(path))
        path.unlink(missing_ok=True)


def is_at(fd: int, path: Path) -> bool:
    """Is the open file still the one of that name?"""
    try:
        there, ours = os.stat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


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
    except (ProcessLookupError, OverflowError):
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
