"""Guesses by look-up: what followed the last few tokens when they came before, and how often such guesses were right."""

from __future__ import annotations

NEEDLES = (4, 3, 2)
"""Last tokens that are looked for, longest first."""
WINDOW_TOKENS = 16_384
"""How far back is looked."""
KEEP = 0.85
"""Weight of what was known against what was just seen."""
PAUSE_TOKENS, MOST_PAUSE_TOKENS = 16, 1024
"""How many tokens a request is left alone after it was guessed for."""


def look_up(text: bytes, n: int) -> bytes:
    """At most n tokens (int32) that followed the end of `text` when it came up last; none when it never did."""
    end = len(text) - 4
    for size in NEEDLES:
        needle = text[-4 * size :]
        at = text.rfind(needle, 0, end) if len(needle) == 4 * size else -1
        while at >= 0 and at % 4:
            at = text.rfind(needle, 0, at + 4 * size - 1)
        if at >= 0:
            return text[at + 4 * size : at + 4 * (size + n)]
    return b""


class Guess:
    """What is known of one request: share of right guesses, and totals. next_probe: tokens at which it is looked at again."""

    __slots__ = ("_begun", "_pause", "accepted", "drafted", "has_own", "last_seq", "n_blank", "next_probe", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        self.drafted = self.accepted = self.next_probe = self.n_blank = 0
        self.last_seq = 0
        """The last step that may have a row of it."""
        self.has_own = False
        """The model's own guess stands behind the last token: it is made in steps with a row that checks guesses."""
        self._begun = (0, 0)
        self._pause = PAUSE_TOKENS

    def begin(self, seq: int) -> None:
        """It is guessed for from now on; steps up to `seq` have other rows of it."""
        self.last_seq, self.n_blank, self.has_own = seq, 0, False
        self._begun = (self.drafted, self.accepted)

    def pause(self) -> int:
        """It is no longer guessed for: how many tokens it is left alone. Few after guesses of which half were right, else twice as many as last time."""
        drafted, accepted = self.drafted - self._begun[0], self.accepted - self._begun[1]
        self._pause = PAUSE_TOKENS if 2 * accepted >= drafted > 0 else min(2 * self._pause, MOST_PAUSE_TOKENS)
        return self._pause

    def see(self, n_right: int, n_tried: int) -> None:
        """n_right guesses in a row were right, of n_tried."""
        n_seen = min(n_right + 1, n_tried)
        for i in range(n_seen):
            self.rate = KEEP * self.rate + (1 - KEEP) * (i < n_right)

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
