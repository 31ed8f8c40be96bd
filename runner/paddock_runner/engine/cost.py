"""What a step will cost in time: a model fitted to the steps that were measured."""

from __future__ import annotations

import math

DECODE_SCALE, TOKEN_SCALE, WORK_SCALE, CONTEXT_SCALE = 16.0, 256.0, 256.0 * 2048, 16.0 * 2048
FORGET = 0.98
PRIOR_WEIGHTS = (1e-3, 1e-3, 1e-3, 0.3, 3.0)
"""What is believed of each term before it is seen. Short prompts say next to nothing of what a long context costs: they must not talk the guess away. Nor may rows whose
contexts are all alike, which say as little of what these cost: what is believed of the last term stays."""
FLOOR_US_PER_TOKEN = 1e-3
FIT_EVERY = 8
ENOUGH = 16
"""Steps with rows and prefill together, after which those with prefill alone are not learned from."""
ALIKE_SHIFT = 3
"""Steps of decode rows alone are measured by their number of rows without so many last bits; fewer rows one by one."""
QUICKER, SLOWER = 0.5, 0.1
"""Weight of such a step that took less, or more, than was known: one that something else held up tells little, and a step that is launched too early costs little."""
BESIDE, MOST_BESIDE = 0.1, 8.0
"""Weight of a step beside a part of the device, and how much longer such steps may take at most."""
UNKNOWN_US = 2_000_000.0
"""As long as pages on disk are waited for at most."""
N = 5


class CostModel:
    """us = a + b * decode rows + c * prefill tokens + d * (prefill tokens x context before each) + e * context of the decode rows, all fitted, none negative.

    Exponentially forgotten least squares: old steps fade, so that growing contexts and clocks are followed. Plain lists: at this
    size they are quicker than arrays. What a token adds to a step with decode rows is not what it takes in a step of its own: beside rows
    that wait for memory it may be nearly free. So once there are enough steps of both kinds, only those with decode rows are learned from.
    The last term is learned where somebody has said what to believe of it (`believe`), and is nothing elsewhere.
    """

    __slots__ = ("_believed_us", "_moment", "_n_fresh", "_normal", "_quiet", "beside", "n_mixed", "n_read", "n_seen", "terms")

    def __init__(self, guess_us: tuple[float, float, float, float] = (2000.0, 1000.0, 10_000.0, 1000.0)) -> None:
        self._normal = [[PRIOR_WEIGHTS[i] * (i == j) for j in range(N)] for i in range(N)]
        self.terms = [*guess_us, 0.0]
        """us for: a step, 16 decode rows, 256 prefill tokens, 256 prefill tokens after 2048 tokens of context, 16 decode rows after 2048 tokens of context."""
        self._moment = [weight * value for weight, value in zip(PRIOR_WEIGHTS, self.terms, strict=True)]
        self._believed_us = 0.0
        self._n_fresh = 0
        self.beside = 1.0
        """How many times as long steps take while a part of the device reads a prompt."""
        self._quiet: dict[int, tuple[float, int]] = {}
        self.n_seen = self.n_mixed = self.n_read = 0

    def believe(self, context_us: float) -> None:
        """What 16 decode rows after 2048 tokens of context each are believed to take for these, until it is seen."""
        self._moment[4] += self._normal[4][4] * (context_us - self._believed_us)
        self._believed_us = self.terms[4] = context_us

    @property
    def knows_contexts(self) -> bool:
        """Contexts of decode rows have a price of their own."""
        return self._believed_us > 0

    def see(self, n_decode: int, n_tokens: int, work: float, us: float, context: int = 0) -> None:
        """Learns from a finished step. work: sum over prefill tokens of the context before each; context: over decode rows."""
        context = context if self.knows_contexts else 0
        if n_decode and not n_tokens:
            key = n_decode >> ALIKE_SHIFT or -n_decode
            known = self._quiet_us(*self._quiet[key], context) if key in self._quiet else us
            self._quiet[key] = known + (QUICKER if us < known else SLOWER) * (us - known), context
        self.n_read += n_tokens > 0
        if n_decode and n_tokens:
            self.n_mixed += 1
        elif n_tokens and self.n_mixed >= ENOUGH:
            return
        x = (1.0, n_decode / DECODE_SCALE, n_tokens / TOKEN_SCALE, work / WORK_SCALE, context / CONTEXT_SCALE)
        moment = self._moment
        for i, row in enumerate(self._normal):
            a = x[i]
            row[0] = row[0] * FORGET + a
            row[1] = row[1] * FORGET + a * x[1]
            row[2] = row[2] * FORGET + a * x[2]
            row[3] = row[3] * FORGET + a * x[3]
            row[4] = row[4] * FORGET + a * x[4]
            prior = PRIOR_WEIGHTS[i] * (1 - FORGET)
            row[i] += prior
            moment[i] = moment[i] * FORGET + a * us + prior * (self.terms[i] if i < 4 else self._believed_us)
        self.n_seen += 1
        self._n_fresh += 1
        if self._n_fresh >= FIT_EVERY or self.n_seen <= FIT_EVERY:
            self._fit()

    def see_beside(self, price_us: float, us: float) -> None:
        """Learns from a step that ran beside a part of the device, and was priced with `beside`."""
        if price_us > 0:
            self.beside = min(MOST_BESIDE, max(1.0, self.beside * (1 + BESIDE * (min(2.0, us / price_us) - 1))))

    def _fit(self) -> None:
        """Solves, dropping terms that come out negative (they are zero then) and solving for the others again."""
        self._n_fresh = 0
        used = list(range(N))
        terms = [0.0] * N
        while used:
            solved = _solve([[self._normal[i][j] for j in used] for i in used], [self._moment[i] for i in used])
            worst = min(solved)
            if worst >= 0:
                for i, value in zip(used, solved, strict=True):
                    terms[i] = value
                break
            del used[solved.index(worst)]
        self.terms = terms

    def decode_us(self, n_decode: int, context: int = 0) -> float:
        """A step of decode rows alone, with so many tokens before all of them together."""
        return self.terms[0] + self.terms[1] * n_decode / DECODE_SCALE + self.terms[4] * context / CONTEXT_SCALE

    def quiet_us(self, n_decode: int, context: int = 0) -> float:
        """The same, as such steps were measured last, where there were some: the fit is a straight line, and leans on steps with prefill."""
        known = self._quiet.get(n_decode >> ALIKE_SHIFT or -n_decode)
        return self._quiet_us(*known, context) if known else self.decode_us(n_decode, context)

    def _quiet_us(self, us: float, known: int, context: int) -> float:
        """What a step would have taken with another context than it had. A quarter of it at least was something else: tokens that rows share are read once."""
        return max(us / 4, us + self.terms[4] * (context - known) / CONTEXT_SCALE)

    def chunk_us(self, n_tokens: int, position: int) -> float:
        """What n_tokens of prefill from `position` on add to a step."""
        return self.terms[2] * n_tokens / TOKEN_SCALE + self.terms[3] * chunk_work(n_tokens, position) / WORK_SCALE

    def reading_us(self, n_tokens: int, position: int) -> float:
        """The same for a prompt that could come from disk instead. Before any was read that is not known, and the guess may be far too low."""
        us = self.chunk_us(n_tokens, position)
        return us if self.n_read else max(us, UNKNOWN_US)

    def tokens_for(self, us: float, position: int) -> int:
        """The largest chunk from `position` on that adds at most `us`."""
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


def _solve(a: list[list[float]], b: list[float]) -> list[float]:
    """x of a x = b for a symmetric positive definite `a` (overwritten), by elimination without pivoting."""
    n = len(b)
    for k in range(n):
        pivot = a[k]
        for i in range(k + 1, n):
            factor = a[i][k] / pivot[k]
            if factor:
                row = a[i]
                for j in range(k, n):
                    row[j] -= factor * pivot[j]
                b[i] -= factor * b[k]
    for k in range(n - 1, -1, -1):
        row = a[k]
        b[k] = (b[k] - sum(row[j] * b[j] for j in range(k + 1, n))) / row[k]
    return b
