"""GET /metrics of a gateway: its own requests, its models, and what each loaded runner counts, with the model as a label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paddock_runner.edge.counts import PREFIX, Requests, label, numbers

from paddock_manager.web.pool import Pool

OWN = f"{PREFIX}gateway_"


class Metrics(Requests):
    """What the gateway counts."""

    def __init__(self, pool: Pool):
        super().__init__(OWN)
        self._pool = pool

    def text(self, runners: Mapping[str, str]) -> str:
        """The exposition. runners: of each loaded model, its runner's own."""
        return "\n".join([*self.lines(), *self._models(), *_together(runners)]) + "\n"

    def _models(self) -> Iterable[str]:
        pool = self._pool
        named = [(label("model", name), entry) for name, entry in pool.entries.items()]
        yield from numbers(f"{OWN}memory_budget_bytes", [("", pool.budget_bytes)])
        yield from numbers(f"{OWN}memory_held_bytes", [("", sum(e.holds_bytes for e in pool.entries.values()))])
        yield from numbers(f"{OWN}model_loaded", [(name, int(e.server is not None)) for name, e in named])
        yield from numbers(f"{OWN}model_memory_bytes", [(name, e.need_bytes) for name, e in named])
        yield from numbers(f"{OWN}model_requests_in_flight", [(name, e.in_flight) for name, e in named])
        yield from numbers(f"{OWN}model_requests_waiting", [(name, e.n_waiting) for name, e in named])
        for counted in ("starts", "failed_starts", "evictions", "idle_stops", "deaths"):
            yield from numbers(f"{OWN}model_{counted}_total", [(name, e.counts[counted]) for name, e in named], "counter")


def _together(runners: Mapping[str, str]) -> Iterable[str]:
    """Expositions of several runners as one: a metric's lines stay together, as the format wants it."""
    kinds: dict[str, str] = {}
    lines: dict[str, list[str]] = {}
    for model, text in runners.items():
        mark, metric = label("model", model), ""
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                metric = line.split(" ")[2]
                kinds.setdefault(metric, line)
            elif metric and not line.startswith("#"):
                lines.setdefault(metric, []).append(_marked(line, mark))
    for metric, kind in kinds.items():
        yield kind
        yield from lines.get(metric, [])


def _marked(line: str, mark: str) -> str:
    """A line with one label more."""
    name, brace, rest = line.partition("{")
    if brace:
        return f"{name}{{{mark},{rest}"
    name, _, number = line.partition(" ")
    return f"{name}{{{mark}}} {number}"
