"""GET /metrics: counters and histograms of the front, gauges and counters of the engine, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import PackError
from ..turns.usage import Timing, Usage
from .http import Exchange

if TYPE_CHECKING:
    from .service import Front

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
PREFIX = "paddock_"


class Histogram:
    """Counts of observations per upper bound, in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """One observation."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def observe_all(self, times_ns: list[int]) -> None:
        """Many, in nanoseconds, the shortest first."""
        below = 0
        for place, bound in enumerate(self._bounds):
            n = bisect_right(times_ns, bound * 1e9)
            self._counts[place] += n - below
            below = n
        self._counts[-1] += len(times_ns) - below
        self._sum += sum(times_ns) / 1e9

    def lines(self, name: str) -> Iterable[str]:
        """The exposition of this histogram."""
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            yield f'{name}_bucket{{le="{bound:g}"}} {total}'
        total += self._counts[-1]
        yield f'{name}_bucket{{le="+Inf"}} {total}'
        yield f"{name}_sum {self._sum:.9g}"
        yield f"{name}_count {total}"


class Metrics:
    """What the front counts. One event loop, so no locks."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, int], int] = {}
        self._totals = dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"), 0)
        self._aborted = 0
        self.in_flight = 0
        self._first = Histogram(SECONDS)
        self._queued = Histogram(SECONDS)
        self._whole = Histogram(SECONDS)
        self._gap = Histogram(GAPS)

    def on_request(self, route: str, status: int, seconds: float, has_left: bool = False) -> None:
        """A request was answered. has_left: its client went away before the end."""
        key = (route, status)
        self._requests[key] = self._requests.get(key, 0) + 1
        self._aborted += status == 499 or has_left
        self._whole.observe(seconds)

    def on_turn(self, usage: Usage, timing: Timing, gaps_ns: list[int]) -> None:
        """A turn ended, in whatever way. gaps_ns: between its tokens, the shortest first."""
        for name in self._totals:
            self._totals[name] += getattr(usage, name)
        if (first := timing.first_token_ms) is not None:
            self._first.observe(first / 1e3)
        if timing.started_ns:
            self._queued.observe(timing.queued_ns / 1e9)
        self._gap.observe_all(gaps_ns)

    def text(self, engine: Mapping[str, Any] | None) -> str:
        """The exposition. engine: numbers of the engine's own account, of which `counters` only grow."""
        out = [f"# TYPE {PREFIX}http_requests_total counter"]
        out += [
            f'{PREFIX}http_requests_total{{route="{r}",status="{s}"}} {n}'
            for (r, s), n in sorted(self._requests.items())
        ]
        for name, value in (*self._totals.items(), ("aborted_requests", self._aborted)):
            out += [f"# TYPE {PREFIX}{name}_total counter", f"{PREFIX}{name}_total {value}"]
        out += [f"# TYPE {PREFIX}http_requests_in_flight gauge", f"{PREFIX}http_requests_in_flight {self.in_flight}"]
        for name, histogram in (
            ("time_to_first_token_seconds", self._first),
            ("queue_seconds", self._queued),
            ("inter_token_seconds", self._gap),
            ("http_request_seconds", self._whole),
        ):
            out += [f"# TYPE {PREFIX}{name} histogram", *histogram.lines(PREFIX + name)]
        out += [f"# TYPE {PREFIX}engine_up gauge", f"{PREFIX}engine_up {int(engine is not None)}"]
        for name, number in sorted(_numbers(engine or {}, "engine")):
            kind = "counter" if name.startswith("engine_counters_") else "gauge"
            out += [f"# TYPE {PREFIX}{name} {kind}", f"{PREFIX}{name} {number:.9g}"]
        return "\n".join(out) + "\n"


def _numbers(facts: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, float]]:
    for key, value in facts.items():
        name = f"{prefix}_{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, name)
        elif isinstance(value, int | float):
            yield name.replace("-", "_").replace(".", "_").replace(" ", "_"), value


async def get_metrics(front: Front, exchange: Exchange) -> None:
    """GET /metrics"""
    try:
        facts = await front.desk.state(2.0)
    except PackError:
        facts = None
    await exchange.answer(200, front.metrics.text(facts).encode(), CONTENT_TYPE)
