"""What structured output costs: tokens a second of answers held to a JSON schema, beside free ones on the same runner in the same run.

Usage: python -m bench.held MODEL [--streams 32] [--tokens 64] [--rounds 5] [--machine cpu2] [--dry]
Rounds alternate between free and held; `loss` is the share of the free rate that the next round's held answers do not reach. The schema
leaves much open (strings, numbers), so that nearly every token needs a mask of its own. Tokens per step tell whether the batch stays whole,
also on a machine where other work spoils the rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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


def counts(url: str) -> tuple[int, int]:
    """Output tokens and steps of the engine so far."""
    found = httpx.get(url + "/v1/paddock/state").json()["engine"]["counters"]
    return found["output_tokens"], found["steps"]


def main() -> None:
    """Measures and writes the board."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default="cpu2")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    a = parser.parse_args()
    wishes: dict[str, dict[str, Any]] = {"free": {"ignore_eos": True}, "held": {"guided_json": SCHEMA}}
    rates: dict[str, list[float]] = {name: [] for name in wishes}
    fill: dict[str, list[float]] = {name: [] for name in wishes}
    with runner(a.model, "--max-ctx", "2048") as (url, _):
        for more in wishes.values():
            asyncio.run(rate(url, a.streams, 8, more))
        for _ in range(a.rounds):
            for name, more in wishes.items():
                tokens, steps = counts(url)
                rates[name].append(asyncio.run(rate(url, a.streams, a.tokens, more)))
                after = counts(url)
                fill[name].append((after[0] - tokens) / (after[1] - steps))
    losses = [100 * (1 - h / f) for f, h in zip(rates["free"], rates["held"], strict=True)]
    if a.dry:
        sys.stdout.write(json.dumps({"tok_s": rates, "tokens_per_step": fill, "loss_percent": losses}, indent=1) + "\n")
        return
    name = f"{a.machine}.held.{Path(a.model).stem.lower()}"
    rows = [board.row(f"{name}.tok_s", rates["held"], "tok/s", peer=("free", rates["free"])), board.row(f"{name}.loss", losses, "%", "lower")]
    rows += [board.row(f"{name}.{kind}_tokens_per_step", found, "tokens") for kind, found in fill.items()]
    board.write(a.machine, "held", rows, streams=a.streams, tokens=a.tokens)


if __name__ == "__main__":
    main()
