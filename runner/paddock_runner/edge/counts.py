"""What a port counts of its requests, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
PREFIX = "paddock_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


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
        yield f"# TYPE {name} histogram"
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            yield f'{name}_bucket{{le="{bound:g}"}} {total}'
        total += self._counts[-1]
        yield f'{name}_bucket{{le="+Inf"}} {total}'
        yield f"{name}_sum {self._sum:.9g}"
        yield f"{name}_count {total}"


class Requests:
    """Requests by route and status, those whose client went away, those in flight, and how long they took. One event loop, so no locks."""

    def __init__(self, prefix: str = PREFIX) -> None:
        self._prefix = prefix
        self._n: dict[tuple[str, int], int] = {}
        self._n_aborted = 0
        self.in_flight = 0
        self._whole = Histogram(SECONDS)

    def on_request(self, route: str, status: int, seconds: float, has_left: bool = False) -> None:
        """A request was answered. has_left: its client went away before the end."""
        key = (route, status)
        self._n[key] = self._n.get(key, 0) + 1
        self._n_aborted += status == 499 or has_left
        self._whole.observe(seconds)

    def lines(self) -> Iterable[str]:
        """The exposition."""
        name = self._prefix
        by_route = [(f'route="{route}",status="{status}"', n) for (route, status), n in sorted(self._n.items())]
        yield from numbers(f"{name}http_requests_total", by_route, "counter")
        yield from numbers(f"{name}aborted_requests_total", [("", self._n_aborted)], "counter")
        yield from numbers(f"{name}http_requests_in_flight", [("", self.in_flight)])
        yield from self._whole.lines(f"{name}http_request_seconds")


def numbers(name: str, rows: Iterable[tuple[str, float]], kind: str = "gauge") -> Iterable[str]:
    """The exposition of a metric: a number for each set of labels, "" for none."""
    yield f"# TYPE {name} {kind}"
    for labels, number in rows:
        shown = f"{number:.9g}" if isinstance(number, float) else str(number)
        yield f"{name}{{{labels}}} {shown}" if labels else f"{name} {shown}"


def label(name: str, text: str) -> str:
    """A label with any text for its value."""
    for raw, quoted in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        text = text.replace(raw, quoted)
    return f'{name}="{text}"'
