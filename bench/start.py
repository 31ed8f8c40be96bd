"""From a runner's birth to the first token of its first answer, and what each stage of that took in front and engine.

Usage: python -m bench.start MODEL [--rounds 5] [--board NAME] [-- FLAGS OF THE RUNNER]
`at` is when a stage ended, counted from the runner's birth; `cpu` is the processor time of that process in it. Stages of front and
engine run beside each other. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench import board
from bench.served import runner

Stages = dict[tuple[str, str], dict[str, float]]


def start_stages(url: str) -> Stages:
    """The stages that a runner says its start had, by (front or engine, stage)."""
    with urllib.request.urlopen(url + "/v1/paddock/state", timeout=10) as answer:
        state: dict[str, Any] = json.load(answer)
    return {(of, row["stage"]): row for of in ("front", "engine") for row in state[of]["start"]}


def stage_table(stages: Stages) -> str:
    """Lines for people, in the order in which the stages ended."""
    lines = [f"{'of':8}{'stage':12}{'at s':>8}{'took s':>8}{'cpu s':>8}"]
    rows = sorted(stages.items(), key=lambda item: item[1]["at"])
    lines += [f"{of:8}{stage:12}{row['at']:8.3f}{row['seconds']:8.3f}{row['cpu']:8.3f}" for (of, stage), row in rows]
    return "\n".join(lines) + "\n"


def one_start(model: Path, flags: list[str]) -> tuple[float, Stages]:
    """Seconds to the first token, and the stages."""
    born = time.monotonic()
    with runner(model, *flags) as (url, _):
        body = json.dumps({"prompt": [100, 200, 300], "max_tokens": 1, "temperature": 0}).encode()
        with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"}), timeout=120) as answer:
            answer.read()
        return time.monotonic() - born, start_stages(url)


def main() -> None:
    """Starts a few times, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--board", default="")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    starts = [one_start(options.model, options.flags) for _ in range(options.rounds)]
    first = [seconds for seconds, _ in starts]
    seen = [stages for _, stages in starts]
    shared = [key for key in seen[0] if all(key in stages for stages in seen)]
    medians = {key: {name: statistics.median(stages[key][name] for stages in seen) for name in ("at", "seconds", "cpu")} for key in shared}
    sys.stdout.write(f"first token after {statistics.median(first):.3f} s ({min(first):.3f} to {max(first):.3f})\n{stage_table(medians)}")
    if options.board:
        rows = [board.row(f"{options.board}.start.first_token_s", first, "s", "lower", limit=None)]
        for of in ("front", "engine"):
            cpu = [sum(row["cpu"] for key, row in stages.items() if key[0] == of) for stages in seen]
            rows.append(board.row(f"{options.board}.start.{of}_cpu_s", cpu, "s", "lower", limit=None))
        board.write("cpu2", "start", rows, model=options.model.name)


if __name__ == "__main__":
    main()
