"""What structured output costs: tokens a second of answers held to a JSON schema, beside free ones on the same runner in the same run.

Usage: python -m bench.held MODEL [--streams 32] [--tokens 96] [--rounds 12] [--machine cpu2] [--dry] [--out FOLDER --commit ID] [--options ...]
A round is free, held, held, free answers; its `loss` is the share of the free rate that the held answers do not reach, and the board has
the median of the rounds: what slows the machine down slowly cancels out. The schema leaves much open (strings, numbers), so that nearly every
token needs a mask of its own. Tokens per step tell whether the batch stays whole. `gap` is the time from the end of one step to the begin of
the next as the device sees it, and `step` what a step takes, medians of a round's steps: `loss_of_steps` is made of these, and other work on
the machine spoils it least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from bench import board
from bench.served import runner

ROOT = Path(__file__).resolve().parent.parent
ITEM = {"type": "object", "properties": {"name": {"type": "string", "minLength": 8}, "n": {"type": "integer"}}, "required": ["name", "n"], "additionalProperties": False}
SCHEMA = {"type": "object", "properties": {"items": {"type": "array", "minItems": 60, "items": ITEM}}, "required": ["items"], "additionalProperties": False}


async def rate(url: str, n_streams: int, n_tokens: int, more: dict[str, Any]) -> float:
    """Output tokens a second of n_streams answers at once."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=n_streams)) as client:

        async def one(i: int) -> int:
            body = {"messages": [{"role": "user", "content": f"List towns as JSON. {i}"}], "max_tokens": n_tokens, "seed": i, "temperature": 1.0, **more}
            answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
            found: int = answer["usage"]["completion_tokens"]
            return found

        begun = time.perf_counter()
        total = sum(await asyncio.gather(*(one(i) for i in range(n_streams))))
        return total / (time.perf_counter() - begun)


def counts(url: str) -> tuple[int, int, int, dict[str, float]]:
    """Output tokens, steps and late masks of the engine so far, and what the device says of the last steps."""
    found = httpx.get(url + "/v1/paddock/state").json()["engine"]
    return found["counters"]["output_tokens"], found["counters"]["steps"], found["counters"]["late_masks"], found["recent_us"]


def main() -> None:
    """Measures and writes the board."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--machine", default="cpu2")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    parser.add_argument("--out", type=Path, help="a folder for the board, where this tree is no git checkout; --commit: which tree it is")
    parser.add_argument("--commit", default="")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="more flags of the runner, at the end")
    a = parser.parse_args()
    wishes: dict[str, dict[str, Any]] = {"free": {"ignore_eos": True}, "held": {"guided_json": SCHEMA}}
    found: dict[str, dict[str, list[float]]] = {name: {"tok_s": [], "tokens_per_step": [], "late_masks": [], "step_us": [], "gap_us": []} for name in wishes}
    with runner(a.model, "--max-ctx", "2048", *a.options) as (url, _):
        for more in wishes.values():
            asyncio.run(rate(url, a.streams, 8, more))
        for _ in range(a.rounds):
            for name in ("free", "held", "held", "free"):
                tokens, steps, late, _ = counts(url)
                found[name]["tok_s"].append(asyncio.run(rate(url, a.streams, a.tokens, wishes[name])))
                after = counts(url)
                found[name]["tokens_per_step"].append((after[0] - tokens) / (after[1] - steps))
                found[name]["late_masks"].append(after[2] - late)
                for word in ("step", "gap"):
                    found[name][f"{word}_us"].append(after[3].get(f"{word}_p50", 0.0))
    free, held = found["free"], found["held"]
    losses = [100 * (1 - sum(held["tok_s"][i : i + 2]) / sum(free["tok_s"][i : i + 2])) for i in range(0, 2 * a.rounds, 2)]
    whole = {name: statistics.median(s + g for s, g in zip(f["step_us"], f["gap_us"], strict=True)) for name, f in found.items()}
    of_steps = 100 * (1 - whole["free"] / whole["held"])
    if a.dry:
        sys.stdout.write(json.dumps({"loss_percent": losses, "median": statistics.median(losses), "loss_of_steps": of_steps, **found}) + "\n")
        return
    name = f"{a.machine}.held.{Path(a.model).stem.lower()}"
    rows = [board.row(f"{name}.tok_s", held["tok_s"], "tok/s", peer=("free", free["tok_s"])), board.row(f"{name}.loss", losses, "%", "lower")]
    rows.append(board.row(f"{name}.loss_of_steps", [of_steps], "%", "lower"))
    for kind, figures in found.items():
        rows.append(board.row(f"{name}.{kind}_tokens_per_step", figures["tokens_per_step"], "tokens"))
        rows.append(board.row(f"{name}.{kind}_late_masks", figures["late_masks"], "masks", "lower"))
        rows += [board.row(f"{name}.{kind}_{word}", figures[word], "us", "lower") for word in ("step_us", "gap_us")]
    if a.out is None:
        board.write(a.machine, "held", rows, streams=a.streams, tokens=a.tokens)
        return
    a.out.mkdir(parents=True, exist_ok=True)
    found_board = board.document(a.machine, rows, a.commit, streams=a.streams, tokens=a.tokens)
    (a.out / f"held-{Path(a.model).stem.lower()}-{a.tokens}.json").write_text(json.dumps(found_board, indent=1) + "\n")
    sys.stdout.write(f"{name}: loss {statistics.median(losses):.1f} %, of steps {of_steps:.1f} %\n")


if __name__ == "__main__":
    main()
