"""The short way of a token: where an answer's text is shown as it is, a token becomes bytes by one look-up, and those bytes an event.

What a turn does otherwise for each token (stop strings, thoughts, calls, log-probabilities, characters that are not whole) does not
happen here: a choice takes this way only while none of it applies.
"""

from __future__ import annotations

from typing import Protocol


class Lane(Protocol):
    """Where the texts of one answer go as JSON. is_behind: not now, because the client does not read. is_touched: minded by the desk."""

    is_behind: bool
    is_touched: bool

    def say(self, text: bytes) -> None:
        """Appends an event of this text; `flush` sends it."""

    def say_now(self, text: bytes) -> None:
        """Sends an event of this text, with what was appended before it: for a step that brings this answer one token."""

    def flush(self) -> None:
        """Sends what was appended."""


class Together(Protocol):
    """Keeps what the streams of one step write, to write it out together."""

    def hold(self) -> None:
        """Writes are kept from now on."""

    def release(self) -> None:
        """They go out."""


class Apart:
    """Nothing is kept."""

    def hold(self) -> None:
        """Nothing to do."""

    def release(self) -> None:
        """Nothing to do."""
