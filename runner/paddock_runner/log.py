"""One formatter for everything that the runner says: a line per event, `time level word key=value ...`, never a prompt's text."""

from __future__ import annotations

import logging
import sys
import time
from typing import IO, Any

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


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info and record.exc_info[0] else text
