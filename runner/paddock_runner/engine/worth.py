"""What guesses are worth: what steps took with them and without, as measured, and how many tokens they are expected to bring.

A guess costs what it adds to a step: a token more in every product and, on devices with run-ahead, the moment in which the device waits until the host has
read one step before it gives the next. Both are measured together, for every number of rows and of guesses that came up.
"""

from __future__ import annotations

KEEP = 0.8
"""Weight of what was known of a step's time against the step that was just seen."""
FADE = 0.995
"""What guesses were seen to add fades with each look that decides against them, so that it is measured again some day."""


def expected(rate: float, n: int) -> float:
    """Tokens that n guesses bring, each right with that rate if those before it were."""
    return rate * (1 - rate**n) / (1 - rate) if rate < 1 else n


class Worth:
    """Times of steps, in microseconds."""

    __slots__ = ("_extra", "_plain")

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        self._extra: dict[tuple[int, int], float] = {}

    def see_plain(self, n_rows: int, us: float) -> None:
        """A step of rows of one token took so long, from the end of the one before."""
        known = self._plain.get(n_rows)
        self._plain[n_rows] = us if known is None else KEEP * known + (1 - KEEP) * us

    def see(self, n_rows: int, n_guesses: int, us: float) -> None:
        """A step with guesses took so long."""
        if n_guesses and n_rows in self._plain:
            key, extra = (n_rows, _size(n_guesses)), max(0.0, us - self._plain[n_rows])
            known = self._extra.get(key)
            self._extra[key] = extra if known is None else KEEP * known + (1 - KEEP) * extra

    def plain_us(self, n_rows: int, otherwise: float) -> float:
        """A step without guesses; otherwise: what is believed before one was seen."""
        return self._plain.get(n_rows, otherwise)

    def extra_us(self, n_rows: int, n_guesses: int, otherwise: float) -> float:
        """What that many guesses add; otherwise: what is believed before any were seen."""
        return self._extra.get((n_rows, _size(n_guesses)), otherwise)

    def fade(self, n_rows: int, n_guesses: int) -> None:
        """It was decided against them, by what is known."""
        key = (n_rows, _size(n_guesses))
        if key in self._extra:
            self._extra[key] *= FADE


def _size(n_guesses: int) -> int:
    """Up to eight as they are, then powers of two: what a few more cost is much the same."""
    return n_guesses if n_guesses <= 8 else 1 << (n_guesses - 1).bit_length()
