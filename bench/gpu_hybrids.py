"""Hybrids and mixtures of experts of real shapes on the CUDA pack, without HTTP: Qwen3.5's 27B (gated delta net, gated attention) and 35B-A3B
(experts), Qwen3's 30B-A3B (attention and experts), FP8 in blocks or BF16.

Usage: python -m bench.gpu_hybrids PACK --out FOLDER [--models 27b 35b-a3b 30b-a3b:bf16] [--layers N] [--profile]. Every layer has weights of its own
on the device; their bytes are random and come from one file. The head, embeddings, routers and the two small projections of the delta net are BF16,
as the published FP8 checkpoints have them. --layers: only that many of the model's layers.

The limit of a decode step is what it has to read: weights, of experts those that so many rows choose when nothing is chosen more often than
anything else (32 rows that take 8 of 256: 163), states twice, keys and values of 192 positions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.blueprint.blueprint import (
    NO_ATTENTION,
    Attention,
    Blueprint,
    Delta,
    Experts,
    FeedForward,
    Layer,
    Rope,
)
from paddock_runner.blueprint.names import expected_shapes
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.files.view import Scales, TensorView
from paddock_runner.formats.table import by_name
from paddock_runner.memory.state import KV_BYTES, StateSizes, state_layout
from paddock_runner.pack.device import Device

from . import board
from .gpu_models import SHORT_PAGES, Driver
from .gpu_weights import Weight

BF16 = ("embed.weight", "head.weight", "delta_a.weight", "delta_b.weight", "router.weight", "shared_gate.weight")
ROWS = 64


def blueprint(name: str, n_layers: int = 0) -> Blueprint:
    """A model of that size; of hybrids three delta layers to one of attention. Source: the published config.json of the models."""
    if name == "27b":
        m, n, heads, kv, values, feed, experts = 5120, 64, 24, 4, 48, FeedForward(17408), None
    elif name == "35b-a3b":
        m, n, heads, kv, values, feed, experts = 2048, 40, 16, 2, 32, FeedForward(512), Experts(256, 8, 512, shared_gate=True)
    elif name == "30b-a3b":
        layer = Layer(Attention(32, 4, 128, 128**-0.5, Rope(1e6, 128), qk_norm=True), FeedForward(0), experts=Experts(128, 8, 768))
        return Blueprint("qwen3moe", 151936, 2048, 40960, (layer,) * (n_layers or 48), 1e-6, False)
    else:
        raise SystemExit(f"no such model: {name} (there are 27b, 35b-a3b and 30b-a3b)")
    attention = Attention(heads, kv, 256, 256**-0.5, Rope(1e7, 64), qk_norm=True, out_gate=True)
    delta = Layer(NO_ATTENTION, feed, kind="delta", delta=Delta(16, values, 128, 128, 4), experts=experts)
    layers = tuple(Layer(attention, feed, experts=experts) if i % 4 == 3 else delta for i in range(n_layers or n))
    return Blueprint("qwen35", 248320, m, 262144, layers, 1e-6, False)


def shapes(plan: Blueprint) -> dict[str, tuple[int, ...]]:
    """Every tensor; queries, keys and values of the delta net are one, as the checkpoints have them."""
    found = dict(expected_shapes(plan))
    for i, layer in enumerate(plan.layers):
        if layer.delta is not None:
            for part in "qkv":
                del found[f"layers.{i}.delta_{part}.weight"]
            found[f"layers.{i}.delta_qkv.weight"] = (layer.delta.n_channels, plan.model_width)
    return found


def views(plan: Blueprint, folder: Path, format: str = "fp8_e4m3") -> dict[str, TensorView]:
    """Every tensor over one shared file per format; format: of the matrices that an FP8 checkpoint has in FP8."""
    rng, found, pools = np.random.default_rng(1), {}, {}
    all_shapes = shapes(plan)
    kinds = {n: "f32" if min(s[1:], default=1) == 1 or len(s) != 2 else "bf16" if n.endswith(BF16) else format for n, s in all_shapes.items()}
    for kind in sorted(set(kinds.values())):
        need = max(int(np.prod(s)) for n, s in all_shapes.items() if kinds[n] == kind) * by_name(kind).block_bytes
        raw = (1 + 0.1 * rng.standard_normal(1 << 16, np.float32)).tobytes() if kind == "f32" else Weight(kind, 4096, 4096).fill(rng).data.tobytes()
        pools[kind] = folder / kind
        with pools[kind].open("wb") as file:
            for at in range(0, need, len(raw)):
                file.write(raw[: need - at])
    (folder / "scales").write_bytes(np.full(1 << 16, 2e-4, np.float32).tobytes())
    for name, shape in all_shapes.items():
        kind, scales = kinds[name], None
        if kind == "fp8_e4m3":
            grid = (-(-shape[0] // 128), -(-shape[1] // 128))
            scales = Scales("block", TensorView(name + "_scale_inv", grid, "f32", folder / "scales", 0, 4 * grid[0] * grid[1]), (128, 128))
        found[name] = TensorView(name, shape, kind, pools[kind], 0, int(np.prod(shape)) * by_name(kind).block_bytes, scales)
    return found


def moved_bytes(plan: Blueprint, tensors: dict[str, TensorView], state_bytes: int, n_rows: int) -> int:
    """Bytes that a step of so many rows moves: weights, of experts those that one row at least has chosen, states there and back, keys and values of 192 positions."""
    total = 0.0
    for name, v in tensors.items():
        experts = plan.layers[int(name.split(".")[1])].experts if ".experts." in name else None
        share = 1.0 if experts is None else 1 - (1 - experts.n_used / experts.n_experts) ** n_rows
        total += 0 if name == "embed.weight" else v.n_bytes * share
    a_position = sum(2 * KV_BYTES["bf16"] * layer.attention.n_kv_heads * layer.attention.head_width for layer in plan.layers if layer.delta is None)
    return int(total) + n_rows * (2 * state_bytes + 192 * a_position)


def take_apart(driver: Driver, steps: list[tuple[int, int]], starts: dict[int, np.ndarray], title: str) -> None:
    """Prints which kernels a step's time goes to."""
    from collections import defaultdict

    import torch

    driver.send(steps, starts)
    driver.wait(driver.seq)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        driver.send(steps, starts)
        driver.wait(driver.seq)
        torch.cuda.synchronize()
    kernels = sorted((e.time_range.start, e.time_range.end, e.name) for e in found.events() if e.time_range.end > e.time_range.start)
    total: dict[str, list[float]] = defaultdict(list)
    for start, end, name in kernels:
        total[name.replace("pk::(anonymous namespace)::", "").split("(")[0][-70:]].append(end - start)
    busy = sum(e - s for s, e, _ in kernels)
    sys.stdout.write(f"{title}: {len(kernels)} kernels, span {kernels[-1][1] - kernels[0][0]:.0f} us, busy {busy:.0f} us\n")
    for name, times in sorted(total.items(), key=lambda item: -sum(item[1]))[:12]:
        sys.stdout.write(f"   {sum(times):9.0f} us  {len(times):4} x {statistics.median(times):7.1f}  {name}\n")


def measure(device: Device, n_bytes: Callable[[int], int], gbs: float, name: str, batches: list[int], lengths: list[int], is_profile: bool) -> list[dict[str, Any]]:
    """Rows of decode at several batch sizes and prefill at several lengths."""
    rng, driver, rows = np.random.default_rng(), Driver(device), []
    for batch in batches:
        steps = [(s, 1) for s in range(batch)]
        driver.send([(s, 128) for s in range(batch)], {s: rng.integers(0, 150000, 128) for s in range(batch)})
        for _ in range(4):
            driver.send(steps)
        driver.wait(driver.seq)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(10):
                driver.send(steps)
            driver.wait(driver.seq)
            times.append((time.perf_counter() - start) / 10)
        step, floor = statistics.median(times), n_bytes(batch) / gbs / 1e9
        rows.append({"id": f"h200.decode.{name}.b{batch}", "value": batch / step, "unit": "tok/s", "better": "higher", "samples": 5, "limit": batch / floor, "of_limit": floor / step})
        sys.stdout.write(f"{name:12} decode b{batch:4} {step * 1e3:8.3f} ms {batch / step:9.1f} tok/s of bandwidth {floor / step:5.2f} tokens {driver.tokens()}\n")
        if is_profile:
            take_apart(driver, steps, {}, f"decode b{batch}")
    for length in lengths:
        text, times = rng.integers(0, 150000, length), []
        for _ in range(3):
            driver.wait(driver.seq)
            start = time.perf_counter()
            driver.send([(0, length)], {0: text})
            driver.wait(driver.seq)
            times.append(time.perf_counter() - start)
        step = statistics.median(times[1:])
        rows.append({"id": f"h200.prefill.{name}.{length}", "value": step * 1e3, "unit": "ms", "better": "lower", "samples": 2})
        sys.stdout.write(f"{name:12} prefill {length:5} {step * 1e3:8.2f} ms {length / step:9.0f} tok/s\n")
        if is_profile:
            take_apart(driver, [(0, length)], {0: text}, f"prefill {length}")
    sys.stdout.flush()
    return rows


def main() -> None:
    """Runs the board."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=["27b", "35b-a3b"])
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, ROWS])
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192])
    parser.add_argument("--profile", action="store_true", help="also tell which kernels the time goes to")
    options = parser.parse_args()
    from .gpu_kernels import ceilings

    limits, rows = ceilings(), []
    sys.stdout.write(f"limits {limits}\n")
    for model in options.models:
        size, _, format = model.partition(":")
        plan, format = blueprint(size, options.layers), format or "fp8"
        with tempfile.TemporaryDirectory() as folder:
            tensors = views(plan, Path(folder), {"fp8": "fp8_e4m3"}.get(format, format))
            state_bytes = state_layout(plan).slot_bytes
            n_pages = 529 + ROWS * SHORT_PAGES
            sizes = replace(StateSizes(ROWS + 1, 8448, 16, n_pages, plan.n_vocab, 8192, ROWS + 1, 8, 5, 8), recurrent_bytes=state_bytes)
            start = time.perf_counter()
            device = build_device(Assembly(options.pack, sizes), plan, tensors)
            moved = partial(moved_bytes, plan, tensors, state_bytes)
            sys.stdout.write(f"{model}: {plan.n_layers} layers built in {time.perf_counter() - start:.1f} s, {moved(1) / 1e9:.2f} GB moved for one row, {moved(ROWS) / 1e9:.2f} for {ROWS}\n")
            device.grow_pages(n_pages)
            rows += measure(device, moved, limits["read_gbs"], f"{size}.{format}", options.batches, options.lengths, options.profile)
            device.close()
            board.save(options.out / "hybrids.json", rows, **limits)


if __name__ == "__main__":
    main()
