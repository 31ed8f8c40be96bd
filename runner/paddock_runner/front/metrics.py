"""GET /metrics: counters and histograms of the front, gauges and counters of the engine, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..edge.counts import CONTENT_TYPE, PREFIX, SECONDS, Histogram, Requests, numbers
from ..errors import PackError
from ..turns.usage import Timing, Usage
from .http import Exchange

if TYPE_CHECKING:
    from .service import Front

GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Metrics(Requests):
    """What the front counts, beside its requests."""

    def __init__(self) -> None:
        super().__init__()
        self._totals = dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"), 0)
        self._first = Histogram(SECONDS)
        self._queued = Histogram(SECONDS)
        self._gap = Histogram(GAPS)

    def on_turn(self, usage: Usage, begun_tokens: int, timing: Timing, gaps_ns: list[int]) -> None:
        """A turn ended, in whatever way. begun_tokens: of its prompts, those that the engine began with. gaps_ns: between its tokens, the shortest first."""
        totals = self._totals
        totals["prompt_tokens"] += begun_tokens
        totals["cached_tokens"] += usage.cached_tokens
        totals["output_tokens"] += usage.output_tokens
        totals["reasoning_tokens"] += usage.reasoning_tokens
        if (first := timing.first_token_ms) is not None:
            self._first.observe(first / 1e3)
        if timing.started_ns:
            self._queued.observe(timing.queued_ns / 1e9)
        self._gap.observe_all(gaps_ns)

    def on_vectors(self, n_tokens: int) -> None:
        """Inputs of so many tokens became vectors."""
        self._totals["prompt_tokens"] += n_tokens

    def text(self, engine: Mapping[str, Any] | None) -> str:
        """The exposition. engine: numbers of the engine's own account, of which `counters` only grow."""
        out = list(self.lines())
        for name, total in self._totals.items():
            out += numbers(f"{PREFIX}{name}_total", [("", total)], "counter")
        for name, histogram in (("time_to_first_token_seconds", self._first), ("queue_seconds", self._queued), ("inter_token_seconds", self._gap)):
            out += histogram.lines(PREFIX + name)
        out += numbers(f"{PREFIX}engine_up", [("", int(engine is not None))])
        for name, number in sorted(_numbers(engine or {}, "engine")):
            out += numbers(PREFIX + name, [("", number)], "counter" if name.startswith("engine_counters_") else "gauge")
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
