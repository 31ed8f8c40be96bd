"""Minutes or hours of load with clients that go away: memory, file descriptors, pages and pace by the minute, and what is left at the end.

Usage: python -m bench.soak MODEL --minutes 60 [--streams 128] [--vocab N] [--every 60] [--abort 0.1] [--sessions 0.5] [--idle 10] [--machine NAME] [--options ...runner flags]
Prompts of 16 to 512 tokens, half of them with a beginning that others have; answers of 8 to 256. A share of the clients hangs up in the middle. At the end nothing
runs: slots, pages and connections must be back, and no request may have been without an end. Then the runner is left alone: what it takes of the processor idle.
Less than a minute tells much, too, with a small model, many aborts and a look every few seconds: growth is told per thousand requests, from the first third of the looks to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from bench import board, load, served

TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Tally:
    """What the clients saw since the last look."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_ended: int = 0
    n_aborted: int = 0
    lost: list[str] = field(default_factory=list)


def usage(pid: int) -> dict[str, float]:
    """Resident MiB without shared memory's, file descriptors, threads and processor seconds of a process and its descendants."""
    total = {"rss_mib": 0.0, "fds": 0.0, "threads": 0.0, "cpu_s": 0.0}
    for at in served.family(pid):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{at}/status").read_text().splitlines())
        total["rss_mib"] += int(status["RssAnon"].split()[0]) / 1024
        total["threads"] += int(status["Threads"])
        total["fds"] += len(os.listdir(f"/proc/{at}/fd"))
        fields = Path(f"/proc/{at}/stat").read_text().rsplit(")", 1)[1].split()
        total["cpu_s"] += (int(fields[11]) + int(fields[12])) / TICK
    return total


def state(url: str) -> dict[str, Any]:
    """What the runner says of itself."""
    with urllib.request.urlopen(f"{url}/v1/paddock/state", timeout=30) as answer:
        return dict(json.load(answer))


async def client(a: argparse.Namespace, url: str, rng: random.Random, until: float, tally: Tally) -> None:
    """One stream after another, some of them left in the middle."""
    parts = urlsplit(url)
    shared = [random.Random(7).randrange(256, a.vocab) for _ in range(256)]
    while time.monotonic() < until:
        n = rng.randrange(16, 512)
        head = shared[: rng.choice((32, 128, 256))] if rng.random() < 0.5 else []
        prompt = (head + [rng.randrange(256, a.vocab) for _ in range(n)])[: max(n, 17)]
        leave_after = rng.randrange(1, 64) if rng.random() < a.abort else 0
        body = json.dumps({"prompt": prompt, "max_tokens": rng.randrange(8, 257), "stream": True, "ignore_eos": True, "temperature": rng.choice((0, 0.8))}).encode()
        sent, times = time.perf_counter(), list[float]()
        events = load.events(parts.hostname or "127.0.0.1", parts.port or 80, "/v1/completions", body, "", session=f"{rng.random()}" if rng.random() < a.sessions else "")
        has_ended = False
        try:
            async with asyncio.timeout(a.timeout):
                async for data in events:
                    if data == b"[DONE]":
                        has_ended = True
                        break
                    times.append(time.perf_counter())
                    if leave_after and len(times) >= leave_after:
                        break
        except (OSError, RuntimeError, TimeoutError) as error:
            tally.lost.append(f"{type(error).__name__}: {error}"[:120])
            continue
        finally:
            await events.aclose()
        if not has_ended and not leave_after:
            tally.lost.append("an answer without an end")
        tally.n_aborted += not has_ended
        tally.n_ended += has_ended
        tally.n_tokens += len(times)
        if times:
            tally.first.append(1e3 * (times[0] - sent))
            tally.gaps += [1e3 * (y - x) for x, y in pairwise(times)][:64]


def line(minute: float, tally: Tally, seconds: float, use: dict[str, float]) -> dict[str, float]:
    """One look, printed."""
    found = {
        "minute": minute, "tok_s": tally.n_tokens / seconds, "itl_mean": sum(tally.gaps) / max(1, len(tally.gaps)), "itl_p50": load.percentile(tally.gaps, 0.5), "itl_p99": load.percentile(tally.gaps, 0.99),
        "ttft_p50": load.percentile(tally.first, 0.5), "ended": tally.n_ended, "aborted": tally.n_aborted, "lost": len(tally.lost), **use,
    }  # fmt: skip
    sys.stdout.write("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()) + (f"  {tally.lost[:2]}" if tally.lost else "") + "\n")
    sys.stdout.flush()
    return found


async def soak(a: argparse.Namespace, url: str, pid: int) -> list[dict[str, float]]:
    """The load, with a look every --every seconds."""
    begun, looks, tally = time.monotonic(), list[dict[str, float]](), Tally()
    until = begun + 60 * a.minutes
    tasks = [asyncio.create_task(client(a, url, random.Random(k), until, tally)) for k in range(a.streams)]
    last, before = begun, usage(pid)["cpu_s"]
    while time.monotonic() < until:
        await asyncio.sleep(min(a.every, max(0.1, until - time.monotonic())))
        now, use = time.monotonic(), usage(pid)
        before, use["cpu_us_token"] = use["cpu_s"], 1e6 * (use["cpu_s"] - before) / max(1, tally.n_tokens)
        use["pages"] = (await asyncio.to_thread(state, url))["engine"]["pages"]["attached"]
        looks.append(line((now - begun) / 60, tally, now - last, use))
        tally.gaps, tally.first, tally.n_tokens, last = [], [], 0, now
    await asyncio.gather(*tasks)
    looks.append(line((time.monotonic() - begun) / 60, tally, max(1e-3, time.monotonic() - last), usage(pid)))
    return looks


def growth(looks: list[dict[str, float]], name: str) -> float:
    """How much a figure grew for every thousand requests, from the least of the first third of the looks to the least of the last."""
    n = max(1, len(looks) // 3)
    first, last = (min(part, key=lambda look: look[name]) for part in (looks[:n], looks[-n:]))
    n_requests = last["ended"] + last["aborted"] - first["ended"] - first["aborted"]
    return 1000 * (last[name] - first[name]) / max(1.0, n_requests)


def drift(looks: list[dict[str, float]], name: str) -> tuple[float, float]:
    """The least of a figure in the first and in the last third of the looks, so that what else the machine does falls out."""
    n = max(1, len(looks) // 3)
    values = [look[name] for look in looks if name in look]
    return min(values[:n]), min(values[-n:])


def thirds(looks: list[dict[str, float]], name: str) -> list[float]:
    """The median of a figure in each third of the looks."""
    n = max(1, len(looks) // 3)
    return [statistics.median(look[name] for look in part) for part in (looks[:n], looks[n:-n] or looks, looks[-n:])]


def what_is_left(url: str) -> list[str]:
    """What should be back and is not."""
    engine = state(url)["engine"]
    slots, pages = engine["slots"], engine["pages"]
    wrong = []
    if slots["free"] != slots["all"]:
        wrong.append(f"{slots['all'] - slots['free']} slots are not free")
    if pages["free"] + pages["prefix"] != pages["attached"]:
        wrong.append(f"{pages['attached'] - pages['free'] - pages['prefix']} pages are lost")
    if pages["evictable"] != pages["prefix"]:
        wrong.append(f"{pages['prefix'] - pages['evictable']} pages are locked")
    return wrong


def _listed(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def main() -> int:
    """Runs, prints a verdict; 1 when something leaked, drifted by more than a fifth, or was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between looks")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--abort", type=float, default=0.1)
    parser.add_argument("--sessions", type=float, default=0.5, help="share of requests of a session that comes once and never again")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a request without an end is lost")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds for which the runner is left alone at the end")
    parser.add_argument("--machine", default="")
    parser.add_argument("--commit", default="", help="of this tree, where it is no git checkout")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[])
    a = parser.parse_args()
    served.use_this_tree()
    with served.runner(a.model, "--log-level", "warning", *a.options) as (url, process):
        looks = uvloop.run(soak(a, url, process.pid))
        wrong = what_is_left(url)
        before = usage(process.pid)["cpu_s"]
        time.sleep(a.idle)
        idle = (usage(process.pid)["cpu_s"] - before) / a.idle
        end = usage(process.pid)
    steady = looks[1:-1] or looks[:1]
    first, last = steady[0], steady[-1]
    if last["rss_mib"] > 1.05 * first["rss_mib"] + 16:
        wrong.append(f"memory grew from {first['rss_mib']:.0f} to {last['rss_mib']:.0f} MiB")
    if end["fds"] > looks[0]["fds"]:
        wrong.append(f"{end['fds']:.0f} file descriptors are open")
    gaps = drift(steady, "itl_mean")
    more = {name: growth(steady, name) for name in ("rss_mib", "fds")}
    if gaps[1] > 1.2 * gaps[0]:
        wrong.append(f"gaps grew from {gaps[0]:.2f} to {gaps[1]:.2f} ms")
    if looks[-1]["lost"]:
        wrong.append(f"{looks[-1]['lost']} requests without a good end")
    if idle > 0.01:
        wrong.append(f"{100 * idle:.1f} % of a processor while idle")
    sys.stdout.write(
        f"{looks[-1]['ended']} ended, {looks[-1]['aborted']} left, {looks[-1]['lost']} lost; memory {first['rss_mib']:.1f} to {last['rss_mib']:.1f} MiB, descriptors {looks[0]['fds']:.0f} to "
        f"{end['fds']:.0f}, gaps {gaps[0]:.2f} to {gaps[1]:.2f} ms, by thirds p50 {_listed(thirds(steady, 'itl_p50'))}, p99 {_listed(thirds(steady, 'itl_p99'))}; per thousand requests {more['rss_mib']:.2f} MiB and {more['fds']:.2f} descriptors more; idle {100 * idle:.2f} % of a processor: {'; '.join(wrong) or 'nothing leaks'}\n"
    )
    if a.machine:
        rows = [board.row(f"{a.machine}.soak.{k}_per_1000", [v], unit, "lower") for (k, v), unit in zip(more.items(), ("MiB", "descriptors"), strict=True)]
        rows += [board.row(f"{a.machine}.soak.rss_mib", [last["rss_mib"] / first["rss_mib"]], "ratio", "lower")]
        rows += [board.row(f"{a.machine}.soak.{k}", [drift(steady, k)[1] / drift(steady, k)[0]], "ratio", "lower") for k in ("itl_mean", "itl_p99", "cpu_us_token")]
        rows += [board.row(f"{a.machine}.soak.lost", [looks[-1]["lost"]], "requests", "lower"), board.row(f"{a.machine}.idle_share", [idle], "share", "lower")]
        board.write(a.machine, "soak", rows, a.commit, model=a.model.name, minutes=a.minutes, streams=a.streams, ended=looks[-1]["ended"], left=looks[-1]["aborted"], verdict="; ".join(wrong) or "nothing leaks")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
