"""What a tool-call dialect is, and the loop that finds calls between ordinary text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from ..feed import Ended, Feed, FeedParser, Malformed, Wait

Schemas = Mapping[str, Mapping[str, Any]]
"""Parameters of the tools that may be called (JSON schema), by the tool's name."""

Read = Callable[[Feed, str, Schemas], Wait]
Takes = Callable[[str, str], bool]
"""Whether a call without markers is one, from its tool and its arguments."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of model writes calls.

    starts: markers that open a block of calls; "" means that a call may also stand bare at the very beginning.
    read: generator that reads a block after its marker, from (feed, marker, schemas); it raises Malformed for what is none.
    fits: whether a chat template speaks this dialect. hidden: special tokens inside blocks that must reach the parser.
    example: a call of get_weather(city="Paris") as the model writes it. parameter: what stands around "Paris" in it, where that cannot be told.
    is_loose: models also write a call of a tool that was given bare, as all they say: it is one where nothing holds their calls.
    force: rules of a forced call, from (its number, the tool's name, its schema, how literal text is spelled), where the example is no pattern.
    """

    name: str
    starts: tuple[str, ...]
    read: Read
    fits: Callable[[str], bool]
    hidden: tuple[str, ...] = ()
    example: str = ""
    parameter: tuple[str, str] | None = None
    is_loose: bool = False
    force: Callable[[int, str, Mapping[str, Any], Callable[[str], str]], list[str]] | None = None


class ToolParser(FeedParser):
    """Finds calls in the text of an answer, piece by piece. takes: whether that is a call, too, which a loose dialect writes bare (None: none is)."""

    def __init__(self, dialect: Dialect, schemas: Schemas, takes: Takes | None = None) -> None:
        feed = Feed()
        feed.takes = takes or feed.takes
        may_be_bare = "" in dialect.starts or (takes is not None and dialect.is_loose)
        super().__init__(feed, _read_answer(feed, dialect, schemas, may_be_bare))


def _read_answer(feed: Feed, dialect: Dialect, schemas: Schemas, may_be_bare: bool) -> Generator[None, None, None]:
    markers = [m for m in dialect.starts if m]
    gap = ""
    if may_be_bare:
        try:
            yield from feed.space()
        except Ended:
            feed.text(feed.buffer)
            return
        gap = feed.buffer[: feed.at]
        if not any(m.startswith(feed.buffer[feed.at]) for m in markers):
            yield from _read_block(feed, dialect, "", schemas, gap)
            gap = ""
    if not markers:
        markers = ["\0"]  # nothing opens a call any more
    follows_call = feed.n_calls > 0
    while True:
        shower = _Shower(feed, gap, follows_call)
        try:
            _, marker = yield from feed.until(markers, shower.tell)
        except Ended:
            shower.end()
            return
        n_calls = feed.n_calls
        follows_call = yield from _read_block(feed, dialect, marker, schemas, shower.gap)
        gap = ""
        if feed.n_calls == n_calls:
            follows_call = False


class _Shower:
    """Tells text on, keeping back white space at its end: before a call it is left out. So is white space after a call."""

    def __init__(self, feed: Feed, gap: str, follows_call: bool) -> None:
        self._feed = feed
        self.gap = gap
        self._is_bare = follows_call

    def tell(self, text: str) -> None:
        """More text."""
        text = self.gap + text
        if self._is_bare:
            text = text.lstrip()
        kept = text.rstrip()
        self.gap = text[len(kept) :]
        if kept:
            self._is_bare = False
            self._feed.text(kept)

    def end(self) -> None:
        """No more text."""
        if not self._is_bare:
            self._feed.text(self.gap)


def _read_block(feed: Feed, dialect: Dialect, marker: str, schemas: Schemas, gap: str) -> Wait:
    """Reads the calls after a marker; what is no call becomes text. Returns whether there was one."""
    begin, n_calls = feed.at, feed.n_calls
    try:
        yield from dialect.read(feed, marker, schemas)
        if feed.n_calls > n_calls:
            return True
        feed.at = begin
    except Malformed:
        if feed.n_calls > n_calls:
            feed.break_call()
            return True
        feed.at = begin
    except Ended:
        if feed.n_calls > n_calls:
            feed.break_call()
            feed.at = len(feed.buffer)
            return True
        feed.at = begin
    feed.text(gap + marker)
    return False
