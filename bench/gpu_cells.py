"""Serving cells of one GPU in one call: weights are made up, a runner serves them, load comes over HTTP; a compact table.

Usage: python -m bench.gpu_cells --pack PACK --out FOLDER [--formats fp8 bf16] [--cells 128/128c32x96 ...] [--long 65000] [--twin] [--model 8b] [--options ...]
A cell is PROMPT/ANSWERcSTREAMSxREQUESTS, closed loop, prompts as ids. Nothing is guessed ahead: answers of random weights go round in circles, and would be guessed too well. --long: 16 streams decode, then a prompt of that length comes; gaps are those between its
sending and its first token, as ratios of the gaps before. --twin: throughput of the engine without HTTP beside the same steps from a loop in C++ (bench.twin).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from bench import board, load, served, synthetic

CELL = re.compile(r"(\d+)/(\d+)c(\d+)x(\d+)")
CELLS = ["128/128c1x4", "128/128c8x32", "128/128c32x96", "128/128c32x128", "128/128c128x256", "2048/128c32x96"]
VOCAB = [150000]
"""Ids that prompts are made of: less than this."""
UNITS = {"out_tok_s": ("tok/s", "higher")}
NAMES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "out_tok_s")


def options(url: str, n_in: int, n_out: int, streams: int, requests: int) -> argparse.Namespace:
    """What bench.load takes."""
    return argparse.Namespace(
        url=url, api="ids", model="", key="", n_in=n_in, out=n_out, concurrency=streams, requests=requests, shared=0, vocab=VOCAB[0], temperature=0.0, warmup=1,
        seed=random.randrange(1 << 20), timeout=120.0,
    )  # fmt: skip


def state(url: str) -> dict[str, Any]:
    """What the runner says of itself."""
    with urllib.request.urlopen(f"{url}/v1/paddock/state", timeout=10) as answer:
        return dict(json.load(answer)["engine"])


def run_cell(url: str, name: str, cell: str, n_before: int = 0) -> list[dict[str, Any]]:
    """One cell: a line of the table, and rows; n_before: cells of that load before it, which have the plain name."""
    found = CELL.fullmatch(cell)
    assert found, cell
    n_in, n_out, streams, requests = map(int, found.groups())
    results, wall = uvloop.run(load.run(options(url, n_in, n_out, streams, requests)))
    f = load.summary(results, wall)
    first = sorted(1e3 * (r.times[0] - r.sent) for r in results if r.times)
    tenths = " ".join(f"{first[min(len(first) - 1, len(first) * k // 8)]:.0f}" for k in range(9)) if first else ""
    sys.stdout.write(
        f"{name:9}{cell:17}{f['out_tok_s']:8.0f} tok/s  ttft {f['ttft_p50_ms']:7.1f} {f['ttft_p99_ms']:7.1f} x{f['ttft_p99_ms'] / max(f['ttft_p50_ms'], 1e-9):.2f}"
        f"  itl {f['itl_p50_ms']:6.2f} {f['itl_p99_ms']:6.2f} x{f['itl_p99_ms'] / max(f['itl_p50_ms'], 1e-9):.2f}  failed {f['failed']}  eighths of ttft {tenths} {f['errors'] or ''}\n"
    )
    sys.stdout.flush()
    again = ("", ".again")[n_before] if n_before < 2 else f".again{n_before}"
    return [board.row(f"h200.load.{name}.{cell.split('x')[0]}{again}.{n}", [f[n]], *UNITS.get(n, ("ms", "lower"))) for n in NAMES] if not f["failed"] else []


async def _long(url: str, n_prompt: int, streams: int) -> dict[str, float]:
    a = options(url, n_prompt, 4, 1, 1)
    alone = await load.one(a, load.body_of(a, 1))
    await load.one(a, load.body_of(a, 2))
    b = options(url, 128, 3000, streams, streams)
    results = [load.Result(0.0) for _ in range(streams)]
    tasks = [asyncio.create_task(load.one(b, load.body_of(b, k), results[k])) for k in range(streams)]
    while not all(len(r.times) >= 150 for r in results):
        await asyncio.sleep(0.02)
        if any(r.error for r in results):
            raise RuntimeError(f"a stream failed: {next(r.error for r in results if r.error)}")
    beside = await load.one(a, load.body_of(a, 3))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if not beside.times or not alone.times:
        raise RuntimeError(f"the long prompt failed: {alone.error or beside.error}")
    pairs = [(x, y) for r in results for x, y in pairwise(r.times)]
    before = [1e3 * (y - x) for x, y in pairs if y < beside.sent][-100 * streams :]
    during = [1e3 * (y - x) for x, y in pairs if x > beside.sent and y < beside.times[0]]
    found = {f"itl_p{round(100 * q)}": load.percentile(during, q) / load.percentile(before, q) for q in (0.5, 0.99)}
    first = [1e3 * (r.times[0] - r.sent) for r in (alone, beside)]
    return found | {"ttft": first[1] / first[0], "alone_ms": first[0], "beside_ms": first[1], "before_p50_ms": load.percentile(before, 0.5), "before_p99_ms": load.percentile(before, 0.99)}


def long_prompt(url: str, name: str, n_prompt: int) -> list[dict[str, Any]]:
    """Streams beside a long prompt."""
    f = uvloop.run(_long(url, n_prompt, 16))
    sys.stdout.write(f"{name:9}{n_prompt} beside 16: " + "  ".join(f"{k} {v:.2f}" for k, v in f.items()) + "\n")
    sys.stdout.flush()
    return [board.row(f"h200.longprefill.{name}.{k}", [f[k]], "ratio", "lower") for k in ("itl_p50", "itl_p99", "ttft")]


def save(a: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The board so far."""
    model = f"{a.model}'s shape, weights made up, closed loop over loopback, prompts as ids"
    board.save(a.out / "serve.json", rows, commit=a.commit, model=model)


def serve(folder: Path, name: str, a: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Everything of one checkpoint."""
    flags = ["--device", a.device, *(["--kernel-pack", str(a.pack)] if a.pack else []), "--log-level", "warning", "--guesses", "off", *a.options]
    begun = time.monotonic()
    with served.runner(folder, *flags, limit_s=a.limit) as (url, _):
        sys.stdout.write(f"{name}: ready after {time.monotonic() - begun:.1f} s\n")
        for i, cell in enumerate(a.cells):
            rows += run_cell(url, name, cell, sum(c.split("x")[0] == cell.split("x")[0] for c in a.cells[:i]))
            save(a, rows)
        seen = state(url)
        sys.stdout.write(f"{name:9}cost {[round(v) for v in seen['cost_us'].values()]} gaps {seen['device_us']}\n")
        if a.long:
            rows += long_prompt(url, name, a.long)
            save(a, rows)


def twin(folder: Path, a: argparse.Namespace) -> None:
    """Engine against the loop in C++, in a process of its own."""
    words = [sys.executable, "-m", "bench.twin", str(folder), *(["--pack", str(a.pack)] if a.pack else []), "--cells", *a.twin, "--rounds", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90)
    sys.stdout.write(f"twin: {done.stdout or done.stderr[-600:]}")
    sys.stdout.flush()


def main() -> None:
    """Runs everything and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--formats", nargs="*", default=["fp8", "bf16"])
    parser.add_argument("--cells", nargs="*", default=CELLS)
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json (or .xz of one) instead of a made-up one")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds in which the runner must be ready")
    parser.add_argument("--twin", nargs="*", default=[], metavar="CELL", help="cells as bench.twin takes them: 128/128c32")
    parser.add_argument("--commit", default="", help="of this tree, where it is no git checkout")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/paddock-bench"), help="where the weights are written")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=["--max-ctx", "69632", "--max-batch", "128"])
    a = parser.parse_args()
    a.pack = a.pack and a.pack.resolve()
    VOCAB[0] = synthetic.SHAPES[a.model][6] - 8
    a.out.mkdir(parents=True, exist_ok=True)
    served.use_this_tree()
    rows: list[dict[str, Any]] = []
    for kind in a.formats:
        folder = a.folder / f"{a.model}-{kind}"
        if not (folder / "model.safetensors").exists():
            begun = time.monotonic()
            n_bytes = synthetic.write(a.model, kind, folder, words=a.tokenizer)
            sys.stdout.write(f"{folder.name}: {n_bytes / 1e9:.1f} GB written in {time.monotonic() - begun:.1f} s\n")
        try:
            serve(folder, f"{a.model}.{kind}", a, rows)
        except RuntimeError as error:
            sys.stdout.write(f"{kind}: {error}\n")
        if a.twin:
            twin(folder, a)


if __name__ == "__main__":
    main()
