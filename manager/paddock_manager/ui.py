"""The only file that prints: results on standard output, talk on standard error, errors as one sentence and a hint.

With --json, standard output holds exactly one JSON document, errors included; without a terminal there are no bars and no colour.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from paddock_runner.errors import FileError, PaddockError

SCHEMA_VERSION = 1
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LAYOUT = "\n\t"
"""Characters that lines may hold beside those that can be seen."""


class OutputGone(Exception):
    """Who read our results has read enough, as `head` does."""


def nowhere(stream: TextIO) -> None:
    """What a stream still holds, and all that comes, is dropped: or the interpreter's end would try again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Ui:
    """Printing for one command.

    as_json: results as JSON. quiet: no talk. may_color: the user did not ask for plain text; terminals only, all the same.
    progress_kind: auto, bar, ndjson or none.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False, may_color: bool = False):
        self.as_json = as_json
        self.quiet = quiet
        self.out: TextIO = sys.stdout
        self.err: TextIO = sys.stderr
        self.out_color = may_color and self.out.isatty()
        self.err_color = may_color and self.err.isatty()
        self.progress_kind = "auto"

    def say(self, text: str) -> None:
        """Talk: what is being done. Silent with --quiet."""
        if not self.quiet:
            self._write(self.err, plain(text, keep=LAYOUT) + "\n")

    def warn(self, text: str) -> None:
        """Something the user must know, said even with --quiet."""
        self._write(self.err, self._paint("warning: ", "33", self.err_color) + plain(text, keep=LAYOUT) + "\n")

    def line(self, text: str = "") -> None:
        """One line of result, for people."""
        self._write(self.out, plain(text, keep=LAYOUT) + "\n")

    def piece(self, text: str) -> None:
        """A piece of streamed result, shown at once."""
        self._write(self.out, text)

    def told(self, text: str) -> str:
        """A model's words as this output may have them: on a terminal without control characters, which would drive it; elsewhere as they are."""
        return _CONTROL.sub("", text) if self.out.isatty() else text

    def result(self, kind: str, data: dict[str, Any], human: Callable[[Ui], None]) -> None:
        """The command's result: `data` as `paddock.<kind>/1` with --json, else what `human` prints."""
        if self.as_json:
            document = {"schema": f"paddock.{kind}/{SCHEMA_VERSION}", **data}
            self._document(document)
        else:
            human(self)

    def event(self, data: dict[str, Any]) -> None:
        """One line of NDJSON on standard error, for scripts that follow progress."""
        import json

        self._write(self.err, json.dumps(data, ensure_ascii=False) + "\n")

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
        """Columns, as wide as their widest cell; `right` lists the columns set flush right."""
        body = [[plain(cell) for cell in row] for row in rows]
        widths = [max(len(r[i]) for r in [list(headers), *body]) for i in range(len(headers))]
        for number, row in enumerate([list(headers), *body]):
            cells = [c.rjust(widths[i]) if i in right else c.ljust(widths[i]) for i, c in enumerate(row)]
            text = "  ".join(cells).rstrip()
            self._write(self.out, (self._paint(text, "1", self.out_color) if number == 0 else text) + "\n")

    def pairs(self, rows: Iterable[tuple[str, str]]) -> None:
        """A list of names and values."""
        kept = [(k, plain(v)) for k, v in rows]
        width = max((len(k) for k, _ in kept), default=0)
        for name, value in kept:
            self._write(self.out, f"{self._paint(name.ljust(width), '1', self.out_color)}  {value}".rstrip() + "\n")

    def fail(self, error: PaddockError) -> int:
        """Say what went wrong, where it can be said, and return the exit code."""
        try:
            self._say_error(error)
        except (OSError, FileError, OutputGone):
            pass  # what the words would go to is full or gone
        for stream in (self.out, self.err):
            try:
                stream.flush()
            except OSError:
                nowhere(stream)
        return error.exit_code

    def _say_error(self, error: PaddockError) -> None:
        self._write(self.err, self._paint("error: ", "31", self.err_color) + plain(error.message, keep="\n") + "\n")
        if error.hint:
            self._write(self.err, self._paint("hint:  ", "36", self.err_color) + plain(error.hint, keep="\n") + "\n")
        if self.as_json:
            body = {"code": error.code, "exit_code": error.exit_code, "message": error.message, "hint": error.hint}
            self._document({"schema": f"paddock.error/{SCHEMA_VERSION}", "error": {**body, "facts": error.facts}})

    def _document(self, document: dict[str, Any]) -> None:
        import json

        text = json.dumps(document, indent=2, ensure_ascii=False, default=str)
        self._write(self.out, text.encode("utf-8", "backslashreplace").decode() + "\n")  # bytes of names that are not UTF-8 as JSON's own escapes

    def progress(self, label: str, total_bytes: int, done_bytes: int = 0) -> Progress:
        """One bar for the whole job, on a terminal; NDJSON lines when asked for; else nothing."""
        kind = self.progress_kind
        if kind == "auto":
            kind = "bar" if self.err.isatty() and not self.quiet else "none"
        return Progress(self, kind, label, total_bytes, done_bytes)

    def is_read(self) -> bool:
        """Is anybody left who reads our results?"""
        import select

        try:
            poll = select.poll()
            poll.register(self.out.fileno(), 0)
            return not poll.poll(0)
        except (OSError, ValueError):  # it is no file
            return True

    def can_ask(self) -> bool:
        """Is a person at the other end?"""
        return sys.stdin.isatty() and self.err.isatty() and not self.as_json

    def _paint(self, text: str, code: str, on: bool) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if on else text

    def _write(self, stream: TextIO, text: str) -> None:
        """Raises: OutputGone when nobody reads results any more. Talk that nobody hears is lost, and stops no work."""
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(text.encode(stream.encoding or "ascii", "backslashreplace").decode(stream.encoding or "ascii"))
            stream.flush()
        except BrokenPipeError:
            nowhere(stream)
            if stream is self.out:
                raise OutputGone from None


class Progress:
    """A bar that knows its rate. Drawn at most ten times a second."""

    def __init__(self, ui: Ui, kind: str, label: str, total_bytes: int, done_bytes: int):
        self.ui, self.kind, self.label = ui, kind, label
        self.total_bytes, self.done_bytes = total_bytes, done_bytes
        self._start_bytes = done_bytes
        self._lock = threading.Lock()
        self._start = self._drawn = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()
        if self.kind == "bar":
            self.ui._write(self.ui.err, "\n")

    def move_by(self, n_bytes: int) -> None:
        """So many bytes more are done (fewer, when negative). May be called from several threads."""
        with self._lock:
            self.done_bytes += n_bytes
        now = time.monotonic()
        if now - self._drawn >= (0.1 if self.kind == "bar" else 0.5):
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        if self.kind == "none":
            return
        rate = (self.done_bytes - self._start_bytes) / max(1e-6, time.monotonic() - self._start)
        if self.kind == "ndjson":
            facts = {"done_bytes": self.done_bytes, "total_bytes": self.total_bytes, "bytes_per_s": round(rate)}
            self.ui.event({"event": "progress", "label": self.label, **facts})
            return
        share = self.done_bytes / self.total_bytes if self.total_bytes else 1.0
        bar = ("█" * int(share * 24)).ljust(24, "░")
        left = (self.total_bytes - self.done_bytes) / rate if rate > 0 else 0
        text = f"{share:4.0%}  {size(self.done_bytes)} of {size(self.total_bytes)}"
        speed = f"  {size(rate)}/s  {span(left)} left"
        forms = (f"{self.label}  {bar} {text}{speed}", f"{self.label}  {text}{speed}", f"{self.label}  {text}", text, f"{share:4.0%}")
        width = self._width()  # a line that wraps cannot be drawn over
        shown = next((form for form in forms if len(form) < width), forms[-1])
        self.ui._write(self.ui.err, f"\r{shown}\x1b[K")

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self.ui.err.fileno()).columns or 80
        except (OSError, ValueError):
            return 80


def size(n_bytes: float) -> str:
    """Bytes for people: 93.8 MiB."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.{1 if value >= 10 else 2}f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def gib(n_bytes: float) -> str:
    """Bytes as GiB, always."""
    return f"{n_bytes / 2**30:.2f}"


def count(number: float) -> str:
    """A count for people: 135M, 27.3B."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= factor:
            value = number / factor
            return f"{value:.0f}{letter}" if value >= 100 else f"{value:.3g}{letter}"
    return f"{number:.0f}"


def span(seconds: float) -> str:
    """Seconds for people: 42 s, 3 min, 2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


def ago(then: float, now: float | None = None) -> str:
    """A moment in the past for people; `then` in seconds since 1970."""
    passed = max(0.0, (time.time() if now is None else now) - then)
    return "just now" if passed < 5 else f"{span(passed)} ago"


def plain(text: str, keep: str = "") -> str:
    """Text without control characters: names from files must not drive the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else "\ufffd" for c in text)
