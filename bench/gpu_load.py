"""How fast a checkpoint gets onto the GPU, against the disk and the bus: Qwen3.5-27B in FP8 as its authors lay it out, random weights.

Usage: python -m bench.gpu_load PACK FOLDER --out FOLDER [--layers N] [--make-only]. FOLDER gets shards of 5 GB (kept for the next call). Warm: the files
are in the page cache; cold: their pages are dropped first (posix_fadvise). The disk's own rate is read by as many threads as the loader has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from paddock_runner.blueprint.blueprint import Blueprint
from paddock_runner.files.view import Scales, TensorView
from paddock_runner.formats.table import by_name
from paddock_runner.model.staging import READERS
from paddock_runner.model.weights import load_weights
from paddock_runner.pack.device import Device
from paddock_runner.pack.library import load_pack

from .gpu_hybrids import BF16, blueprint, shapes
from .gpu_weights import Weight

SHARD_BYTES = 5 << 30
PIECE_BYTES = 8 << 20


def lay_out(plan: Blueprint, folder: Path) -> dict[str, TensorView]:
    """Where every tensor lies: in the order of their names, a weight's scales behind it, in shards."""
    found: dict[str, TensorView] = {}
    at, shard = 0, 0

    def place(name: str, shape: tuple[int, ...], kind: str) -> TensorView:
        nonlocal at, shard
        n_bytes = int(np.prod(shape)) * by_name(kind).block_bytes
        if at and at + n_bytes > SHARD_BYTES:
            at, shard = 0, shard + 1
        view = TensorView(name, shape, kind, folder / f"model-{shard:05}.safetensors", at, n_bytes)
        at += n_bytes
        return view

    for name, shape in sorted(shapes(plan).items()):
        kind = "f32" if min(shape[1:], default=1) == 1 or len(shape) != 2 else "bf16" if name.endswith(BF16) else "fp8_e4m3"
        view = place(name, shape, kind)
        if kind == "fp8_e4m3":
            view = replace(view, scales=Scales("block", place(name + "_scale_inv", (-(-shape[0] // 128), -(-shape[1] // 128)), "f32"), (128, 128)))
        found[name] = view
    return found


def write_shards(views: dict[str, TensorView]) -> None:
    """Writes what is not there yet: blocks of random values of the right kind, again and again."""
    rng = np.random.default_rng(1)
    raw = {kind: Weight(kind, 4096, 4096).fill(rng).data.tobytes() for kind in ("bf16", "fp8_e4m3")}
    raw["f32"] = np.full(1 << 20, 2e-4, np.float32).tobytes()
    parts = [v for view in views.values() for v in (view, *([view.scales.view] if view.scales else []))]
    for path in sorted({v.path for v in parts}):
        mine = sorted((v for v in parts if v.path == path), key=lambda v: v.offset)
        if path.exists() and path.stat().st_size == mine[-1].offset + mine[-1].n_bytes:
            continue
        with path.open("wb") as file:
            for v in mine:
                for at in range(0, v.n_bytes, len(raw[v.format])):
                    file.write(raw[v.format][: v.n_bytes - at])


def drop(paths: list[Path]) -> None:
    """Takes the files out of the page cache."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_rate(paths: list[Path]) -> float:
    """GB/s of reading the files into memory by READERS threads that keep nothing."""
    handles = {p: os.open(p, os.O_RDONLY) for p in paths}
    pieces = [(handles[p], at) for p in paths for at in range(0, p.stat().st_size, PIECE_BYTES)]
    buffers = [bytearray(PIECE_BYTES) for _ in range(READERS)]

    def read(worker: int) -> None:
        for handle, at in pieces[worker::READERS]:
            os.preadv(handle, [buffers[worker]], at)

    start = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, range(READERS)))
    seconds = time.perf_counter() - start
    for handle in handles.values():
        os.close(handle)
    return sum(p.stat().st_size for p in paths) / seconds / 1e9


def bus_rate() -> float:
    """GB/s of copies of pinned memory to the device."""
    import torch

    from .gpu_kernels import events

    host, device = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    return float(host.numel() / events(lambda: device.copy_(host, non_blocking=True), 10) / 1e6)


def load_rate(pack: Path, plan: Blueprint, views: dict[str, TensorView]) -> float:
    """GB/s of the checkpoint's bytes through the runner's loader."""
    device = Device(load_pack(pack), 0)
    start = time.perf_counter()
    load_weights(device, plan, views)
    seconds = time.perf_counter() - start
    device.close()
    return sum(v.n_bytes + (v.scales.view.n_bytes if v.scales else 0) for v in views.values()) / seconds / 1e9


def main() -> None:
    """Runs the board."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--make-only", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    plan = blueprint("27b", options.layers)
    options.folder.mkdir(parents=True, exist_ok=True)
    views = lay_out(plan, options.folder)
    write_shards(views)
    if options.make_only:
        return
    paths = sorted({v.path for v in views.values()})
    limits, found = {"bus_gbs": bus_rate(), "cache_gbs": read_rate(paths)}, {}
    found["warm"] = [load_rate(options.pack, plan, views) for _ in range(options.rounds)]
    drop(paths)
    limits["disk_gbs"] = read_rate(paths)
    drop(paths)
    found["cold"] = [load_rate(options.pack, plan, views)]
    rows = []
    for name, rates in found.items():
        value, limit = statistics.median(rates), min(limits["bus_gbs"], limits["disk_gbs"] if name == "cold" else limits["cache_gbs"])
        rows.append({"id": f"h200.load.27b.fp8.{name}", "value": value, "unit": "GB/s", "better": "higher", "samples": len(rates), "limit": limit, "of_limit": value / limit})
        sys.stdout.write(f"load {name}: {value:.2f} GB/s of {limit:.2f} ({value / limit:.2f})\n")
    sys.stdout.write(f"limits {limits}\n")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "load.json").write_text(json.dumps({"context": limits, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
