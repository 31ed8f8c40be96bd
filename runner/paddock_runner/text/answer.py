"""From the text of an answer to its parts, for one model: which parsers apply, which special tokens they must see."""

from __future__ import annotations

from .events import Event, Text
from .reasoning import MessageSplitter, ReasoningSplitter, marks_of, messages_of
from .tokenizer import Tokenizer
from .tools import Schemas, Takes, ToolParser, dialect_of


class AnswerFormat:
    """How the model of a chat template writes answers. visible: ids of special tokens to keep in the text for the parsers."""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self.dialect = dialect_of(template)
        self.marks = marks_of(template)
        self.messages = messages_of(template)
        wanted: list[str] = []
        if self.messages is not None:
            wanted += self.messages.hidden
        if self.marks is not None:
            wanted += [self.marks.start, self.marks.end, self.marks.start.removesuffix("thought")]
        self._marked = self._ids(tokenizer, wanted)
        self._called = (
            self._ids(tokenizer, [*self.dialect.starts, *self.dialect.hidden])
            if self.dialect is not None
            else frozenset()
        )

    @property
    def takes_tools(self) -> bool:
        """Whether calls of tools can be found in answers."""
        return self.dialect is not None or self.messages is not None

    @property
    def reasoning_end(self) -> str:
        """The text that ends reasoning which a model does not end by itself; "" where there is none to end."""
        if self.messages is not None:
            return self.messages.closing
        return f"\n{self.marks.end}\n\n" if self.marks is not None else ""

    def visible(self, has_tools: bool) -> frozenset[int]:
        """Special tokens that TextStream must show."""
        return self._marked | self._called if has_tools else self._marked

    def parser(
        self, prompt: str, schemas: Schemas | None = None, splits_reasoning: bool = True, takes: Takes | None = None
    ) -> AnswerParser:
        """A parser for one answer. prompt: the rendered prompt (its end says whether reasoning is open).

        schemas: parameters of the tools by name; None or empty when there are none: then nothing is taken for a call.
        takes: whether a call that stands bare is one, in dialects that are loose.
        """
        splitter: ReasoningSplitter | None = None
        if self.messages is not None:
            splitter = MessageSplitter(self.messages, bool(schemas))
        elif self.marks is not None and splits_reasoning:
            tail = prompt[-256:].rstrip()
            is_closed = tail.endswith(self.marks.end)
            splitter = None if is_closed else ReasoningSplitter(self.marks, tail.endswith(self.marks.start))
        tools = ToolParser(self.dialect, schemas, takes) if schemas and self.dialect is not None else None
        return AnswerParser(splitter, tools)

    @staticmethod
    def _ids(tokenizer: Tokenizer, texts: list[str]) -> frozenset[int]:
        found = (tokenizer.id_of(t) for t in texts if t)
        return frozenset(i for i in found if i is not None and tokenizer.is_special(i))


class AnswerParser:
    """Events of one answer, piece by piece. Whatever the pieces, the events together tell of the same answer."""

    def __init__(self, splitter: ReasoningSplitter | None, tools: ToolParser | None) -> None:
        self._splitter = splitter
        self._tools = tools

    @property
    def is_plain(self) -> bool:
        """Whether text just passes through."""
        return self._splitter is None and self._tools is None

    @property
    def passes(self) -> bool:
        """Whether text passes through from here on: thoughts have ended, and no calls are looked for."""
        return self._tools is None and (self._splitter is None or self._splitter.is_done)

    def push(self, text: str) -> list[Event]:
        """Events that are sure after this piece."""
        events: list[Event] = [Text(text)] if self._splitter is None else self._splitter.push(text)
        return self._through_tools(events) if self._tools is not None else events

    def finish(self) -> list[Event]:
        """The last events: no more text will come."""
        events = self._splitter.finish() if self._splitter is not None else []
        if self._tools is None:
            return events
        return self._through_tools(events) + self._tools.finish()

    def _through_tools(self, events: list[Event]) -> list[Event]:
        assert self._tools is not None
        out: list[Event] = []
        for event in events:
            if isinstance(event, Text):
                out += self._tools.push(event.text)
            else:
                out.append(event)
        return out
