"""Kernel board of the CUDA pack: microseconds, share of the measured bandwidth or matrix rate, ratio to torch in the same run.

Usage: python -m bench.gpu_kernels PACK --out FOLDER [--only WORD ...]. Ceilings are measured first, with torch. Products run over
copies of the weights larger than the L2, in one captured program; random data throughout.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.library import load_pack
from paddock_runner.pack.program import Epilogue, Heads, Program
from paddock_runner.pack.tensor import T

from . import board
from .gpu_weights import Weight

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/kernels"))
from harness import Bench

SHAPES = {"qkv": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096), "gate-up": ((12288, 12288), 4096), "down": ((4096,), 12288)}
FORMATS = [("bf16", "none"), ("fp8_e4m3", "block"), ("q8_0", "none"), ("q4_k", "none"), ("q6_k", "none")]


def events(run: Callable[[], Any], n: int = 20) -> float:
    """Median milliseconds of a torch call."""
    times = []
    for _ in range(n + 3):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        run()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times[3:])


def ceilings() -> dict[str, float]:
    """GB/s of reading 4 GB, TFLOP/s of a bf16 product of 8192 cubed on random data."""
    x = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    read = x.numel() * 4 / events(lambda: torch.sum(x), 10) / 1e6
    y = torch.empty_like(x)
    copy = 2 * x.numel() * 4 / events(lambda: y.copy_(x), 10) / 1e6
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / events(lambda: a @ b, 10) / 1e9
    torch.cuda.empty_cache()
    return {"read_gbs": read, "copy_gbs": copy, "bf16_tflops": rate}


def wall(b: Bench, n_tokens: int, n_samples: int, floor_ms: float) -> float:
    """Milliseconds of one replay of the loaded program: the slope between few and many replays, median of five."""
    device, repeats = b.device, 4
    device.run(n_tokens, n_samples, 3)
    found = []
    for _ in range(5):
        times = []
        for n in (repeats, 5 * repeats):
            start = time.perf_counter()
            device.run(n_tokens, n_samples, n)
            times.append(time.perf_counter() - start)
        found.append((times[1] - times[0]) / (4 * repeats) * 1e3)
    return max(statistics.median(found), floor_ms)


def us_row(id: str, us: float, n_bytes: float, flops: float, floor_us: float = 0.0, peer: tuple[str, list[float]] | None = None) -> dict[str, Any]:
    """A row of microseconds, with what they are in GB/s (where bytes count) and TFLOP/s."""
    rates = {"tflops": round(flops / us * 1e-6, 1)} | ({"gbs": round(n_bytes / us * 1e-3, 1)} if n_bytes else {})
    return board.row(f"h200.{id}", [us], "us", "lower", floor_us, peer) | {"samples": 5} | rates


def product(pack: Any, format: tuple[str, str], shapes: tuple[int, ...], k: int, m: int, gated: bool, rng: np.random.Generator) -> tuple[float, int]:
    """(microseconds, weight bytes as packed) of one product."""
    b = Bench(pack, sizes=StateSizes(8, 256, 16, 64, 100, max(m, 64), 64, 8, 5, 3))
    made = [Weight(format[0], n, k, format[1]).fill(rng) for n in shapes]
    first = [w.upload(b.device) for w in made]
    n_bytes = b.device.allocated["weights"]
    # A replay ends with a gap of some 2 us that no product of a step has: so many copies that it is a hundredth.
    copies = max(2, min(40, int(1300e6 // n_bytes))) if m <= 64 else 2
    sets = [first] + [[w.upload(b.device) for w in made] for _ in range(copies - 1)]
    x, _ = b.activations(rng.normal(size=(m, k)), T)
    y = b.output(m, shapes[0] if gated else sum(shapes), T)
    program = Program()
    for packed in sets:
        program.matmul(x, packed, y, (), Epilogue(act="silu" if gated else "none"))
    b.load(program)
    us = wall(b, m, 0, 1e-6) * 1e3 / copies
    b.close()
    return us, n_bytes


def narrowed(pack: Any, names: tuple[str, ...], m: int, rng: np.random.Generator) -> float:
    """Microseconds of FP8 products as a layer calls them, x in e4m3 from the record in front: a program of norm and products, without the norm's time."""
    copies, cols = 2, SHAPES[names[0]][1]
    b = Bench(pack, sizes=StateSizes(8, 256, 16, 64, 100, m, 64, 8, 5, 3))
    x, _ = b.activations(rng.normal(size=(m, cols)), T)
    gain = b.upload(np.ones(cols, np.float32), abi.PK_F32)
    sets = [[[Weight("fp8_e4m3", n, SHAPES[name][1], "block").fill(rng).upload(b.device) for n in SHAPES[name][0]] for name in names] for _ in range(copies)]
    outs = [b.output(m, SHAPES[name][0][0] if name == "gate-up" else sum(SHAPES[name][0]), T) for name in names]
    normed = b.output(m, cols, T)
    times = []
    for links in (names, ()):
        program = Program()
        for packed in sets:
            program.norm(x, gain, normed, 1e-5)
            for i, name in enumerate(links):
                program.matmul(normed if i == 0 else outs[i - 1], packed[i], outs[i], (), Epilogue(act="silu" if name == "gate-up" else "none"))
        b.load(program)
        times.append(wall(b, m, 0, 1e-6) * 1e3 / copies)
    b.close()
    return times[0] - times[1]


def narrowed_products(pack: Any, rng: np.random.Generator, m: int) -> Iterator[dict[str, Any]]:
    """Rows of FP8 products behind what narrows their x: three of a layer's four; the fourth, o, narrows x itself."""
    for names in (("qkv",), ("gate-up", "down")):
        us, flops = narrowed(pack, names, m, rng), sum(2 * m * sum(SHAPES[name][0]) * SHAPES[name][1] for name in names)
        sys.stdout.write(f"fp8_e4m3  {'+'.join(names):12} m{m:5} {us:9.1f} us {flops / us * 1e-6:7.1f} TF/s  x narrowed by the norm in front, its time taken off\n")
        yield us_row(f"product.fp8_e4m3.{'+'.join(names)}.m{m}.narrowed", us, 0.0, flops)


def stored_bytes(format: tuple[str, str], shapes: tuple[int, ...], k: int) -> int:
    """Bytes of the weights as the checkpoint has them."""
    from paddock_runner.formats.table import by_name

    return sum(shapes) * by_name(format[0]).row_bytes(k)


def products(pack: Any, limits: dict[str, float], rng: np.random.Generator, only: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of skinny and tiled products."""
    for format in FORMATS:
        for m in (1, 4, 8, 16, 32, 64, 256, 2048):
            if only and not any(w in f"{format[0]}.m{m}." for w in only):
                continue
            for name, (shapes, k) in SHAPES.items():
                us, _ = product(pack, format, shapes, k, m, name == "gate-up", rng)
                n_bytes, flops = stored_bytes(format, shapes, k), 2 * m * sum(shapes) * k
                floor = max(n_bytes / limits["read_gbs"] * 1e-3, flops / limits["bf16_tflops"] * 1e-6)
                w = torch.randn(sum(shapes), k, device="cuda", dtype=torch.bfloat16)
                more = [torch.randn_like(w) for _ in range(max(1, int(300e6 / w.numel() / 2)))]
                a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                peer = events(lambda a=a, more=more: [torch.matmul(a, z.T) for z in more], 5) / len(more) * 1e3
                del w, more
                sys.stdout.write(f"{format[0]:9} {name:8} m{m:5} {us:9.1f} us {n_bytes / us * 1e-3:7.0f} GB/s {flops / us * 1e-6:7.1f} TF/s  of floor {floor / us:5.2f}  cublas bf16 {peer:8.1f} us ({peer / us:5.2f}x)\n")
                sys.stdout.flush()
                yield us_row(f"product.{format[0]}.{name}.m{m}", us, n_bytes, flops, floor, ("cuBLAS bf16 through torch", [peer]))
            if format[0] == "fp8_e4m3" and m > 64:
                yield from narrowed_products(pack, rng, m)


@dataclass(frozen=True)
class Attended:
    """n_rows rows of n_tokens after `context` cached ones, of which the first `shared` lie in the same pages for all rows."""

    name: str
    n_rows: int
    context: int
    n_tokens: int = 1
    kv: int = abi.PK_BF16
    shared: int = 0


ATTENDED = [
    Attended("decode1x1k", 1, 1023),
    Attended("decode1x32k", 1, 32767),
    Attended("decode32x4k", 32, 4095),
    Attended("decode128x1k", 128, 1023),
    Attended("decode32x4k.fp8", 32, 4095, kv=abi.PK_FP8_E4M3),
    Attended("prefill2k", 1, 0, 2048),
    Attended("prefill8k", 1, 0, 8192),
    Attended("prefill8k.fp8", 1, 0, 8192, kv=abi.PK_FP8_E4M3),
    Attended("separate32x16k", 32, 16384 + 127),
    Attended("cascade32x16k", 32, 16384 + 127, shared=16384),
]


def attention(pack: Any, limits: dict[str, float], rng: np.random.Generator, case: Attended) -> dict[str, Any]:
    """One attention case of an 8B: 32 heads, 8 KV heads, width 128, pages of 16 tokens."""
    size, n, whole = 1 if case.kv == abi.PK_FP8_E4M3 else 2, case.n_rows, case.context + case.n_tokens
    slot_pages, common = -(-whole // 16), case.shared // 16
    pages = n * (slot_pages - common) + common + 1
    sizes = StateSizes(n, slot_pages * 16, 16, pages, 100, n * case.n_tokens, n, 8, 5, 3)
    b = Bench(pack, page_bytes=2 * 8 * 16 * 128 * size, sizes=sizes)
    block = rng.normal(size=1 << 20).astype(np.float32).view(np.uint32)
    raw = (block >> 16).astype(np.uint16).tobytes() if size == 2 else rng.integers(0, 120, 1 << 21, dtype=np.uint8).tobytes()
    total = pages * b.page_bytes
    for at in range(0, total, len(raw)):
        b.device.write(b.device.kv_address + at, raw[: min(len(raw), total - at)])
    numbers = rng.permutation(np.arange(1, pages))
    table = np.concatenate([np.tile(numbers[:common], (n, 1)), numbers[common:].reshape(n, -1)], 1)
    b.set("page_table", table)
    b.set_rows([(i, case.context, case.n_tokens) for i in range(n)])
    q, _ = b.activations(rng.normal(size=(n * case.n_tokens, 4096)), T)
    out = b.output(n * case.n_tokens, 4096, T)
    program = Program()
    for _ in range(4):
        program.attention(q, out, Heads(32, 8, 128, 128, 0, 8 * 16 * 128 * size, case.kv), 128**-0.5)
    b.load(program)
    us = wall(b, n * case.n_tokens, 0, 1e-6) * 1e3 / 4
    n_bytes = (n * (whole - case.shared) + case.shared) * 2 * 8 * 128 * size
    flops = 4 * 32 * 128 * n * sum(case.context + i + 1 for i in range(case.n_tokens))
    b.close()
    floor = max(n_bytes / limits["read_gbs"] * 1e-3, flops / limits["bf16_tflops"] * 1e-6)
    sys.stdout.write(f"{case.name:20} {us:9.1f} us {n_bytes / us * 1e-3:7.0f} GB/s {flops / us * 1e-6:7.1f} TF/s of floor {floor / us:5.2f}\n")
    sys.stdout.flush()
    return us_row(f"attn.{case.name}", us, n_bytes, flops, floor)


def main() -> None:
    """Runs the board and writes it to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="parts of case names; 'attn' for attention")
    parser.add_argument("--topic", default="kernels", help="name of the board's file")
    options = parser.parse_args()
    rng, pack = np.random.default_rng(), load_pack(options.pack)
    limits = ceilings()
    sys.stdout.write(f"limits {limits}\n")
    rows = []
    if not options.only or "attn" in options.only:
        rows += [attention(pack, limits, rng, case) for case in ATTENDED]
        board.save(options.out / f"{options.topic}.json", rows, **limits)
        q, k, v = (torch.randn(1, 32, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        ms = events(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), 5)
        sys.stdout.write(f"torch sdpa 8k causal {ms * 1e3:.1f} us {2 * 32 * 128 * 8192 * 8192 / ms / 1e9:.1f} TF/s\n")
        next(row for row in rows if row["id"] == "h200.attn.prefill8k")["sdpa_us"] = round(ms * 1e3, 1)
    only = [w for w in options.only if w != "attn"]
    if not options.only or only:
        for row in products(pack, limits, rng, only):
            rows.append(row)
            board.save(options.out / f"{options.topic}.json", rows, **limits)


if __name__ == "__main__":
    main()
