"""A runner with pages on disk that is killed at random moments and comes back: no wrong token, no page lost to a torn file.

Usage: python -m bench.killed MODEL [--kills 20] [--life 1.0] [--streams 8] [--prompts 24] [--in 256] [--out 24] [--vocab 2000] [--machine NAME] [--options ...runner flags]
Prompts begin alike in groups and are asked for over and over by --streams clients, greedy, with rows by themselves (--deterministic), so that each has one right
answer: the one of a runner that has neither host memory nor disk. Between 0 and --life seconds after "ready" its processes get SIGKILL, all at once, or one and with it the other; the next
begins with the same folder. What a client got until then must be how the right answer begins. At the end a last runner answers every prompt, from disk as far as it goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from bench import board, load, served

GROUPS = 4
"""Beginnings that prompts share."""


@dataclass
class Tally:
    """What the clients got."""

    n_whole: int = 0
    n_cut: int = 0
    cached_tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def prompts_of(a: argparse.Namespace) -> list[list[int]]:
    """Ids; half of each is its group's."""
    rng = random.Random(a.seed)
    heads = [[rng.randrange(256, a.vocab) for _ in range(a.n_in // 2)] for _ in range(GROUPS)]
    return [heads[k % GROUPS] + [rng.randrange(256, a.vocab) for _ in range(a.n_in - a.n_in // 2)] for k in range(a.prompts)]


async def ask(a: argparse.Namespace, url: str, prompt: list[int]) -> tuple[str, bool, int]:
    """The answer as far as it came, whether it came to its end, and how many tokens of the prompt were cached."""
    parts, text, cached, is_whole = urlsplit(url), "", 0, False
    body = {"prompt": prompt, "max_tokens": a.out, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    events = load.events(parts.hostname or "", parts.port or 80, "/v1/completions", json.dumps(body).encode(), "")
    try:
        async with asyncio.timeout(a.timeout):
            async for data in events:
                if data == b"[DONE]":
                    is_whole = True
                    break
                chunk = json.loads(data)
                if chunk.get("error"):
                    break
                text += "".join(choice.get("text") or "" for choice in chunk["choices"])
                cached = ((chunk.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or cached
    except (OSError, RuntimeError, ValueError):
        is_whole = False
    finally:
        await events.aclose()
    return text, is_whole, cached


async def answers(a: argparse.Namespace, url: str, prompts: list[list[int]]) -> list[str]:
    """Every prompt's answer, --streams at a time. Raises: RuntimeError when one does not come."""
    gate = asyncio.Semaphore(a.streams)

    async def one(prompt: list[int]) -> str:
        async with gate:
            text, is_whole, _ = await ask(a, url, prompt)
        if not is_whole:
            raise RuntimeError("an answer did not come to its end")
        return text

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def until_killed(a: argparse.Namespace, url: str, pids: list[int], prompts: list[list[int]], right: list[str], rng: random.Random, tally: Tally, is_last: bool) -> None:
    """Load, and in the middle of it the end; the last one when there are pages on disk."""
    is_over = False

    async def client() -> None:
        while not is_over:
            k = rng.randrange(len(prompts))
            text, is_whole, cached = await ask(a, url, prompts[k])
            tally.n_whole += is_whole
            tally.n_cut += not is_whole
            tally.cached_tokens += cached
            if not (text == right[k] if is_whole else right[k].startswith(text)):
                tally.wrong.append(f"prompt {k}: {text[:60]!r} for {right[k][:60]!r}")
            if not is_whole:
                await asyncio.sleep(0.01)

    clients = [asyncio.create_task(client()) for _ in range(a.streams)]
    await asyncio.sleep(rng.uniform(0, a.life))
    until = time.monotonic() + a.timeout
    while is_last and time.monotonic() < until and not (await asyncio.to_thread(tiers, url))["disk"]:
        await asyncio.sleep(0.05)
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended with the one before
            os.kill(pid, signal.SIGKILL)
    is_over = True
    await asyncio.gather(*clients)


def tiers(url: str) -> dict[str, Any]:
    """What the runner says of its pages outside the device."""
    with urllib.request.urlopen(f"{url}/v1/paddock/state", timeout=30) as answer:
        return dict(json.load(answer)["engine"]["tiers"])


def is_running(pid: int) -> bool:
    """It is there, and has not ended with nobody to ask how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pids: list[int], limit_s: float = 20.0) -> None:
    """Returns when none of them runs any more. Raises: RuntimeError."""
    until = time.monotonic() + limit_s
    for pid in pids:
        while is_running(pid):
            if time.monotonic() > until:
                raise RuntimeError(f"process {pid} outlives what it belongs to")
            time.sleep(0.01)


def runner(a: argparse.Namespace, *flags: str) -> AbstractContextManager[tuple[str, subprocess.Popen[bytes]]]:
    """One whose answers can be compared."""
    return served.runner(a.model, "--log-level", "warning", "--deterministic", *flags, *a.options)


def kills(a: argparse.Namespace, folder: Path, prompts: list[list[int]], right: list[str], tally: Tally) -> list[str]:
    """Kills and restarts, then the last runner. What is wrong."""
    rng, flags = random.Random(a.seed + 1), ("--disk-cache-gib", str(a.disk_gib), "--host-cache-gib", str(a.host_gib), "--cache-dir", str(folder))
    for n in range(a.kills):
        with runner(a, *flags) as (url, process):
            found, all_pids, before = tiers(url), served.family(process.pid), tally.n_whole
            pids = rng.choice((all_pids, all_pids[:1], all_pids[1:2]))
            uvloop.run(until_killed(a, url, pids, prompts, right, rng, tally, n == a.kills - 1))
            if pids != all_pids[1:2]:
                process.wait(20)
            wait_gone(all_pids)
        sys.stdout.write(f"kill {n + 1}: {len(pids)} of {len(all_pids)} processes, {found['disk']} pages on disk at its start, {tally.n_whole - before} answers, {len(tally.wrong)} wrong so far\n")
        sys.stdout.flush()
    with runner(a, *flags) as (url, _):
        begun = tiers(url)
        for k, text in enumerate(uvloop.run(answers(a, url, prompts))):
            if text != right[k]:
                tally.wrong.append(f"prompt {k} at the end: {text[:60]!r} for {right[k][:60]!r}")
        ended = tiers(url)
        lost = ended["lost"]
    sys.stdout.write(f"at the end {begun['disk']} pages on disk, {ended['read']} read, {lost} of them wrong\n")
    return tally.wrong + ([f"{lost} pages on disk were wrong"] if lost else []) + ([] if ended["read"] else ["nothing came from disk"])


def main() -> int:
    """Runs, prints a verdict; 1 when a token or a page was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--life", type=float, default=1.0, help="seconds after ready within which it is killed")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--in", dest="n_in", type=int, default=256)
    parser.add_argument("--out", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--disk-gib", type=float, default=1.0)
    parser.add_argument("--host-gib", type=float, default=0.25)
    parser.add_argument("--machine", default="")
    parser.add_argument("--commit", default="", help="of this tree, where it is no git checkout")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[])
    a = parser.parse_args()
    served.use_this_tree()
    prompts, tally = prompts_of(a), Tally()
    with runner(a) as (url, _):
        right = uvloop.run(answers(a, url, prompts))
    with tempfile.TemporaryDirectory(prefix="paddock-killed-") as folder:
        wrong = kills(a, Path(folder), prompts, right, tally)
    verdict = "; ".join(wrong[:3]) or "no wrong token, no wrong page"
    sys.stdout.write(f"{a.kills} kills: {tally.n_whole} whole answers, {tally.n_cut} cut off, {tally.cached_tokens} prompt tokens from the cache: {verdict}\n")
    if a.machine:
        rows = [board.row(f"{a.machine}.killed.wrong", [len(wrong)], "answers", "lower")]
        board.write(a.machine, "killed", rows, a.commit, model=a.model.name, kills=a.kills, whole=tally.n_whole, cut=tally.n_cut, cached_tokens=tally.cached_tokens, verdict=verdict)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
