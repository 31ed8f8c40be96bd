"""What a step will cost in time: a model fitted to the steps that were measured."""

from __future__ import annotations

import math

import numpy as np

DECODE_SCALE, TOKEN_SCALE, WORK_SCALE = 16.0, 256.0, 256.0 * 2048
FORGET = 0.98
PRIOR_WEIGHT = 1e-3
FLOOR_US_PER_TOKEN = 1e-3


class CostModel:
    """us = a + b * decode rows + c * prefill tokens + d * (prefill tokens x context before each), all fitted, none negative.

    Exponentially forgotten least squares: old steps fade, so that growing contexts and clocks are followed.
    """

    __slots__ = ("_is_stale", "_moment", "_normal", "n_seen", "terms")

    def __init__(self, guess_us: tuple[float, float, float, float] = (2000.0, 1000.0, 10_000.0, 1000.0)) -> None:
        prior = np.eye(4) * PRIOR_WEIGHT
        self._normal = prior
        self._moment = prior @ np.array(guess_us)
        self.terms = list(guess_us)
        """us for: a step, 16 decode rows, 256 prefill tokens, 256 prefill tokens after 2048 tokens of context."""
        self._is_stale = False
        self.n_seen = 0

    def see(self, n_decode: int, n_tokens: int, work: float, us: float) -> None:
        """Learns from a finished step. work: sum over prefill tokens of the context before each."""
        x = np.array((1.0, n_decode / DECODE_SCALE, n_tokens / TOKEN_SCALE, work / WORK_SCALE))
        self._normal *= FORGET
        self._normal += np.outer(x, x)
        self._normal.flat[::5] += PRIOR_WEIGHT * (1 - FORGET)
        self._moment *= FORGET
        self._moment += x * us
        self._moment += PRIOR_WEIGHT * (1 - FORGET) * np.array(self.terms)
        self._is_stale = True
        self.n_seen += 1

    def _fit(self) -> None:
        """Solves, dropping terms that come out negative (they are zero then) and solving for the others again."""
        if not self._is_stale:
            return
        self._is_stale = False
        used = [0, 1, 2, 3]
        terms = [0.0] * 4
        while used:
            pick = np.ix_(used, used)
            solved = np.linalg.solve(self._normal[pick], self._moment[used]).tolist()
            worst = min(range(len(used)), key=lambda i: solved[i])
            if solved[worst] >= 0:
                for i, value in zip(used, solved, strict=True):
                    terms[i] = value
                break
            del used[worst]
        self.terms = terms

    def decode_us(self, n_decode: int) -> float:
        """A step of decode rows alone."""
        self._fit()
        return self.terms[0] + self.terms[1] * n_decode / DECODE_SCALE

    def chunk_us(self, n_tokens: int, position: int) -> float:
        """What n_tokens of prefill from `position` on add to a step."""
        self._fit()
        return self.terms[2] * n_tokens / TOKEN_SCALE + self.terms[3] * chunk_work(n_tokens, position) / WORK_SCALE

    def tokens_for(self, us: float, position: int) -> int:
        """The largest chunk from `position` on that adds at most `us`."""
        self._fit()
        if us <= 0:
            return 0
        half = self.terms[3] / WORK_SCALE / 2
        linear = max(FLOOR_US_PER_TOKEN, self.terms[2] / TOKEN_SCALE + 2 * half * position)
        if half * us < 1e-9 * linear * linear:
            return int(us / linear)
        return int((math.sqrt(linear * linear + 4 * half * us) - linear) / (2 * half))


def chunk_work(n_tokens: int, position: int) -> float:
    """Sum over the chunk's tokens of the context before each."""
    return n_tokens * (position + n_tokens / 2)
