"""Prices of steps on the CUDA pack: decode rows with prefill beside them, at several lengths and contexts. What the scheduler's model has to know.

Usage: python -m bench.gpu_steps PACK [--formats fp8 bf16] [--rows 0 16 32] [--deep 32768] [--tokens 16 112 ...] [--beside 32 64 96 128]
Prints a table in milliseconds (median of the repeats), and points in the form that bench/modelled.py takes: of decode rows, of prompts of 128 tokens packed, and of those
beside decode rows. Weights as in bench/gpu_models.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack.device import Device

from .gpu_models import SHORT_PAGES, Driver, blueprint, views

TOKENS = [0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048]
PACKED = (1, 2, 3, 4, 6, 8, 12, 16, 17, 18, 20)
"""Prompts of 128 tokens in a step."""
LONG, PROMPT_SLOTS = 128, 20
"""Slots of decode rows, and those behind them that prompts are packed into."""


def price(driver: Driver, rows: list[tuple[int, int]], starts: dict[int, np.ndarray] | None, repeats: int) -> float:
    """Milliseconds of a step, one at a time."""
    found = []
    for i in range(repeats + 1):
        driver.wait(driver.seq)
        begun = time.perf_counter()
        driver.send(rows, starts)
        driver.wait(driver.seq)
        if i:
            found.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(found)


def packed(driver: Driver, rng: np.random.Generator, n_rows: int) -> None:
    """A line: prompts of 128 tokens in a step with n_rows decode rows, fewer where both are more than LONG: more draws than a server of that many slots has take another head."""
    found = []
    for n in PACKED:
        starts, beside = {slot: rng.integers(0, 150000, 128) for slot in range(LONG + 1, LONG + 1 + n)}, min(n_rows, LONG - n)
        if 128 * n + n_rows <= driver.device.state.max_step_tokens:
            ms = price(driver, [(slot, 1) for slot in range(1, beside + 1)] + [(slot, 128) for slot in starts], starts, 3)
            found.append(f"({128 * n}, {ms:.2f})")
    sys.stdout.write(f"packed b{n_rows:3} {', '.join(found)}\n")
    sys.stdout.flush()


def measure(device: Device, name: str, row_counts: list[int], deep: int, tokens: list[int], beside: list[int]) -> None:
    """The tables of one model. Decode rows are slots from 1 on, the prefill is slot 0's."""
    rng, driver = np.random.default_rng(1), Driver(device)
    for slot in range(1, LONG + 1):
        driver.send([(slot, 128)], {slot: rng.integers(0, 150000, 128)})
    driver.wait(driver.seq)
    decoding = [(n, price(driver, [(slot, 1) for slot in range(1, n + 1)], None, 5)) for n in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)]
    sys.stdout.write(f"{name:6} decode " + ", ".join(f"({n}, {ms:.2f})" for n, ms in decoding) + "\n")
    for n_rows in (0, *beside):
        packed(driver, rng, n_rows)
    tables: dict[tuple[int, int], list[float]] = {}
    for at in (0, deep):
        if at:
            driver.send([(0, 2048)], {0: rng.integers(0, 150000, 2048)})
            for _ in range(at // 2048 - 1):
                driver.send([(0, 2048)])
            driver.wait(driver.seq)
        for n_rows in row_counts:
            decode = [(slot, 1) for slot in range(1, n_rows + 1)]
            for n in tokens:
                if not n and not n_rows:
                    continue
                start = {0: rng.integers(0, 150000, n)} if n and not at else None
                ms = price(driver, decode + ([(0, n)] if n else []), start, 3 if n < 1024 else 2)
                tables.setdefault((at, n_rows), [0.0] * bool(not n_rows)).append(ms)
    sys.stdout.write(f"{name:6} prefill " + "".join(f"{n:8}" for n in tokens) + "\n")
    for (at, n_rows), times in tables.items():
        sys.stdout.write(f"at {at:6} b{n_rows:3}   " + "".join(f"{ms:8.2f}" for ms in times) + "\n")
    sys.stdout.write(f"tokens {driver.tokens()}\n")
    results = bytes(device.results)
    at = driver.seq % device.state.n_results * device.state.max_step_rows
    sys.stdout.write(f"flags of the last step: {[struct.unpack_from('4i', results, (at + r) * 24)[2] for r in range(4)]}\n")
    sys.stdout.flush()


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--formats", nargs="*", default=["fp8", "bf16"])
    parser.add_argument("--rows", type=int, nargs="*", default=[0, 16, 32])
    parser.add_argument("--deep", type=int, default=32768)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--beside", type=int, nargs="*", default=[], help="numbers of decode rows beside packed prompts")
    options = parser.parse_args()
    plan = blueprint("8b")
    for kind in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            tensors = views(plan, kind, Path(folder))
            ctx = options.deep + 24576
            n_pages = 1 + ctx // 16 + (LONG + PROMPT_SLOTS) * SHORT_PAGES
            n_slots = 1 + LONG + PROMPT_SLOTS
            sizes = StateSizes(n_slots, ctx, 16, n_pages, plan.n_vocab, 2560, n_slots, 8, 5, 8)
            begun = time.perf_counter()
            device = build_device(Assembly(options.pack, sizes), plan, tensors)
            device.grow_pages(n_pages)
            sys.stdout.write(f"8b.{kind}: built in {time.perf_counter() - begun:.1f} s\n")
            measure(device, f"8b.{kind}", options.rows, options.deep, options.tokens, options.beside)
            device.close()


if __name__ == "__main__":
    main()
