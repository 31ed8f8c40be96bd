"""Splits reasoning from the answer: a block between two markers at its beginning, or messages with recipients (harmony, Muse)."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

from .events import Event, Text
from .feed import Ended, Feed, FeedParser, Malformed, Wait

_HEADER_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """start, end: markers around reasoning. fits: what a template holds whose model uses them. after: dropped behind `end`."""

    start: str
    end: str
    fits: Callable[[str], bool]
    after: str = ""


def _both(start: str, end: str) -> ReasoningMarks:
    return ReasoningMarks(start, end, lambda t: start in t or end in t)


MARKS: tuple[ReasoningMarks, ...] = (
    ReasoningMarks("<think:opensource>", "</think:opensource>", lambda t: "hy_eos" in t and ":opensource" in t),
    ReasoningMarks("<mm:think>", "</mm:think>", lambda t: "mm:think" in t),
    _both("<seed:think>", "</seed:think>"),
    _both("[THINK]", "[/THINK]"),
    _both("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<|channel>thought", "<channel|>", lambda t: "<|channel>" in t),
    _both("<|inner_prefix|>", "<|inner_suffix|>"),
    _both("<thought>", "</thought>"),
    ReasoningMarks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", lambda t: "[BEGIN FINAL RESPONSE]" in t),
    ReasoningMarks(
        "Here is my thought process:",
        "Here is my response:",
        lambda t: "Here is my thought process:" in t and "<think>" not in t,
    ),
    _both("<think>", "</think>"),
)


def marks_of(template: str) -> ReasoningMarks | None:
    """The markers that the model of this chat template puts around its reasoning, or None."""
    return next((m for m in MARKS if m.fits(template)), None)


class ReasoningSplitter(FeedParser):
    """Thoughts and text of an answer, piece by piece. White space around the reasoning is left out.

    is_open: the prompt already opened the block. Only a block at the beginning counts: later the markers are ordinary text.
    """

    def __init__(self, marks: ReasoningMarks, is_open: bool) -> None:
        feed = Feed()
        super().__init__(feed, _split(feed, marks, is_open))

    @property
    def is_done(self) -> bool:
        """Whether the rest is text as it is."""
        return self._run is None

    def push(self, text: str) -> list[Event]:
        """Events that are sure after this piece; after the reasoning, text goes through as it is."""
        if self._run is None:
            return [Text(text)] if text else []
        return super().push(text)


def _split(feed: Feed, marks: ReasoningMarks, is_open: bool) -> Generator[None, None, None]:
    try:
        yield from feed.space()
        found = yield from feed.accept(marks.start)
        if not found and not is_open:
            feed.text(feed.buffer)
            return
        try:
            yield from feed.space()
            yield from feed.until((marks.end,), _Trimmed(feed.thought).tell)
        except Ended:
            return
    except Ended:
        if not is_open:
            feed.text(feed.buffer)
        return
    try:
        yield from feed.space()
        if marks.after and (yield from feed.accept(marks.after)):
            yield from feed.space()
    except Ended:
        return
    feed.text(feed.buffer[feed.at :])


class _Trimmed:
    """Tells text on without the white space at its end."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._gap = ""

    def tell(self, text: str) -> None:
        """More text."""
        text = self._gap + text
        kept = text.rstrip()
        self._gap = text[len(kept) :]
        self._tell(kept)


@dataclass(frozen=True, slots=True)
class MessageMarks:
    """An answer of several messages: start, header, `body`, text, one of `ends`. hidden: special tokens that must be seen.

    closing: from within a thought to the beginning of the answer proper.
    """

    start: str
    body: str
    ends: tuple[str, ...]
    hidden: tuple[str, ...]
    closing: str = ""


HARMONY = MessageMarks(
    "<|start|>", "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|start|>"),
    ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)  # fmt: skip
MUSE = MessageMarks(
    "<|start|>", "<|message|>", ("<|eom|>", "<|eot|>", "<|start|>"), ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
)
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def messages_of(template: str) -> MessageMarks | None:
    """The marks of messages with channels or recipients that this template's model writes, or None."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    if "assistant to=self<|message|>" in template:
        return MUSE
    return None


class MessageSplitter(ReasoningSplitter):
    """Thoughts, text and calls of an answer made of messages. The prompt ends inside the first header.

    takes_calls: whether messages to tools become calls; else they are text.
    """

    def __init__(self, marks: MessageMarks, takes_calls: bool) -> None:
        feed = Feed()
        FeedParser.__init__(self, feed, _read_messages(feed, marks, takes_calls))


def _read_messages(feed: Feed, marks: MessageMarks, takes_calls: bool) -> Generator[None, None, None]:
    while True:
        begin = feed.at
        try:
            header, mark = yield from feed.until((marks.body, *marks.ends), limit=_HEADER_CHARACTERS)
        except (Ended, Malformed):
            if begin == 0 or not feed.is_ended:
                yield from _as_text(feed, begin)
            return
        if mark != marks.body:
            continue
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        try:
            yield from _body(
                feed, marks, channel.group(1) if channel else "", recipient.group(1) if recipient else "", takes_calls
            )
        except Ended:
            return


def _as_text(feed: Feed, begin: int) -> Wait:
    """No header: an answer that is just text."""
    feed.text(feed.buffer[begin:])
    feed.at = len(feed.buffer)
    while not feed.is_ended:
        yield
        feed.text(feed.buffer[feed.at :])
        feed.at = len(feed.buffer)


def _body(feed: Feed, marks: MessageMarks, channel: str, recipient: str, takes_calls: bool) -> Wait:
    is_call = takes_calls and marks is HARMONY and bool(recipient) and recipient not in ("assistant", "user", "all")
    if is_call:
        feed.start_call(recipient.removeprefix("functions."))
        try:
            yield from feed.until(marks.ends, feed.arguments)
        except Ended:
            feed.break_call()
            raise
        feed.end_call()
        return
    is_thought = channel == "analysis" or recipient == "self"
    _, mark = yield from feed.until(marks.ends, feed.thought if is_thought else feed.text)
    if mark == marks.start:
        feed.at -= len(mark)
