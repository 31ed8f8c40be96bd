"""Text that arrives in pieces, read as if it were whole: the ground that parsers of answers stand on.

A parser is a generator that reads from a Feed with `yield from`; where the text has not arrived yet it waits. So a parser is
written once, in straight lines, and what it finds cannot depend on how the text was split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any

from .events import CallArguments, CallEnd, CallStart, Event, Text, Thought

Wait = Generator[None, None, Any]
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_COMPACT_CHARACTERS = 1 << 16


@lru_cache(maxsize=256)
def _first_characters(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("[" + "".join(sorted({re.escape(m[0]) for m in markers})) + "]")


class Malformed(Exception):
    """What follows is not what the dialect says: it is ordinary text."""


class Ended(Exception):
    """The text ended where more was needed."""


class Feed:
    """The text so far and the events found in it. `at`: position of the reader in `buffer`."""

    def __init__(self) -> None:
        self.buffer = ""
        self.at = 0
        self.is_ended = False
        self.n_calls = 0
        self.is_call_open = False
        self.takes: Callable[[str, str], bool] = lambda name, arguments: True
        """Whether a call without markers is one."""
        self._events: list[Event] = []
        self._told: list[str] = []
        self._waits: tuple[Callable[[str], None], re.Pattern[str]] | None = None

    def add(self, text: str) -> bool:
        """More text. False when that was all: plain text where the reader waits for a marker, told on at once."""
        if self._waits is not None and self._waits[1].search(text) is None:
            self._waits[0](text)
            return False
        self.buffer += text
        return True

    def take(self) -> list[Event]:
        """The events found since the last time."""
        events, self._events = self._events, []
        return events

    def compact(self, is_certain: bool = True) -> int:
        """Forget text that has been read, unless it may have to be read again; returns the new position."""
        if self.at > _COMPACT_CHARACTERS and is_certain:
            self.buffer = self.buffer[self.at :]
            self.at = 0
        return self.at

    # -- events ---------------------------------------------------------------------------------------------------------

    def text(self, text: str) -> None:
        """Tell of text."""
        if text:
            self._events.append(Text(text))

    def thought(self, text: str) -> None:
        """Tell of reasoning."""
        if text:
            self._events.append(Thought(text))

    def start_call(self, name: str, call_id: str = "") -> None:
        """Tell of a call; its arguments follow. Raises: Malformed for a name that can be none."""
        if not name or len(name) > 256 or any(c in name for c in "\n{}<>\"'"):
            raise Malformed
        self._events.append(CallStart(self.n_calls, name, call_id))
        self.n_calls += 1
        self.is_call_open = True
        self._told.clear()

    def arguments(self, text: str) -> None:
        """Tell of more arguments of the open call."""
        if text:
            self._events.append(CallArguments(self.n_calls - 1, text))
            self._told.append(text)

    def end_call(self) -> None:
        """Tell that the open call has ended (nothing when none is open)."""
        self._end_call(True)

    def break_call(self) -> None:
        """Tell that nothing more comes of the open call, whose end has not been seen: it is complete if its arguments are."""
        self._end_call(_is_object("".join(self._told)))

    def _end_call(self, is_complete: bool) -> None:
        if self.is_call_open:
            self._events.append(CallEnd(self.n_calls - 1, is_complete))
            self.is_call_open = False

    def call(self, name: str, arguments: str, call_id: str = "") -> None:
        """Tell of a whole call."""
        self.start_call(name, call_id)
        self.arguments(arguments)
        self.end_call()

    # -- reading --------------------------------------------------------------------------------------------------------

    def more(self) -> Wait:
        """Waits for more text. Raises: Ended."""
        if self.is_ended:
            raise Ended
        yield

    def peek(self) -> Wait:
        """The next character, not consumed."""
        while self.at >= len(self.buffer):
            yield from self.more()
        return self.buffer[self.at]

    def space(self) -> Wait:
        """Skips white space; returns the next character."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at].isspace():
                self.at += 1
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            yield from self.more()

    def accept(self, *options: str) -> Wait:
        """Consumes and returns the longest of `options` that comes next, or "" when none does."""
        while True:
            rest = self.buffer[self.at :] if len(self.buffer) - self.at < 256 else self.buffer[self.at : self.at + 256]
            if not self.is_ended and any(len(rest) < len(o) and o.startswith(rest) for o in options):
                yield
                continue
            best = max((o for o in options if rest.startswith(o)), key=len, default="")
            self.at += len(best)
            return best

    def expect(self, *options: str) -> Wait:
        """As `accept`. Raises: Malformed when none comes next (Ended when the text ended before that was sure)."""
        found = yield from self.accept(*options)
        if not found:
            if self.is_ended and any(o.startswith(self.buffer[self.at :]) for o in options):
                raise Ended
            raise Malformed
        return found

    def until(self, markers: Sequence[str], tell: Callable[[str], None] | None = None, limit: int = 0) -> Wait:
        """Consumes text up to the first of `markers` and that marker; returns (text, marker).

        tell: gets the text as it comes instead (then "" is returned). limit: Raises Malformed when the text is longer.
        Raises: Ended when the text ends first (then all of it has been told or is still there).
        """
        longest, begin, look = max(map(len, markers)), self.at, self.at
        while True:
            found = [(at, -len(m), m) for m in markers if (at := self.buffer.find(m, look)) >= 0]
            best = min(found, default=None)
            end = (
                self._partial(markers, max(look, len(self.buffer) - longest + 1))
                if not self.is_ended
                else len(self.buffer)
            )
            if best is not None and (best[0] < end or self.is_ended):
                at, _, marker = best
                self.at = at + len(marker)
                if tell is not None:
                    tell(self.buffer[begin:at])
                    return "", marker
                return self.buffer[begin:at], marker
            if limit and len(self.buffer) - begin > limit:
                raise Malformed
            if tell is not None:
                tell(self.buffer[begin:end])
                self.at = end
                begin = end = self.compact()
                if end == len(self.buffer):
                    self._waits = tell, _first_characters(tuple(markers))
            look = end
            yield from self.more()
            self._waits = None

    def _partial(self, markers: Sequence[str], begin: int) -> int:
        """Where the earliest suffix starts that some marker begins with; the length of the buffer if none does."""
        size = len(self.buffer)
        for match in _first_characters(tuple(markers)).finditer(self.buffer, begin):
            tail = self.buffer[match.start() :]
            if any(len(tail) < len(m) and m.startswith(tail) for m in markers):
                return match.start()
        return size

    def string(self) -> Wait:
        """A JSON string, decoded."""
        raw: list[str] = []
        yield from self.raw_string(raw.append)
        try:
            return json.loads("".join(raw), strict=False)
        except ValueError:
            raise Malformed from None

    def raw_string(self, tell: Callable[[str], None]) -> Wait:
        """A JSON string as it stands, quotes included."""
        if (yield from self.peek()) != '"':
            raise Malformed
        done = self.at
        self.at += 1
        while True:
            match = _STRING_END.search(self.buffer, self.at)
            if match is not None and (match.group() == '"' or match.end() < len(self.buffer)):
                self.at = match.end() + (match.group() == "\\")
                if match.group() == '"':
                    tell(self.buffer[done : self.at])
                    return None
                continue
            self.at = match.start() if match is not None else len(self.buffer)
            tell(self.buffer[done : self.at])
            done = self.compact(self.is_call_open)
            yield from self.more()

    def value(self, tell: Callable[[str], None]) -> Wait:
        """A JSON value as it stands, told as it comes."""
        first = yield from self.space()
        if first == '"':
            yield from self.raw_string(tell)
        elif first in "{[":
            yield from self._nested(tell)
        elif first in "-0123456789tfn":
            done = self.at
            while (match := _SCALAR_END.search(self.buffer, self.at)) is None:
                self.at = len(self.buffer)
                if self.is_ended:
                    break
                yield
            self.at = match.start() if match is not None else len(self.buffer)
            tell(self.buffer[done : self.at])
        else:
            raise Malformed

    def _nested(self, tell: Callable[[str], None]) -> Wait:
        closers: list[str] = []
        done = self.at
        while True:
            match = _STRUCTURE.search(self.buffer, self.at)
            if match is None:
                self.at = len(self.buffer)
                tell(self.buffer[done : self.at])
                done = self.compact(self.is_call_open)
                yield from self.more()
                continue
            self.at = match.start()
            char = match.group()
            if char == '"':
                tell(self.buffer[done : self.at])
                yield from self.raw_string(tell)
                done = self.at
                continue
            self.at += 1
            if char in "{[":
                closers.append("}" if char == "{" else "]")
            elif char != closers.pop():
                tell(self.buffer[done : self.at])
                raise Malformed
            if not closers:
                tell(self.buffer[done : self.at])
                return


class FeedParser:
    """Runs a generator that reads from a feed: what every parser of answers does with the pieces it is given."""

    def __init__(self, feed: Feed, run: Generator[None, None, None]) -> None:
        self._feed = feed
        self._run: Generator[None, None, None] | None = run
        self._advance()

    def push(self, text: str) -> list[Event]:
        """Events that are sure after this piece."""
        if self._feed.add(text):
            self._advance()
        return self._feed.take()

    def finish(self) -> list[Event]:
        """The last events: no more text will come."""
        self._feed.is_ended = True
        self._advance()
        return self._feed.take()

    def _advance(self) -> None:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None


def _is_object(text: str) -> bool:
    """Arguments are a JSON object: a number is one, too, where it was cut off."""
    try:
        return isinstance(json.loads(text, parse_constant=_no_constant), dict)
    except (ValueError, RecursionError):
        return False


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
