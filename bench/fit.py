"""Planned bytes against the measured peak of a live runner whose page pool is full.

Usage: python -m bench.fit MODELS_DIR [--ctx 1024 4096] [--batch 2]
The engine process is measured (VmHWM minus file-backed pages of libraries is not subtracted: everything counts).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import httpx

from bench import board
from bench.models import MODELS
from bench.served import runner


def peak_bytes(pid: int) -> int:
    """VmHWM of a process."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def children(pid: int) -> list[int]:
    """Processes whose parent is pid."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


def planned(model: Path, ctx: int, batch: int) -> dict:
    """What `paddock-runner plan` says."""
    out = subprocess.run(
        [Path(sys.executable).parent / "paddock-runner", "plan", str(model), "--max-ctx", str(ctx), "--max-batch", str(batch), "--device", "cpu", "--json"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return json.loads(out)


def measured(model: Path, ctx: int, batch: int) -> tuple[int, int]:
    """(peak of the engine process, peak of the front process) after every page was used."""
    with runner(model, "--max-ctx", str(ctx), "--max-batch", str(batch), "--device", "cpu") as (url, process):
        prompts = [[100 + (i * 7919 + j * 31) % 9000 for j in range(ctx - 2)] for i in range(batch)]
        body = {"model": model.stem, "prompt": prompts, "max_tokens": 2, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
        peaks = [peak_bytes(pid) for pid in children(process.pid)]
        return max(peaks), peak_bytes(process.pid)


def main() -> None:
    """Three models, two contexts each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--ctx", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--batch", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    for name, file in MODELS.items():
        path = arguments.models / file
        for ctx in arguments.ctx if path.exists() else ():
            plan = planned(path, ctx, arguments.batch)
            plan = plan.get("plan", plan)
            peak, front = measured(path, ctx, arguments.batch)
            rows.append(board.row(f"fit.{name}.{ctx}.b{arguments.batch}.error", [plan["peak_bytes"] / peak - 1], "ratio", "lower"))
            rows[-1] |= {"planned_bytes": plan["peak_bytes"], "measured_bytes": peak, "front_bytes": front}
            sys.stdout.write(f"{name} {ctx}: planned {plan['peak_bytes']}, measured {peak}, front {front}\n")
    board.write("cpu2", "fit", rows)


if __name__ == "__main__":
    main()
