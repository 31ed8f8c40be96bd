"""Where a step of one row goes, between its first record and its results: what lies before, in and behind the persistent launch, and each phase of it.

Usage: python -m bench.persist_trace PACK [--models 8b] [--formats q4_k_m] [--steps 6] [--position 128]. PACK: a pack whose unit of that model's kernel (persist_nibbles
for Q4_K_M) was compiled with -DPK_PERSIST_TRACE, so that blocks leave times behind; its steps are a little slower. Everything in microseconds of the device's clock, medians over steps; of blocks
first/mean/last. A phase's marks count from when the last block had written the phase before.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack.device import Device

from .gpu_models import SHAPES, SHORT_PAGES, Driver, blueprint, format_of, views

MARKS, BLOCKS, BEGUN, ENDED, ENTERED, KNOWN = 10, 132, 0, 1, 2, 3
WRITTEN, JOINED = 6, 5
KINDS = ("qkv", "attend", "o", "gate-up", "down")
PRODUCT = {"begin": 0, "seen": 1, "staged": 3, "product": 4, "last warp": 7, "sums": 5, "written": 6, "sending": 8, "sent": 9}
ATTEND = {"begin": 0, "taken": 7, "met": 3, "seen": 1, "range": 4, "warps": 2, "block": 6, "joined": 5, "sending": 8, "sent": 9}


class Trace:
    """The marks of a pack's last launch."""

    def __init__(self, pack: Path, n_phases: int) -> None:
        self.room = np.zeros((n_phases + 8, BLOCKS, MARKS), np.int64)
        self.call = ctypes.CDLL(str(pack)).pk_persist_trace
        self.call.argtypes = [ctypes.c_int64, ctypes.c_void_p]
        if self.call(self.room.size, None):
            raise RuntimeError("no room for marks")

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Phases' marks and blocks' own as nanoseconds since the first block had begun, and how long a block's first warp waited for weights in each phase; NaN: none."""
        if self.call(self.room.size, self.room.ctypes.data):
            raise RuntimeError("marks cannot be read")
        n_phases = int(np.flatnonzero(self.room.any(axis=(1, 2)))[-1])
        self.zero = int(self.room[n_phases, :, BEGUN].min())
        marks = np.where(self.room == 0, np.nan, self.since(self.room).astype(np.float64))
        phases = self.room[:n_phases]
        return marks[:n_phases], marks[n_phases], np.where(phases[:, :, 4] == 0, np.nan, phases[:, :, 2])

    def since(self, time: Any) -> Any:
        """Nanoseconds since the first block had begun, of a time or its low word."""
        return (time - self.zero + 2**31) % 2**32 - 2**31


def spread(values: np.ndarray) -> tuple[float, float, float]:
    """First, mean and last block of those that have the mark; NaN: none has."""
    here = values[~np.isnan(values)]
    return (float(here.min()), float(here.mean()), float(here.max())) if here.size else (np.nan,) * 3


def ends(marks: np.ndarray, n_layers: int) -> tuple[int, np.ndarray]:
    """The phase that the first layer begins with, and when each phase had been written by its last block."""
    first = len(marks) - 1 - 5 * n_layers
    at = [JOINED if first <= p < len(marks) - 1 and (p - first) % 5 == 1 else WRITTEN for p in range(len(marks))]
    return first, np.array([spread(marks[p, :, at[p]])[2] for p in range(len(marks))])


def collect(device: Device, trace: Trace, model: str, kind: str, options: argparse.Namespace) -> None:
    """Prints what the steps' marks say."""
    driver, n_layers = Driver(device, ahead=1), SHAPES[model][2]
    rng = np.random.default_rng(1)
    driver.send([(0, options.position)], {0: rng.integers(0, 150000, options.position)})
    outside: dict[str, list[float]] = defaultdict(list)
    phases: dict[tuple[str, str, str], list[tuple[float, float, float]]] = defaultdict(list)
    lengths: dict[tuple[str, str], list[float]] = defaultdict(list)
    for step in range(options.steps + 4):
        driver.send([(0, 1)])
        driver.wait(driver.seq)
        if step < 4:
            continue
        marks, own, waits = trace.read()
        begun, ended = (trace.since(t) for t in device.times(1)[-1])
        first, last = ends(marks, n_layers)
        points = {
            "prepare begins": begun, "first block entered": own[:, ENTERED].min(), "last block entered": own[:, ENTERED].max(), "last block begun": own[:, BEGUN].max(),
            "first knows the step": own[:, KNOWN].min(), "last knows the step": own[:, KNOWN].max(), "first layer's x seen": spread(marks[first, :, 1])[1],
            "first layer's qkv written": last[first], "layers written": last[-2], "head's x seen": spread(marks[-1, :, 1])[1], "head's product": spread(marks[-1, :, 7])[2], "head written": last[-1],
            "last block ended": own[:, ENDED].max(), "results told": ended,
        }  # fmt: skip
        for name, at in points.items():
            outside[name].append((at - begun) / 1e3)
        for layer in range(2, n_layers):
            sort = "q6_k" if format_of(f"layers.{layer}.down.weight", kind, (1, 1), layer, n_layers) == "q6_k" else "rest"
            for k, name in enumerate(KINDS):
                p = first + 5 * layer + k
                lengths[sort, name].append((last[p] - last[p - 1]) / 1e3)
                if name != "attend":
                    phases[sort, name, "waited"].append(spread(waits[p] / 1e3))
                busy = ~np.isnan(marks[p, :, 4])
                for mark, at in (ATTEND if name == "attend" else PRODUCT).items():
                    phases[sort, name, mark].append(spread((marks[p, busy if at < 8 else slice(None), at] - last[p - 1]) / 1e3))
    write = sys.stdout.write
    write(f"{model} {kind}, position {options.position}: us since prepare began\n")
    before = 0.0
    for name, found in outside.items():
        now = statistics.median(found)
        write(f"  {name:28} {now:9.2f}  (+{now - before:8.2f})  {min(found):9.2f} to {max(found):9.2f}\n")
        before = now
    for sort in sorted({s for s, _ in lengths}):
        write(f" layers with {sort}: {sum(statistics.median(lengths[sort, k]) for k in KINDS):.2f} us\n")
        for name in KINDS:
            names = [*ATTEND] if name == "attend" else [*PRODUCT, "waited"]
            text = " ".join(f"{mark} " + "/".join(f"{v:.2f}" for v in np.nanmedian(np.array(phases[sort, name, mark]), axis=0)) for mark in names)
            write(f"  {name:8} {statistics.median(lengths[sort, name]):6.2f} | {text}\n")
    sys.stdout.flush()


def main() -> None:
    """Traces the named models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--models", nargs="*", default=["8b"])
    parser.add_argument("--formats", nargs="*", default=["q4_k_m"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--position", type=int, default=128)
    options = parser.parse_args()
    for model in options.models:
        for kind in options.formats:
            with tempfile.TemporaryDirectory() as folder:
                plan = blueprint(model)
                tensors = views(plan, kind, Path(folder))
                n_pages = 529 + SHORT_PAGES
                device = build_device(Assembly(options.pack, StateSizes(2, 8448, 16, n_pages, plan.n_vocab, 2048, 2, 8, 5, 8), "bf16"), plan, tensors)
                device.grow_pages(n_pages)
                # A publishing phase, five a layer, the head.
                collect(device, Trace(options.pack, 5 * plan.n_layers + 2), model, kind, options)
                device.close()


if __name__ == "__main__":
    main()
