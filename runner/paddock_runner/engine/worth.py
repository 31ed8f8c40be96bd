"""What guesses are worth: what steps took with them and without, as measured, and how many tokens they are expected to bring.

A guess costs what it adds to a step: a token more in every product and, on devices with run-ahead, the moment in which the device waits until the host has
read one step before it gives the next. Both are measured together, for every number of rows and of guesses that came up.
"""

from __future__ import annotations

from collections import deque
from statistics import median

N_SEEN = 5
"""Steps of a kind that are remembered: their median is what such a step takes, whatever one of them waited for."""
ENOUGH = 3
"""Fewer steps of a kind are not held against guesses: one may have waited for something else."""
FADE = 0.995
"""What guesses were seen to add fades with each look that decides against them, so that it is measured again some day."""


def expected(rate: float, n: int) -> float:
    """Tokens that n guesses bring, each right with that rate if those before it were."""
    return rate * (1 - rate**n) / (1 - rate) if rate < 1 else n


class Worth:
    """Times of steps, in microseconds."""

    __slots__ = ("_faded", "_last", "_plain", "_with")

    def __init__(self) -> None:
        self._last = (-1, 0)
        self._plain: dict[int, deque[float]] = {}
        self._with: dict[tuple[int, int], deque[float]] = {}
        self._faded: dict[tuple[int, int], float] = {}

    def see_plain(self, seq: int, n_rows: int, us: float) -> None:
        """Step number seq, of rows of one token, took so long from the end of the one before. One after a step of another kind does not count."""
        if self._last == (seq - 1, n_rows):
            self._plain.setdefault(n_rows, deque(maxlen=N_SEEN)).append(us)
        self._last = seq, n_rows

    def see(self, n_rows: int, n_guesses: int, us: float) -> None:
        """A step with guesses took so long."""
        if n_guesses:
            key = n_rows, _size(n_guesses)
            self._with.setdefault(key, deque(maxlen=N_SEEN)).append(us)
            self._faded[key] = 1.0

    def plain_us(self, n_rows: int, otherwise: float) -> float:
        """A step without guesses; otherwise: what is believed before one was seen."""
        return median(self._plain[n_rows]) if n_rows in self._plain else otherwise

    def extra_us(self, n_rows: int, n_guesses: int, otherwise: float) -> float:
        """What that many guesses add; otherwise: what is believed before any were seen."""
        key = n_rows, _size(n_guesses)
        if key not in self._with or n_rows not in self._plain:
            return otherwise
        extra = max(0.0, median(self._with[key]) - median(self._plain[n_rows])) * self._faded[key]
        return extra if len(self._with[key]) >= ENOUGH else min(extra, otherwise)

    def fade(self, n_rows: int, n_guesses: int) -> None:
        """It was decided against them, by what is known."""
        key = n_rows, _size(n_guesses)
        if key in self._faded:
            self._faded[key] *= FADE


def _size(n_guesses: int) -> int:
    """Up to eight as they are, then powers of two: what a few more cost is much the same."""
    return n_guesses if n_guesses <= 8 else 1 << (n_guesses - 1).bit_length()
