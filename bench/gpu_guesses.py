"""What guessed tokens are worth on a GPU: one stream and several, with guesses and without, on text that repeats itself as much as one likes.

Usage: python -m bench.gpu_guesses --pack PACK --out FOLDER [--formats fp8 bf16] [--model 8b] [--streams 1 8] [--runs 1000 24 6 0] [--tokens 400] [--held] [--options ...]
The weights are those of a real shape, but the model counts (bench.synthetic --counts): after t comes t + 1. A prompt holds the numbers that the answer will
have, in pieces of --runs tokens that stand in another order: at the end of each piece guesses go wrong, as in a file that is written again with edits. 0: the prompt
has nothing of the answer, and without guesses it does not matter. --held: answers are held to a grammar, which allows nothing but such names of numbers. Time is from the first token to the last; every answer is compared with what it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench import board, load, served, synthetic

FREE: dict[str, Any] = {"ignore_eos": True}
HELD: dict[str, Any] = {"guided_regex": "(t[0-9]+)*"}
SPAN = 3001
"""Tokens between the starts of two requests, so that they have nothing in common."""


def prompt_of(number: int, n_answer: int, run: int, n_vocab: int) -> list[int]:
    """Prompt `number`: it holds what follows its last token in pieces of `run` tokens; as long whatever they are."""
    rng, third = random.Random(number), n_vocab // 3
    first = 256 + SPAN * number % third
    if not run:
        return [first + third + rng.randrange(third // 2) for _ in range(n_answer)] + [first]
    pieces = [list(range(at, min(at + run, first + n_answer))) for at in range(first, first + n_answer, run)]
    rng.shuffle(pieces)
    return [t for piece in pieces for t in piece] + [first]


def counters(url: str) -> tuple[int, int]:
    """Tokens guessed and right so far."""
    with urllib.request.urlopen(f"{url}/v1/paddock/state", timeout=10) as answer:
        seen = json.load(answer)["engine"]["counters"]
    return seen["drafted_tokens"], seen["accepted_tokens"]


async def ask(url: str, prompt: list[int], n: int, more: dict[str, Any]) -> load.Result:
    """One answer, and when its tokens came."""
    a = argparse.Namespace(url=url, api="ids", key="", timeout=120.0)
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **more}
    return await load.one(a, json.dumps(body).encode())


def check(url: str, prompt: list[int], n: int, more: dict[str, Any]) -> bool:
    """Whether an answer counts on from the prompt."""
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, **more}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)["choices"][0]
    return bool(found["text"] == "".join(f"t{prompt[-1] + 1 + i}" for i in range(n)))


async def pass_of(url: str, streams: int, run: int, n: int, seed: int, n_vocab: int, more: dict[str, Any]) -> float:
    """Tokens per second over all streams, after each has begun."""
    prompts = [prompt_of(seed * streams + k, n, run, n_vocab) for k in range(streams)]
    results = await asyncio.gather(*(ask(url, p, n, more) for p in prompts))
    if any(r.error or r.output_tokens != n for r in results):
        raise RuntimeError(next((r.error for r in results if r.error), "an answer is too short"))
    begun, ended = max(r.times[0] for r in results), max(r.times[-1] for r in results)
    return streams * (n - 1) / (ended - begun)


def serve(folder: Path, name: str, kind: str, a: argparse.Namespace) -> dict[tuple[int, int], list[float]]:
    """Every case with these guesses."""
    found: dict[tuple[int, int], list[float]] = {}
    flags = ["--device", a.device, *(["--kernel-pack", str(a.pack)] if a.pack else []), "--log-level", "warning", "--guesses", kind, *a.options]
    n_vocab, begun = synthetic.SHAPES[a.model][6], time.monotonic()
    with served.runner(folder, *flags, limit_s=60.0) as (url, _):
        told, seed, more = [f"{name} {kind}: ready after {time.monotonic() - begun:.1f} s"], 0, HELD if a.held else FREE
        is_right = check(url, prompt_of(1000, 100, 24, n_vocab), 100, more)
        for streams in a.streams:
            for run in a.runs if kind != "off" else a.runs[:1]:
                before = counters(url)
                for _ in range(a.passes):
                    seed += 1
                    found.setdefault((streams, run), []).append(asyncio.run(pass_of(url, streams, run, a.tokens, seed, n_vocab, more)))
                drafted, accepted = (y - x for x, y in zip(before, counters(url), strict=True))
                rates = " ".join(f"{x:.0f}" for x in found[streams, run])
                told.append(f"  {streams} streams, runs of {run:4}: {rates} tok/s, guessed {drafted}, right {accepted} ({100 * accepted / max(drafted, 1):.0f} %)")
        with urllib.request.urlopen(f"{url}/v1/paddock/state", timeout=10) as answer:
            seen = json.load(answer)["engine"]
        told.append(f"  counts on: {is_right}; cost {[round(v) for v in seen['cost_us'].values()]} gaps {seen['device_us']}")
    sys.stdout.write("\n".join(told) + "\n")
    sys.stdout.flush()
    return found


def main() -> None:
    """Runs everything and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pack", type=Path)
    add("--device", default="cuda")
    add("--out", type=Path, required=True)
    add("--model", default="8b")
    add("--formats", nargs="*", default=["fp8", "bf16"])
    add("--streams", type=int, nargs="*", default=[1, 8])
    add("--runs", type=int, nargs="*", default=[1000, 24, 6, 0])
    add("--tokens", type=int, default=400)
    add("--passes", type=int, default=2)
    add("--held", action="store_true")
    add("--commit", default="")
    add("--folder", type=Path, default=Path("/dev/shm/paddock-guesses"))
    add("--options", nargs=argparse.REMAINDER, default=["--max-ctx", "4096", "--max-batch", "16"])
    a = parser.parse_args()
    a.pack = a.pack and a.pack.resolve()
    a.out.mkdir(parents=True, exist_ok=True)
    served.use_this_tree()
    rows: list[dict[str, Any]] = []
    for kind in a.formats:
        folder = a.folder / f"{a.model}-{kind}"
        if not (folder / "model.safetensors").exists():
            synthetic.write(a.model, kind, folder, counts=True)
        name = f"{a.model}.{kind}"
        try:
            plain, guessed = serve(folder, name, "off", a), serve(folder, name, "auto", a)
        except RuntimeError as error:
            sys.stdout.write(f"{name}: {error}\n")
            continue
        for (streams, run), rates in guessed.items():
            rows.append(board.row(f"h200.guesses.{name}.{'held.' * a.held}{streams}.runs_{run}", rates, "tok/s", peer=("without guesses", plain[streams, a.runs[0]])))
            sys.stdout.write(f"{rows[-1]['id']}: {rows[-1]['value']:.0f} tok/s, {rows[-1]['vs_peer']:.2f} times without\n")
    (a.out / ("guesses-held.json" if a.held else "guesses.json")).write_text(json.dumps(board.document("h200", rows, a.commit, model=f"{a.model}'s shape, weights that count, prompts as ids"), indent=1) + "\n")


if __name__ == "__main__":
    main()
