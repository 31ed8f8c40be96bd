"""Closed-loop load on an OpenAI-compatible server: streams, times to first token, gaps between tokens, throughput.

Usage: python -m bench.load --url http://127.0.0.1:11660 [--concurrency 8] [--requests 32] [--in 128] [--out 128] [--api chat|completions|ids]
                            [--key KEY] [--vocab 32000] [--seed 1] [--shared 0] [--cell NAME --machine NAME]
       python -m bench.load --cells FILE [--only NAME ...] --url URL --machine NAME
Every request asks for exactly --out tokens (ignore_eos). `ids`: random token ids, exactly --in of them. --shared: that many first tokens (or
words) are the same in all prompts. TTFT: from sending to the first token-bearing event; ITL: gaps between such events of one request.
Tokens are the server's usage figures. The client's loop is uvloop's, which takes two thirds of asyncio's time for 32 requests at once. With --cell the figures become rows MACHINE.load.CELL.* of a board.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import tomllib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from paddock_runner.edge.listen import reserve_descriptors

from bench import board

WORDS = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue"]


@dataclass
class Result:
    """One request: when it was sent, when its tokens came (seconds), what the server counted."""

    sent: float
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


LEAD_S = 0.02
"""Before the first of requests that have their moments: until then all of them are waiting for theirs."""

Pool = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
"""Open connections that nobody uses. Clients keep theirs, and so does this one."""


async def events(host: str, port: int, path: str, body: bytes, key: str, pool: Pool | None = None, session: str = "") -> AsyncGenerator[bytes, None]:
    """The data of each event of a streamed answer. Raises: RuntimeError for any status but 200."""
    auth = f"authorization: Bearer {key}\r\n" if key else ""
    auth += f"x-session-id: {session}\r\n" if session else ""
    kept = "keep-alive" if pool is not None else "close"
    head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\n{auth}content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: {kept}\r\n\r\n"
    status, is_done = b"", False
    while not status:
        is_new = not pool
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20) if not pool else pool.pop()
        writer.write(head.encode() + body)
        try:
            status = await reader.readline()
        except ConnectionError:
            status = b""
        if not status:
            writer.close()
            if is_new:
                raise RuntimeError("the connection was closed without an answer")
    try:
        lines = [line.lower()] if (line := (await reader.readline()).strip()) else []
        while line:
            if line := (await reader.readline()).strip():
                lines.append(line.lower())
        if status.split()[1:2] != [b"200"]:
            raise RuntimeError(f"{status.decode().strip()[9:]}: {(await reader.read(300)).decode(errors='replace')}")
        can_stay = pool is not None and b"transfer-encoding: chunked" in lines and b"connection: close" not in lines
        while line := await reader.readline():
            if line.startswith(b"data: "):
                data = line[6:].strip()
                if data == b"[DONE]" and can_stay:
                    while (await reader.readline()).strip() != b"0":
                        pass
                    await reader.readline()
                    is_done = True
                yield data
    finally:
        if is_done and pool is not None:
            pool.append((reader, writer))
        else:
            writer.close()


def bears_token(choice: dict[str, Any]) -> bool:
    """Whether an event's choice holds text."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls"))


def body_of(a: argparse.Namespace, number: int) -> bytes:
    """The body of a request."""
    rng, shared = random.Random(a.seed * 1_000_003 + number), random.Random(a.seed)
    body: dict[str, Any] = {"stream": True, "max_tokens": a.out, "temperature": a.temperature, "ignore_eos": True, "stream_options": {"include_usage": True}}
    if a.model:
        body["model"] = a.model
    if a.api == "ids":
        body["prompt"] = [shared.randrange(256, a.vocab) for _ in range(a.shared)] + [rng.randrange(256, a.vocab) for _ in range(a.n_in - a.shared)]
    else:
        text = " ".join([shared.choice(WORDS) for _ in range(a.shared)] + [rng.choice(WORDS) for _ in range(max(1, a.n_in - a.shared))])
        body.update({"messages": [{"role": "user", "content": text}]} if a.api == "chat" else {"prompt": text})
    return json.dumps(body).encode()


async def one(a: argparse.Namespace, body: bytes, result: Result | None = None, pool: Pool | None = None) -> Result:
    """One request. result: one that is watched while it grows."""
    parts = urlsplit(a.url)
    path = "/v1/chat/completions" if a.api == "chat" else "/v1/completions"
    result = result or Result(0.0)
    result.sent = time.perf_counter()
    try:
        async with asyncio.timeout(a.timeout):
            async with aclosing(events(parts.hostname or "127.0.0.1", parts.port or 80, path, body, a.key, pool)) as answer:
                async for data in answer:
                    now = time.perf_counter()
                    if data == b"[DONE]":
                        break
                    chunk = json.loads(data)
                    if chunk.get("error"):
                        raise RuntimeError(str(chunk["error"])[:300])
                    if usage := chunk.get("usage"):
                        result.prompt_tokens, result.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                    if any(bears_token(c) for c in chunk.get("choices") or ()):
                        result.times.append(now)
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.ended = time.perf_counter()
    return result


async def run(a: argparse.Namespace) -> tuple[list[Result], float]:
    """All requests, `concurrency` at a time; results and wall seconds."""
    reserve_descriptors()
    pool: Pool = []
    for i in range(a.warmup):
        await one(a, body_of(a, -1 - i), pool=pool)
    bodies = iter([body_of(a, number) for number in range(a.requests)])
    results: list[Result] = []

    async def worker() -> None:
        for body in bodies:
            results.append(await one(a, body, pool=pool))

    begun = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(min(a.concurrency, a.requests))))
    wall = time.perf_counter() - begun
    for _, writer in pool:
        writer.close()
    return results, wall


async def run_at(a: argparse.Namespace, starts: Sequence[float]) -> tuple[list[Result], float]:
    """One request at each of these moments (seconds from now), whoever has been answered until then; results, and seconds from the first to the end of the last."""
    reserve_descriptors()
    pool: Pool = []
    for i in range(a.warmup):
        await one(a, body_of(a, -1 - i), pool=pool)
    bodies = [body_of(a, number) for number in range(len(starts))]  # a tenth of a millisecond each: made on the way, the first ones would all be late
    begun = time.perf_counter() + LEAD_S

    async def at(body: bytes, start: float) -> Result:
        await asyncio.sleep(begun + start - time.perf_counter())
        return await one(a, body, pool=pool)

    results = await asyncio.gather(*(at(body, start) for body, start in zip(bodies, starts, strict=True)))
    for _, writer in pool:
        writer.close()
    return results, max(r.ended for r in results) - min(r.sent for r in results)


def percentile(values: list[float], share: float) -> float:
    """Between the ranks, linearly; 0 when there are none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=1000, method="inclusive")[min(998, max(0, round(share * 1000) - 1))]


def summary(results: list[Result], wall: float) -> dict[str, Any]:
    """The figures of a run, times in milliseconds."""
    good = [r for r in results if not r.error and r.times]
    first = [1e3 * (r.times[0] - r.sent) for r in good]
    gaps = [1e3 * (b - a) for r in good for a, b in zip(r.times, r.times[1:], strict=False)]
    tokens = sum(r.output_tokens for r in good)
    return {
        "requests": len(results), "failed": len(results) - len(good), "wall_s": round(wall, 3),
        "prompt_tokens": sum(r.prompt_tokens for r in good), "cached_tokens": sum(r.cached_tokens for r in good), "output_tokens": tokens,
        "out_tok_s": round(tokens / wall, 2), "ttft_p50_ms": round(percentile(first, 0.5), 3), "ttft_p99_ms": round(percentile(first, 0.99), 3),
        "itl_p50_ms": round(percentile(gaps, 0.5), 3), "itl_p99_ms": round(percentile(gaps, 0.99), 3),
        "events_per_token": round(sum(len(r.times) for r in good) / tokens, 3) if tokens else 0.0,
        "errors": sorted({r.error[:200] for r in results if r.error})[:3],
    }  # fmt: skip


def main() -> int:
    """Runs the load; prints one JSON object; 1 when a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:11660")
    add("--api", default="chat", choices=["chat", "completions", "ids"])
    add("--model", default="")
    add("--key", default="")
    add("--concurrency", type=int, default=1)
    add("--requests", type=int, default=16)
    add("--in", dest="n_in", type=int, default=128)
    add("--out", type=int, default=128)
    add("--shared", type=int, default=0)
    add("--vocab", type=int, default=32000)
    add("--temperature", type=float, default=0.0)
    add("--warmup", type=int, default=1)
    add("--seed", type=int, default=1)
    add("--timeout", type=float, default=600)
    add("--cell", default="")
    add("--machine", default="cpu2")
    add("--cells", default="", help="TOML file with cells to run one after the other")
    add("--only", nargs="*", default=[], help="names of the cells to run")
    a = parser.parse_args()
    if not a.cells:
        return measure(a)
    found = read_cells(Path(a.cells))
    wrong = 0
    for cell in found:
        if a.only and cell["name"] not in a.only:
            continue
        fields = {"api": "ids", "n_in": cell["in"], "n_out": cell["out"], "out": cell["out"], "cell": cell["name"]}
        fields |= {k: cell[k] for k in ("concurrency", "requests", "shared", "api") if k in cell}
        wrong |= measure(argparse.Namespace(**{**vars(a), **fields}))
    return wrong


ROOT_CELLS = Path(__file__).resolve().parent / "cells"
CELL_FIELDS = {"name": str, "in": int, "out": int, "concurrency": int, "requests": int}


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a file. Raises: SystemExit naming the cell and field that is missing or of the wrong kind."""
    cells = tomllib.loads(path.read_text())["cell"]
    for i, cell in enumerate(cells):
        for name, kind in CELL_FIELDS.items():
            if not isinstance(cell.get(name), kind):
                raise SystemExit(f"{path}: cell {i + 1} needs {name} ({kind.__name__})")
        if unknown := set(cell) - {*CELL_FIELDS, "shared", "api"}:
            raise SystemExit(f"{path}: cell {i + 1} has unknown fields {', '.join(sorted(unknown))}")
    return list(cells)


def measure(a: argparse.Namespace) -> int:
    """Runs one cell; prints one JSON object; 1 when a request failed."""
    results, wall = uvloop.run(run(a))
    figures = summary(results, wall)
    sys.stdout.write(json.dumps(figures) + "\n")
    if a.cell and not figures["failed"]:
        units = {"out_tok_s": ("tok/s", "higher")}
        names = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "out_tok_s")
        rows = [board.row(f"{a.machine}.load.{a.cell}.{n}", [figures[n]], *units.get(n, ("ms", "lower"))) for n in names]
        board.write(a.machine, "load", rows, concurrency=a.concurrency, n_in=a.n_in, n_out=a.out, api=a.api)
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
