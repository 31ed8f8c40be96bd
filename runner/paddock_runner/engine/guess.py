"""Guesses by look-up: what followed the last few tokens when they came before, and how often such guesses were right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NEEDLES = (4, 3, 2)
"""Last tokens that are looked for, longest first."""
WINDOW_TOKENS = 16_384
"""How far back is looked."""
KEEP = 0.9
"""Weight of what was known against what was just seen."""
PAUSE_TOKENS, MOST_PAUSE_TOKENS = 16, 1024
"""How many tokens a request is left alone after it was guessed for."""


def look_up(text: bytes, n: int) -> tuple[bytes, int]:
    """At most n tokens (int32) that followed the end of `text` when it came up last, and where they begin; none and -1 when it never did."""
    tokens = np.frombuffer(text, np.int32)
    end = len(tokens) - 1  # what follows must be there
    if end < 2:
        return b"", -1
    places = np.flatnonzero(tokens[1:end] == tokens[end]) + 1
    best = places[:0]
    for back in range(1, NEEDLES[0]):
        places = places[places >= back]
        places = places[tokens[places - back] == tokens[end - back]]
        if not len(places):
            break
        best = places
    if not len(best):
        return b"", -1
    at = int(best[-1]) + 1
    return tokens[at : at + n].tobytes(), at


class Guess:
    """What is known of one request: share of right guesses, and totals. next_probe: tokens at which it is looked at again."""

    __slots__ = ("_begun", "_pause", "_right", "_seen", "_source", "accepted", "drafted", "has_own", "last_seq", "n_blank", "next_probe", "rate")

    def __init__(self) -> None:
        self._right, self._seen, self.rate = 0.5, 1.0, 0.0
        self.drafted = self.accepted = self.next_probe = self.n_blank = 0
        self.last_seq = 0
        """The last step that may have a row of it."""
        self.has_own = False
        """The model's own guess stands behind the last token: it is made in steps with a row that checks guesses."""
        self._begun = (0, 0)
        self._source = (-1, 0)
        """Where in the text the last guess stood, and how many tokens were known then."""
        self._pause = PAUSE_TOKENS

    def begin(self, seq: int) -> None:
        """It is guessed for from now on; steps up to `seq` have other rows of it."""
        self.last_seq, self.n_blank, self.has_own, self._source = seq, 0, False, (-1, 0)
        self._begun = (self.drafted, self.accepted)

    def pause(self) -> int:
        """It is no longer guessed for: how many tokens it is left alone. Few after guesses of which half were right, else twice as many as last time."""
        drafted, accepted = self.drafted - self._begun[0], self.accepted - self._begun[1]
        self._pause = PAUSE_TOKENS if 2 * accepted >= drafted > 0 else min(2 * self._pause, MOST_PAUSE_TOKENS)
        return self._pause

    def go_on(self, text_of: Callable[[int, int], bytes], n_known: int, n: int) -> bytes:
        """At most n tokens from where the last guess stood, if it and the token drawn after it were right. text_of(first, end): the n_known tokens that are known."""
        source, n_then = self._source
        at = source + n_known - n_then
        if source < 0 or at >= n_known or text_of(at - 1, at) != text_of(n_known - 1, n_known):
            return b""
        self._source = (at, n_known)
        return text_of(at, min(at + n, n_known))

    def found(self, place: int, n_known: int) -> None:
        """A guess after n_known tokens was looked up; it stands at `place`, -1 for nowhere."""
        self._source = (place, n_known)

    def see(self, n_right: int, n_tried: int) -> None:
        """n_right guesses in a row were right, of n_tried."""
        fade = KEEP**n_right
        self._right = fade * self._right + (1 - fade) / (1 - KEEP)
        self._seen = fade * self._seen + (1 - fade) / (1 - KEEP)
        if n_right < n_tried:
            self._right *= KEEP
            self._seen = KEEP * self._seen + 1.0
        self.rate = self._right / self._seen

    def believe(self, rate: float) -> None:
        """What is taken for its share of right guesses before one was seen."""
        self._right, self._seen, self.rate = rate, 1.0, rate

    def count(self, n_tried: int, n_right: int) -> None:
        """Adds to the totals."""
        self.drafted += n_tried
        self.accepted += n_right


def common(guess: bytes, text: bytes) -> int:
    """Tokens with which both begin."""
    n = min(len(guess), len(text)) // 4
    for i in range(n):
        if guess[4 * i : 4 * i + 4] != text[4 * i : 4 * i + 4]:
            return i
    return n
