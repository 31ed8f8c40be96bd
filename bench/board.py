"""Rows of measured figures, written as bench/results/<machine>/<date>-<topic>.json.

Where PADDOCK_BENCH_OUT names a folder, boards are written there instead of bench/results: bench.boards collects them.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def row(id: str, samples: Sequence[float], unit: str, better: str = "higher", limit: float | None = None, peer: tuple[str, Sequence[float]] | None = None) -> dict[str, Any]:
    """One row: median, spread (p90 - p10 over the median), share of the limit, ratio to a peer measured in the same run."""
    value = statistics.median(samples)
    found: dict[str, Any] = {"id": id, "value": round(value, 4), "unit": unit, "better": better, "samples": len(samples)}
    if len(samples) > 2:
        tenths = statistics.quantiles(samples, n=10)
        found["spread"] = round((tenths[-1] - tenths[0]) / value, 4) if value else 0.0
    if limit:
        found["limit"] = round(limit, 4)
        found["of_limit"] = round(value / limit if better == "higher" else limit / value, 4)
    if peer:
        theirs = statistics.median(peer[1])
        found |= {"peer": peer[0], "peer_value": round(theirs, 4), "vs_peer": round(value / theirs if better == "higher" else theirs / value, 4)}
    return found


def model_name(model: str) -> str:
    """Of a checkpoint's path, or of a shape and format (8b.fp8), as ids have it."""
    return Path(model).stem if Path(model).exists() else model.replace(".", "-")


@cache
def processor() -> str:
    """The processor's name and how many we may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


@cache
def gpu() -> dict[str, str]:
    """The first GPU's name and driver, if there is one."""
    try:
        words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
        name, driver = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    except (OSError, ValueError, subprocess.CalledProcessError):
        return {}
    return {"gpu": name, "driver": driver}


def document(machine: str, rows: list[dict[str, Any]], commit: str = "", **context: Any) -> dict[str, Any]:
    """A board: the rows, and how they came about. commit: where this tree is no git checkout."""
    if not commit:
        words = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    program = Path(sys.argv[0])
    command = f"python -m bench.{program.parent.name if program.stem == '__main__' else program.stem}" + "".join(f" {Path(a).name if Path(a).is_absolute() else a}" for a in sys.argv[1:])
    date = datetime.date.today().isoformat()
    return {"machine": machine, "date": date, "commit": commit, "command": command, "context": {"cpu": processor(), **gpu(), **context}, "rows": rows}


def results() -> Path:
    """The folder of boards, in which each machine has its own."""
    return Path(os.environ.get("PADDOCK_BENCH_OUT") or ROOT / "bench/results")


def save(path: Path, rows: list[dict[str, Any]], machine: str = "h200", **context: Any) -> None:
    """Writes a board that bench.boards collects: the file's stem is its topic, the commit comes later."""
    _put(path, document(machine, rows, **context))


def _put(path: Path, made: dict[str, Any]) -> None:
    """Writes it whole or not at all: a run may be ended at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(made, indent=1) + "\n")
    part.replace(path)


def write(machine: str, topic: str, rows: list[dict[str, Any]], commit: str = "", **context: Any) -> Path:
    """Writes the board and prints it as a short table. Rows of the same id in the same file are replaced."""
    path = results() / machine / f"{datetime.date.today().isoformat()}-{topic}.json"
    kept = [] if not path.exists() else [r for r in json.loads(path.read_text())["rows"] if r["id"] not in {x["id"] for x in rows}]
    _put(path, document(machine, kept + rows, commit, **context))
    for r in rows:
        extra = "".join(f"  {k} {r[k]}" for k in ("of_limit", "vs_peer", "spread") if k in r)
        sys.stdout.write(f"{r['id']:44} {r['value']:12.3f} {r['unit']:10}{extra}\n")
    return path
