"""NVIDIA's aiperf and this bench's own client on one server, cell by cell: do they measure the same?

Usage: python -m bench.aiperf --url URL --tokenizer FOLDER [--cells FILE] [--only NAME ...] [--program aiperf] [--rounds 2] [--machine NAME] [--commit C]
       python -m bench.aiperf --checkpoint FOLDER [--pack PACK] ...     starts a runner for it (--max-batch 128)
Each round is bench.load, then aiperf (completions, streaming, the server's token counts), with the cell's concurrency, requests, prompt and answer
tokens; then bench.load again with one request at each moment at which aiperf sent one. aiperf gives its workers one request after the other, 1 to 8 ms apart, where this client sends them all at once,
and that is another load: the first says what a cell gives, the last is what is compared with aiperf. Compared: output tokens a second of the whole cell, the median time to the first token, and the median of requests' mean gap between tokens
(aiperf's inter_token_latency). Beside them stands the mean time to the first token as the client has it and as the server does, from a request's receipt to its first byte: what
both clients add to that is theirs, and what it differs by is how their requests came. aiperf has its own environment: `pip install aiperf` there, and --program names it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from bench import board, load, served

Figures = dict[str, float]
UNITS = {"out_tok_s": ("tok/s", "higher"), "ttft_p50_ms": ("ms", "lower"), "itl_p50_ms": ("ms", "lower")}
FIRST = "paddock_time_to_first_token_seconds"


def first_tokens(url: str) -> tuple[float, float]:
    """Seconds to first tokens that the server has counted, and how many."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        found = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line.startswith(FIRST))
    return float(found[f"{FIRST}_sum"]), float(found[f"{FIRST}_count"])


def ours(url: str, cell: dict[str, Any], vocab: int, starts: Sequence[float] = ()) -> Figures:
    """One run of the cell by bench.load's client, or a request at each of these moments. Raises: RuntimeError when a request failed."""
    a = argparse.Namespace(
        url=url, api="ids", model="", key="", n_in=cell["in"], out=cell["out"], concurrency=cell["concurrency"], requests=cell["requests"], shared=0,
        vocab=vocab, temperature=0.0, warmup=1, seed=random.randrange(1 << 20), timeout=600.0,
    )  # fmt: skip
    results, wall = uvloop.run(load.run_at(a, starts) if starts else load.run(a))
    if wrong := [r.error for r in results if r.error or not r.times]:
        raise RuntimeError(f"bench.load: {len(wrong)} of {len(results)} requests failed: {wrong[0]}")
    return {
        "out_tok_s": sum(r.output_tokens for r in results) / wall,
        "ttft_p50_ms": statistics.median(1e3 * (r.times[0] - r.sent) for r in results),
        "itl_p50_ms": statistics.median(1e3 * (r.times[-1] - r.times[0]) / max(1, r.output_tokens - 1) for r in results),
        "ttft_mean_ms": statistics.fmean(1e3 * (r.times[0] - r.sent) for r in results),
    }


def theirs(program: str, url: str, model: str, tokenizer: Path, cell: dict[str, Any]) -> tuple[Figures, list[float]]:
    """One run of the cell by aiperf, and when it sent each request, in seconds from the first. Raises: RuntimeError with its last words when it fails, or does not count the cell's tokens."""
    with tempfile.TemporaryDirectory(prefix="aiperf-") as folder:
        command = [
            program, "profile", "-m", model, "--url", url, "--endpoint-type", "completions", "--streaming", "--tokenizer", str(tokenizer), "--request-count", str(cell["requests"]),
            "--concurrency", str(cell["concurrency"]), "--warmup-request-count", "1", "--isl", str(cell["in"]), "--osl", str(cell["out"]), "--extra-inputs", "ignore_eos:true",
            "--extra-inputs", "temperature:0", "--use-server-token-count", "--random-seed", str(random.randrange(1 << 20)), "--ui", "none", "--artifact-dir", folder,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise RuntimeError(f"aiperf ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-1000:]}")
        found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
        sent = [json.loads(line)["metadata"] for line in (Path(folder) / "profile_export.jsonl").read_text().splitlines()]
    counted = found["request_count"]["avg"], found["output_sequence_length"]["avg"]
    if counted != (cell["requests"], cell["out"]):
        raise RuntimeError(f"aiperf counted {counted[0]:.0f} answers of {counted[1]:.2f} tokens, the cell is {cell['requests']} of {cell['out']}")
    starts = sorted(facts["request_start_ns"] / 1e9 for facts in sent if facts["benchmark_phase"] == "profiling")
    return {
        "out_tok_s": found["output_token_throughput"]["avg"], "ttft_p50_ms": found["time_to_first_token"]["p50"], "itl_p50_ms": found["inter_token_latency"]["p50"],
        "ttft_mean_ms": found["time_to_first_token"]["avg"],
    }, [start - starts[0] for start in starts]  # fmt: skip


def _seen(name: str, url: str, cell: dict[str, Any], run: Callable[[], Figures]) -> Figures:
    """A run, and what the server saw of it."""
    before = first_tokens(url)
    found = run()
    after = first_tokens(url)
    seen = 1e3 * (after[0] - before[0]) / max(1.0, after[1] - before[1])
    sys.stdout.write(f"{cell['name']:14}{name:15} mean time to first token {found['ttft_mean_ms']:.2f} ms, by the server {seen:.2f}: {found['ttft_mean_ms'] - seen:.2f} are the way and the client's\n")
    sys.stdout.flush()
    return found


def apart(row: dict[str, Any]) -> float:
    """By which part of aiperf's figure ours is larger; infinitely where aiperf has measured nothing."""
    peer: float = row["peer_value"]
    return row["value"] / peer - 1 if peer else math.inf


def compare(a: argparse.Namespace, url: str, cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Rounds of one cell by both: rows with aiperf's figure as the peer's; prints a line a figure."""
    mine, peer, starts = list[Figures](), list[Figures](), list[float]()

    def run() -> Figures:
        found, starts[:] = theirs(a.program, url, a.model, a.tokenizer, cell)
        return found

    for _ in range(a.rounds):
        alone = _seen("bench.load", url, cell, lambda: ours(url, cell, a.vocab))
        peer.append(_seen("aiperf", url, cell, run))
        mine.append(_seen("at its moments", url, cell, lambda: ours(url, cell, a.vocab, starts)))
        sys.stdout.write(f"{cell['name']:14}by itself    {alone['out_tok_s']:.2f} tok/s, first token p50 {alone['ttft_p50_ms']:.2f} ms, gaps {alone['itl_p50_ms']:.2f} ms\n")
    rows = []
    for name, (unit, better) in UNITS.items():
        row = board.row(f"{a.machine}.aiperf.{cell['name']}.{name}", [f[name] for f in mine], unit, better, peer=("aiperf", [f[name] for f in peer]))
        sys.stdout.write(f"{cell['name']:14}{name:13}{row['value']:10.2f}  aiperf {row['peer_value']:10.2f} {unit:6} {100 * apart(row):+6.2f} %\n")
        sys.stdout.flush()
        rows.append(row)
    return rows


def main() -> int:
    """Compares cells; writes a board; 1 when throughput or the first token differ by more than 3 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", default="")
    add("--checkpoint", type=Path)
    add("--pack", type=Path)
    add("--model", default="served")
    add("--tokenizer", type=Path)
    add("--vocab", type=int, default=32000)
    add("--cells", type=Path, default=load.ROOT_CELLS / "aiperf.toml")
    add("--only", nargs="*", default=[])
    add("--program", default="aiperf")
    add("--rounds", type=int, default=2)
    add("--machine", default="cpu2")
    add("--commit", default="")
    a = parser.parse_args()
    if bool(a.url) == bool(a.checkpoint):
        parser.error("give --url of a server or --checkpoint of a model to serve")
    a.tokenizer = a.tokenizer or a.checkpoint
    if a.tokenizer is None:
        parser.error("--url needs --tokenizer, the folder of the model's tokenizer")
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        url = a.url
        if a.checkpoint:
            served.use_this_tree()
            words = ["--device", "cuda", "--kernel-pack", str(a.pack)] if a.pack else []
            url, _ = stack.enter_context(served.runner(a.checkpoint, "--name", a.model, "--guesses", "off", "--max-ctx", "4096", "--max-batch", "128", *words))
        for cell in load.read_cells(a.cells):
            if not a.only or cell["name"] in a.only:
                rows += compare(a, url, cell)
    board.write(a.machine, "aiperf", rows, a.commit, rounds=a.rounds)
    far = [r["id"] for r in rows if not r["id"].endswith("itl_p50_ms") and abs(apart(r)) > 0.03]
    sys.stdout.write(f"further apart than 3 %: {', '.join(far)}\n" if far else "within 3 %\n")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
