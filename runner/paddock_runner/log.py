"""One formatter for everything that the runner says: a line per event, `time level word key=value ...`, never a prompt's text."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from .errors import FileError

_LOGGER = logging.getLogger("paddock")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+/:@[]%,*")


def start(level: str, stream: IO[str] | None = None) -> None:
    """Sends log lines of this level and above to a stream (standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter())
    _LOGGER.handlers = [handler]
    _LOGGER.setLevel(level.upper())
    _LOGGER.propagate = False
    uvicorn = logging.getLogger("uvicorn")
    uvicorn.handlers, uvicorn.propagate = [handler], False
    uvicorn.setLevel(logging.ERROR)


def event(word: str, **facts: Any) -> None:
    """A line at level info. Facts that are None are left out."""
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info(line(word, facts))


def debug(word: str, **facts: Any) -> None:
    """A line at level debug."""
    if _LOGGER.isEnabledFor(logging.DEBUG):
        _LOGGER.debug(line(word, facts))


def warning(word: str, **facts: Any) -> None:
    """A line at level warning."""
    _LOGGER.warning(line(word, facts))


def error(word: str, fault: BaseException | None = None, **facts: Any) -> None:
    """A line at level error; with a traceback when a fault that nobody foresaw is given."""
    _LOGGER.error(line(word, facts), exc_info=fault)


def say(text: str, is_error: bool = False) -> None:
    """A sentence for people, on standard output or error. Where that is full or closed it is lost, and nothing stops for it."""
    stream = sys.stderr if is_error else sys.stdout
    try:
        stream.write(f"paddock-runner: {text}\n")
        stream.flush()
    except (OSError, FileError):
        pass


def line(word: str, facts: dict[str, Any]) -> str:
    """`word key=value ...`; values with spaces or quotes are quoted, so that a line stays one line."""
    return " ".join([word, *(f"{k}={_text(v)}" for k, v in facts.items() if v is not None)])


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and _PLAIN.issuperset(text):
        return text
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}"'


class Stages:
    """What the stages of a start took: in `rows`, and in the log from `speak` on, when it is known that there is something to start.

    Counted from the birth of a process. whose: the part of the runner that goes through them. A row: stage; at, seconds from
    the birth to its end; seconds that it took; cpu, the seconds of processor time that this process took meanwhile; more facts.
    """

    def __init__(self, pid: int, whose: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self._whose = whose
        self._born = birth(pid)
        self._then = birth(os.getpid())
        self._cpu = 0.0
        self._speaks = False

    def speak(self) -> None:
        """Logs the stages so far, and every one that comes."""
        self._speaks = True
        for row in self.rows:
            event("start", of=self._whose, **row)

    def end(self, stage: str, **facts: Any) -> None:
        """The stage is over."""
        now, cpu = time.monotonic(), time.process_time()
        row = {"stage": stage, "at": round(now - self._born, 3), "seconds": round(now - self._then, 3), "cpu": round(cpu - self._cpu, 3), **facts}
        self._then, self._cpu = now, cpu
        self.rows.append(row)
        if self._speaks:
            event("start", of=self._whose, **row)


def birth(pid: int) -> float:
    """When a process began, on the clock of time.monotonic(), to a hundredth of a second; now, where nobody says.

    Source: proc_pid_stat(5), field 22.
    """
    now = time.monotonic()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return now


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info and record.exc_info[0] else text
