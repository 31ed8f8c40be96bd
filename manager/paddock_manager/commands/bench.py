"""paddock bench: time to first token, time between tokens and throughput of a server, at growing numbers of streams."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from paddock_runner.errors import PaddockError, UsageError

from paddock_manager import paths
from paddock_manager.commands import run as run_command
from paddock_manager.commands import target
from paddock_manager.commands.target import LOAD_OPTIONS
from paddock_manager.fleet import quality
from paddock_manager.fleet.client import Chat
from paddock_manager.fleet.state import Server
from paddock_manager.options import Argument, Command, Option, Values
from paddock_manager.ui import Ui

BASELINE = "bf16"
COMMAND = Command(
    "bench",
    "Measure a model as clients see it: first token, tokens in between, throughput.",
    (Argument("model", "a model that is here; its server is used where one runs", kind="model"),),
    (
        Option("--streams", "numbers of streams (default 1,2,4,8)", "text", value="N,N…"),
        Option("--prompt-tokens", "length of the prompt, about (default 256)", "int", value="N", least=1),
        Option("--tokens", "tokens to generate (default 64)", "int", value="N", least=1),
        Option("--rounds", "requests of each stream (default 2)", "int", value="N", least=1),
        Option(
            "--quality",
            "tell how well the model foretells a fixed text, beside a KV cache in bf16, instead of how fast it is",
            "flag",
        ),
        *LOAD_OPTIONS,
    ),
    "Every prompt is different, so that no prefix is cached. Figures are medians.",
)


@dataclass(slots=True)
class Sample:
    """One request. gaps_ms: times between pieces."""

    first_ms: float
    total_ms: float
    tokens: int
    gaps_ms: list[float] = field(default_factory=list)


def run(values: Values, ui: Ui) -> int:
    """Measure at every number of streams, or how good the answers can be."""
    if values.flag("quality"):
        return run_quality(values, ui)
    try:
        streams = [int(w) for w in (values.text("streams") or "1,2,4,8").split(",")]
    except ValueError:
        raise UsageError("--streams takes numbers, as 1,2,4") from None
    if not streams or min(streams) < 1 or max(streams) > 256:
        raise UsageError("--streams takes numbers from 1 to 256")
    places = paths.places()
    found = target.find_or_pull(places, values.text("model"), ui)
    rows: list[dict[str, Any]] = []
    with run_command.server_for(places, found, values, ui, max(streams)) as (server, key):
        if server.max_batch and server.max_batch < max(streams):
            ui.warn(f"{server.name} answers {server.max_batch} at a time: further streams wait for each other")
        load = Load(server, key, values.integer("prompt_tokens") or 256, values.integer("tokens") or 64)
        load.one(-1)
        for n in streams:
            ui.say(f"{n} stream(s) …")
            rows.append(load.row(n, values.integer("rounds") or 2))
        facts = {
            "model": found.name,
            "device": server.device,
            "prompt_tokens": load.prompt_tokens,
            "tokens": load.tokens,
        }

    def human(out: Ui) -> None:
        cells = [
            (
                str(r["streams"]),
                f"{r['first_ms']:.0f}",
                f"{r['gap_ms']:.1f}",
                f"{r['tokens_per_s']:.1f}",
                str(r["errors"]),
            )
            for r in rows
        ]
        out.table(("STREAMS", "FIRST MS", "GAP MS", "TOKENS/S", "ERRORS"), cells, right=(0, 1, 2, 3, 4))

    ui.result("bench", {**facts, "rows": rows}, human)
    return 1 if any(r["errors"] for r in rows) else 0


def run_quality(values: Values, ui: Ui) -> int:
    """Perplexity of the fixed text with the KV formats that were asked for, and with the baseline's; 1 when it is clearly worse."""
    places = paths.places()
    found = target.find_or_pull(places, values.text("model"), ui)
    wish = {"kv": values.text("kv") or BASELINE}
    if of_windows := values.found.pop("window_kv", None):
        wish["window_kv"] = of_windows
    asked = ",window=".join(str(word) for word in wish.values())
    values.found.setdefault("ctx", 2048)
    values.found.setdefault("batch", 1)
    rows: list[dict[str, Any]] = []
    for kv, found_kv in {BASELINE: {"kv": BASELINE}, asked: wish}.items():
        values.found |= found_kv
        ui.say(f"KV in {kv} …")
        with run_command.server_for(places, found, values, ui) as (server, key):
            result, device = quality.measure(server, key), server.device
        first = rows[0]["perplexity"] if rows else result.perplexity
        rows.append(
            {
                "kv": kv,
                "perplexity": round(result.perplexity, 5),
                "delta": round(result.perplexity / first - 1, 6),
                "tokens": result.tokens,
            }
        )
    is_good = rows[-1]["delta"] <= quality.LIMIT

    def human(out: Ui) -> None:
        cells = [(r["kv"], f"{r['perplexity']:.4f}", f"{100 * r['delta']:+.3f} %") for r in rows]
        out.table(("KV", "PERPLEXITY", "AGAINST " + BASELINE.upper()), cells, right=(1, 2))
        if not is_good:
            out.say(f"KV in {asked} makes this model more than {100 * quality.LIMIT:g} % worse on this text")

    facts = {"model": found.name, "device": device, "prompt_tokens": rows[0]["tokens"], "tokens": 1, "rows": []}
    ui.result("bench", {**facts, "quality": rows}, human)
    return 0 if is_good else 1


class Load:
    """Closed-loop load on one server."""

    def __init__(self, server: Server, key: str, prompt_tokens: int, tokens: int):
        self.server, self.key, self.prompt_tokens, self.tokens = server, key, prompt_tokens, tokens

    def one(self, number: int) -> Sample:
        """One request. Raises: PaddockError."""
        words = " ".join(f"item{(number * 7919 + i * 31) % 9973}" for i in range(max(1, self.prompt_tokens // 4)))
        body = {
            "model": self.server.model,
            "messages": [{"role": "user", "content": f"{number}. {words}"}],
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        begun = time.perf_counter()
        request = Chat(self.server, self.key, body)
        times = [time.perf_counter() for _ in request.pieces()]
        ended = time.perf_counter()
        gaps = [1000 * (b - a) for a, b in itertools.pairwise(times)]
        n_tokens = int(request.answer.usage.get("completion_tokens") or len(times))
        return Sample(1000 * ((times[0] if times else ended) - begun), 1000 * (ended - begun), n_tokens, gaps)

    def row(self, n_streams: int, rounds: int) -> dict[str, Any]:
        """So many streams at once."""
        samples: list[Sample] = []
        errors: list[str] = []

        def stream(number: int) -> None:
            for r in range(rounds):
                try:
                    samples.append(self.one((n_streams * 1000 + number) * 100 + r))
                except PaddockError as error:
                    errors.append(error.message)

        threads = [threading.Thread(target=stream, args=(i,), daemon=True) for i in range(n_streams)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        passed = time.perf_counter() - begun
        gaps = [g for s in samples for g in s.gaps_ms]
        return {
            "streams": n_streams,
            "first_ms": round(statistics.median(s.first_ms for s in samples), 2) if samples else 0.0,
            "gap_ms": round(statistics.median(gaps), 3) if gaps else 0.0,
            "gap_p99_ms": round(sorted(gaps)[int(len(gaps) * 0.99)], 3) if gaps else 0.0,
            "tokens_per_s": round(sum(s.tokens for s in samples) / passed, 2),
            "requests": len(samples),
            "errors": len(errors),
            "error": errors[0] if errors else "",
        }
