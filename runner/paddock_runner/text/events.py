"""What an answer is made of, in order: thoughts, text, calls of tools. Parsers give these; the turn passes them on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """More of the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. index: 0, 1, ... in the answer. id: the model's own name for the call, mostly ""."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's arguments have ended. is_complete: False when the answer broke off inside them."""

    index: int
    is_complete: bool = True


Event = Text | Thought | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class Call:
    """A whole call. arguments: JSON text."""

    name: str
    arguments: str
    id: str = ""
    is_complete: bool = True


@dataclass(slots=True)
class Answer:
    """A whole answer."""

    thought: str
    text: str
    calls: list[Call]


def gather(events: Iterable[Event]) -> Answer:
    """The whole answer that these events tell of."""
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[Call] = []
    for event in events:
        if isinstance(event, Text):
            texts.append(event.text)
        elif isinstance(event, Thought):
            thoughts.append(event.text)
        elif isinstance(event, CallStart):
            calls.append(Call(event.name, "", event.id))
        elif isinstance(event, CallArguments):
            calls[event.index].arguments += event.text
        else:
            calls[event.index].is_complete = event.is_complete
    return Answer("".join(thoughts), "".join(texts), calls)
