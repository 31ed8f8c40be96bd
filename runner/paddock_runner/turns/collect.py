"""A Sink that keeps everything: for answers that are sent whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..text.events import Call, CallArguments, CallStart
from .choice import End, Prob
from .turn import CallPart

STOPPED = End("stop")


@dataclass(slots=True)
class Answer:
    """One whole answer."""

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    probs: list[Prob] = field(default_factory=list)
    end: End = STOPPED

    @property
    def text(self) -> str:
        """The content."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(self.reasonings)


class Collector:
    """Collects n answers."""

    def __init__(self, n: int) -> None:
        self.answers = [Answer() for _ in range(n)]

    def started(self) -> None:
        """Nothing to do."""

    def rated(self, prompt: int) -> None:
        """The turn keeps them."""

    def text(self, index: int, text: str, probs: Sequence[Prob]) -> None:
        """More of the answer."""
        answer = self.answers[index]
        answer.texts.append(text)
        if probs:
            answer.probs.extend(probs)

    def lane(self, index: int) -> None:
        """Nothing is written."""

    def reasoning(self, index: int, text: str) -> None:
        """More of the reasoning."""
        self.answers[index].reasonings.append(text)

    def call(self, index: int, event: CallPart) -> None:
        """A new tool call, more of one's arguments, or its end."""
        calls = self.answers[index].calls
        if isinstance(event, CallStart):
            calls.append(Call(event.name, "", event.id))
        elif isinstance(event, CallArguments):
            calls[event.index].arguments += event.text
        else:
            calls[event.index].is_complete = event.is_complete

    def ended(self, index: int, end: End) -> None:
        """This answer is complete."""
        self.answers[index].end = end

    def flush(self) -> None:
        """Nothing to write yet."""
