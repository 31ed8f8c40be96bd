"""Whole models of real shapes on the CUDA pack: decode and prefill through the recorded program, without HTTP.

Usage: python -m bench.gpu_models PACK --out FOLDER [--models 8b] [--formats bf16 fp8 q8_0 q4_k_m]. Weights are random bytes that
many tensors share in the file (every tensor has memory of its own on the device); the roofline counts checkpoint bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.blueprint.blueprint import Attention, Blueprint, FeedForward, Layer, Rope
from paddock_runner.blueprint.names import expected_shapes
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.files.view import Scales, TensorView
from paddock_runner.formats.table import by_name
from paddock_runner.memory.state import KV_BYTES, StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device

from . import board
from .gpu_weights import Weight

SHAPES = {  # width, feed-forward, layers, heads, kv heads, head width, vocabulary
    "tiny": (512, 1536, 2, 8, 2, 128, 4096),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "8b": (4096, 12288, 36, 32, 8, 128, 151936),
    "32b": (5120, 25600, 64, 64, 8, 128, 151936),
}


def blueprint(name: str) -> Blueprint:
    """A Qwen 3 of that size."""
    m, f, n, h, k, d, v = SHAPES[name]
    attention = Attention(h, k, d, d**-0.5, Rope(1e6, d), qk_norm=True)
    return Blueprint("qwen3", v, m, 40960, (Layer(attention, FeedForward(f)),) * n, 1e-6, False)


def format_of(name: str, model: str, shape: tuple[int, ...], layer: int, n_layers: int) -> str:
    """The format of one tensor of a kind of file. q4_k_m: half of the value and down matrices, and the head, are q6_k."""
    if len(shape) == 1:
        return "f32"
    if model == "fp8":
        return "bf16" if name in ("embed.weight", "head.weight") else "fp8_e4m3"
    if model != "q4_k_m":
        return model
    more = layer < n_layers // 8 or layer >= 7 * n_layers // 8 or (layer - n_layers // 8) % 3 == 2
    return "q6_k" if name == "head.weight" or (more and name.endswith(("v.weight", "down.weight"))) else "q4_k"


def views(plan: Blueprint, model: str, folder: Path) -> dict[str, TensorView]:
    """Every tensor of the model over one shared file per format."""
    rng, found, pools, largest = np.random.default_rng(1), {}, {}, {}
    shapes = expected_shapes(plan)
    kinds = {}
    for name, shape in shapes.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        kinds[name] = format_of(name, model, shape, layer, plan.n_layers)
        n = int(np.prod(shape))
        largest[kinds[name]] = max(largest.get(kinds[name], 0), n)
    for kind, n in largest.items():
        cols = 4096
        weight = Weight(kind, min(4096, -(-n // cols)), cols).fill(rng)
        path = folder / f"{model}.{kind}"
        raw = weight.data.tobytes() if kind != "f32" else (1 + 0.1 * rng.standard_normal(n).astype(np.float32)).tobytes()
        need = n // by_name(kind).block_elements * by_name(kind).block_bytes
        with path.open("wb") as file:
            for at in range(0, need, len(raw)):
                file.write(raw[: need - at])
        pools[kind] = path
    if model == "fp8":
        (folder / "scales").write_bytes(np.full(1 << 20, 2e-4, np.float32).tobytes())
    for name, shape in shapes.items():
        kind = kinds[name]
        n_bytes = int(np.prod(shape)) // by_name(kind).block_elements * by_name(kind).block_bytes
        scales = None
        if kind == "fp8_e4m3":
            grid = (-(-shape[0] // 128), -(-shape[1] // 128))
            scales = Scales("block", TensorView(name + "_scale_inv", grid, "f32", folder / "scales", 0, 4 * grid[0] * grid[1]), (128, 128))
        found[name] = TensorView(name, shape, kind, pools[kind], 0, n_bytes, scales)
    return found


SHORT_PAGES = 32
"""Pages of every slot but the first: enough for the decode rows."""


class Driver:
    """Steps by hand, at most `ahead` of them in flight."""

    def __init__(self, device: Device, ahead: int = 2) -> None:
        self.device, self.seq, self.ahead = device, 0, ahead

    def send(self, rows: list[tuple[int, int]], starts: dict[int, np.ndarray] | None = None) -> None:
        """Enqueues a step of rows (slot, tokens); starts: slots that begin with these tokens."""
        self.seq += 1
        state, new, pages, runs, payload = self.device.state, b"", b"", b"", b""
        for slot, text in (starts or {}).items():
            sampling = abi.pk_sampling(0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)
            sampling.prompt_length, sampling.max_length, sampling.n_logprobs = len(text), state.max_ctx_tokens, -1
            new += bytes(abi.pk_new_slot(slot, 0, 0, 0, sampling))
            first, n_pages = (1, state.slot_pages) if slot == 0 else (1 + state.slot_pages + (slot - 1) * SHORT_PAGES, SHORT_PAGES)
            pages += b"".join(struct.pack("4i", slot, i, first + i, 0) for i in range(n_pages))
            runs += struct.pack("4i", slot, 0, len(text), len(payload) // 4)
            payload += text.astype(np.int32).tobytes()
        n = sum(k for _, k in rows)
        head = abi.pk_step_head(self.seq, n, len(rows), len(rows), len(new) // ctypes.sizeof(abi.pk_new_slot), len(pages) // 16, len(runs) // 16, 0, len(payload) // 4)
        blob = bytes(head) + new + b"".join(struct.pack("4i", s, k, abi.PK_ROW_SAMPLE, 0) for s, k in rows) + pages + runs + payload
        buffer = (ctypes.c_uint64 * (len(blob) // 8 + 1))()
        ctypes.memmove(buffer, blob, len(blob))
        self.device.step(ctypes.addressof(buffer))
        self.wait(self.seq - self.ahead)

    def wait(self, seq: int) -> None:
        """Until that step is done."""
        if seq > 0 and not self.device.wait(seq, 60_000_000):
            raise RuntimeError("a step took a minute")

    def tokens(self) -> list[int]:
        """The tokens of the last step, for a sanity check."""
        self.wait(self.seq)
        at = self.seq % self.device.state.n_results * self.device.state.max_step_rows
        raw = bytes(self.device.results)
        return [struct.unpack_from("3i", raw, (at + r) * 24)[1] for r in range(2)]


def profile(device: Device, batch: int, rng: np.random.Generator) -> None:
    """Prints where a decode step's time goes: per kernel the launches and microseconds, the gaps, and the cost of the call itself."""
    from collections import defaultdict

    import torch

    driver = Driver(device)
    for s in range(batch):
        driver.send([(s, 128)], {s: rng.integers(0, 150000, 128)})
    steps, calls = [(s, 1) for s in range(batch)], []
    for _ in range(6):
        driver.send(steps)
    driver.wait(driver.seq)
    for _ in range(4):
        start = time.perf_counter()
        driver.send(steps)
        calls.append((time.perf_counter() - start) * 1e6)
        driver.wait(driver.seq)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            driver.send(steps)
        driver.wait(driver.seq)
        torch.cuda.synchronize()
    kernels = sorted((e.time_range.start, e.time_range.end, e.name) for e in found.events() if e.time_range.end > e.time_range.start)
    total: dict[str, list[float]] = defaultdict(list)
    for start, end, name in kernels:
        total[name.replace("pk::(anonymous namespace)::", "").split("(")[0][-60:]].append(end - start)
    span, busy = kernels[-1][1] - kernels[0][0], sum(e - s for s, e, _ in kernels)
    sys.stdout.write(f"profile b{batch}: {len(kernels)} kernels span {span:.0f} us busy {busy:.0f} us, call {statistics.median(calls):.0f} us\n")
    for name, times in sorted(total.items(), key=lambda item: -sum(item[1]))[:16]:
        sys.stdout.write(f"   {sum(times):9.0f} us  {len(times):4} x {statistics.median(times):7.1f}  {name}\n")


def measure(device: Device, plan: Blueprint, n_bytes: int, gbs: float, tflops: float, name: str, batches: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    """Rows of decode at several batch sizes and prefill at several lengths."""
    rng, driver, rows = np.random.default_rng(), Driver(device), []
    m, f, n, h, k, d, _ = SHAPES[next(model for model in SHAPES if name.startswith(model + "."))]
    params = n * (m * d * (h + 2 * k) + m * d * h + 3 * m * f)
    for batch in batches:
        if batch > device.state.n_slots:
            continue
        texts = {s: rng.integers(0, 150000, 128) for s in range(batch)}
        for s, text in texts.items():
            driver.send([(s, 128)], {s: text})
        steps = [(s, 1) for s in range(batch)]
        for _ in range(4):
            driver.send(steps)
        driver.wait(driver.seq)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(20):
                driver.send(steps)
            driver.wait(driver.seq)
            times.append((time.perf_counter() - start) / 20)
        step = statistics.median(times)
        floor = n_bytes / gbs / 1e9 + batch * 192 * 2 * KV_BYTES[device.kv_format.partition(" ")[0]] * k * d * n / gbs / 1e9
        rows.append({"id": f"h200.decode.{name}.b{batch}", "value": batch / step, "unit": "tok/s", "better": "higher", "samples": 5, "limit": batch / floor, "of_limit": floor / step})
        sys.stdout.write(f"{name:12} decode b{batch:4} {step * 1e3:8.3f} ms {batch / step:9.1f} tok/s of roofline {floor / step:5.2f} tokens {driver.tokens()}\n")
    for length in lengths:
        if length > device.state.max_step_tokens:
            continue
        times = []
        for _ in range(4):
            text = rng.integers(0, 150000, length)
            driver.wait(driver.seq)
            start = time.perf_counter()
            driver.send([(0, length)], {0: text})
            driver.wait(driver.seq)
            times.append(time.perf_counter() - start)
        step = statistics.median(times[1:])
        flops = 2 * length * params + 2 * h * d * length * length * n
        floor = max(flops / tflops / 1e12, n_bytes / gbs / 1e9)
        rows.append({"id": f"h200.prefill.{name}.{length}", "value": length / step, "unit": "tok/s", "better": "higher", "samples": 3, "limit": length / floor, "of_limit": floor / step})
        sys.stdout.write(f"{name:12} prefill {length:5} {step * 1e3:8.2f} ms {length / step:9.0f} tok/s {flops / step / 1e12:6.1f} TF/s of bf16 peak {floor / step:5.2f}\n")
    sys.stdout.flush()
    return rows


def main() -> None:
    """Runs the board of whole models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=["8b"])
    parser.add_argument("--formats", nargs="*", default=["bf16", "fp8", "q8_0", "q4_k_m"])
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batch sizes of decode steps to take apart")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--kv", default="bf16", help="format of keys and values")
    parser.add_argument("--topic", default="models", help="name of the board's file")
    parser.add_argument("--ops", action="store_true", help="also microseconds per record of a decode step")
    options = parser.parse_args()
    from .gpu_kernels import ceilings

    limits, rows = ceilings(), []
    sys.stdout.write(f"limits {limits}\n")
    for model in options.models:
        plan = blueprint(model)
        for kind in options.formats:
            with tempfile.TemporaryDirectory() as folder:
                tensors = views(plan, kind, Path(folder))
                n_bytes = sum(v.n_bytes for name, v in tensors.items() if name != "embed.weight")
                n_pages = 529 + 128 * SHORT_PAGES
                sizes = StateSizes(129, 8448, 16, n_pages, plan.n_vocab, 8192, 129, 8, 5, 8)
                start = time.perf_counter()
                device = build_device(Assembly(options.pack, sizes, options.kv), plan, tensors)
                sys.stdout.write(f"{model} {kind}: built in {time.perf_counter() - start:.1f} s, {n_bytes / 1e9:.2f} GB read a step\n")
                device.grow_pages(n_pages)
                for batch in options.profile:
                    profile(device, batch, np.random.default_rng())
                if options.profile:
                    device.close()
                    continue
                rows += measure(device, plan, n_bytes, limits["read_gbs"], limits["bf16_tflops"], f"{model}.{kind}" + (f".kv-{options.kv}" if options.kv != "bf16" else ""), options.batches, options.lengths)
                if options.ops:
                    us = device.run(1, 1, 5, True)
                    sys.stdout.write("records us: " + " ".join(f"{t:.1f}" for t in us[:22]) + " ... " + " ".join(f"{t:.1f}" for t in us[-6:]) + f" sum {sum(us):.0f}\n")
                device.close()
                board.save(options.out / f"{options.topic}.json", rows, **limits)


if __name__ == "__main__":
    main()
