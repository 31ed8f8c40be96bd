"""A GPU in two parts: what decode steps take on some processors while chunks of a long prompt are read on the others, against both on all of them.

Usage: python -m bench.parted PACK [--left 40 48 32 56 64] [--formats bf16] [--rows 16] [--chunk 1024] [--repeats 5]
For each number of processors that are left to the decode rows: a step of them alone, a chunk alone behind 0, 16k and 48k tokens, and both at once; milliseconds by the device's clock, and ratios to the whole
device. Then what that makes of a prompt of 64k tokens: gaps of the streams at the median and at p99, and its first token, as ratios to each alone. Goals: 1.25, 1.5, 1.4. Weights and keys are random.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import struct
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device

from .gpu_models import blueprint, views

PROMPT, DEPTHS = 65536, (0, 16384, 49152)
KNOWN = 1024
"""Tokens of a stream when it is begun."""
SM_CLOCK = 1
"""NVML_CLOCK_SM."""
PAGE, STREAM_PAGES, WHOLE = 32, 44, 2560
"""Tokens of a page, pages of a stream, tokens of a step that reads the prompt on the whole device."""


class Feeder:
    """Gives steps to one program, one ahead of the one that runs where the pack takes it."""

    def __init__(self, device: Device) -> None:
        self.device, self.seq, self.ahead = device, 0, min(1, device.facts.run_ahead)
        self._rng = np.random.default_rng(1)

    def send(self, rows: list[tuple[int, int]], starts: dict[int, int] | None = None, flags: int = 0) -> None:
        """As give, then waits until another can be given."""
        self.give(rows, starts, flags)
        self.wait(self.seq - self.ahead)

    def give(self, rows: list[tuple[int, int]], starts: dict[int, int] | None = None, flags: int = 0) -> None:
        """A step of rows (slot, tokens). starts: slots that begin with so many tokens known; the next ones are made up."""
        self.seq += 1
        slot_pages, news, pages, texts, payload = self.device.state.slot_pages, b"", b"", b"", b""
        for slot, known in (starts or {}).items():
            sampling = abi.pk_sampling(0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)
            sampling.prompt_length, sampling.max_length, sampling.n_logprobs = known, self.device.state.max_ctx_tokens, -1
            n = dict(rows)[slot]
            news += bytes(abi.pk_new_slot(slot, known, 0, 0, sampling))
            first, count = (1, slot_pages) if slot == 0 else (1 + slot_pages + (slot - 1) * STREAM_PAGES, STREAM_PAGES)
            pages += b"".join(struct.pack("4i", slot, i, first + i, 0) for i in range(count))
            texts += struct.pack("4i", slot, known, n, len(payload) // 4)
            payload += self._rng.integers(0, 150000, n).astype(np.int32).tobytes()
        n_samples = len(rows) if flags & abi.PK_ROW_SAMPLE else 0
        counts = (n_samples, len(news) // ctypes.sizeof(abi.pk_new_slot), len(pages) // 16, len(texts) // 16, 0, len(payload) // 4)
        blob = bytes(abi.pk_step_head(self.seq, sum(n for _, n in rows), len(rows), *counts)) + news
        blob += b"".join(struct.pack("4i", slot, n, flags, 0) for slot, n in rows) + pages + texts + payload
        buffer = (ctypes.c_uint64 * (len(blob) // 8 + 1))()
        ctypes.memmove(buffer, blob, len(blob))
        self.device.step(ctypes.addressof(buffer))

    def wait(self, seq: int) -> None:
        """Until that step is done."""
        if seq > 0 and not self.device.wait(seq, 20_000_000):
            raise RuntimeError(f"step {seq} took 20 s")

    def times(self, n: int) -> list[tuple[float, float]]:
        """Begin and end of the last n steps, in ms."""
        self.wait(self.seq)
        return [(1e-6 * begin, 1e-6 * end) for begin, end in self.device.times(n)]


class Clock:
    """The first GPU's multiprocessors' clock, by NVML."""

    def __init__(self) -> None:
        self._library, self._gpu = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self._library.nvmlInit_v2()
        self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(self._gpu))

    def mhz(self) -> int:
        """Now."""
        value = ctypes.c_uint()
        self._library.nvmlDeviceGetClockInfo(self._gpu, ctypes.c_int(SM_CLOCK), ctypes.byref(value))
        return value.value


class Case:
    """A device with a part, streams that have begun, and keys everywhere."""

    def __init__(self, device: Device, n_rows: int, chunk: int, repeats: int) -> None:
        assert device.aside is not None
        self.device, self.loop, self.part, self.clock = device, Feeder(device), Feeder(device.aside), Clock()
        self.rows = [(slot, 1) for slot in range(1, n_rows + 1)]
        self.chunk, self.repeats = chunk, repeats
        self.mhz: list[int] = []
        page, n_bytes = device.kv_address, device.kv_page_bytes
        values = np.random.default_rng(2).standard_normal(n_bytes // 2, np.float32) * 0.5
        device.write(page, (values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        for i in range(1, device.kv_bytes // n_bytes):
            device.copy(page + i * n_bytes, page, n_bytes)
        device.settle()

    def begin(self) -> None:
        """All streams anew."""
        self.loop.send(self.rows, {slot: KNOWN for slot, _ in self.rows}, abi.PK_ROW_SAMPLE)

    def decode(self) -> list[float]:
        """Gaps between the ends of steps of the streams alone."""
        self.begin()
        for _ in range(40):
            self.loop.send(self.rows, None, abi.PK_ROW_SAMPLE)
        ends = [end for _, end in self.loop.times(36)]
        return [b - a for a, b in pairwise(ends)]

    def read(self, feeder: Feeder, n: int, depth: int) -> float:
        """Milliseconds of a step with n tokens of the prompt behind so many."""
        for _ in range(self.repeats):
            feeder.send([(0, n)], {0: depth})
        return statistics.median(end - begin for begin, end in feeder.times(self.repeats - 1))

    def both(self, depth: int) -> tuple[float, list[float]]:
        """Milliseconds of a chunk beside the streams, and their gaps meanwhile."""
        self.begin()
        n, last = 0, self.part.seq + self.repeats
        self.device.give_way(True)
        done = self.part.device.done
        while done[0] < last:
            while self.part.seq < last and self.part.seq - done[0] <= self.part.ahead:
                self.part.give([(0, self.chunk)], {0: depth})
            self.loop.send(self.rows, None, abi.PK_ROW_SAMPLE)
            n += 1
            if n % 8 == 4:
                self.mhz.append(self.clock.mhz())
            if n > (STREAM_PAGES * PAGE - KNOWN - 8):
                self.begin()
                n = 0
        self.device.give_way(False)
        chunks, steps = self.part.times(self.repeats), self.loop.times(min(n, 900))
        begin, end = chunks[0][0], chunks[-1][1]
        ends = [t for _, t in steps if begin <= t <= end]
        return statistics.median(b - a for a, b in chunks), [b - a for a, b in pairwise(ends)] or [math.nan]


def whole_prompt(n: int, ms: list[float]) -> float:
    """Milliseconds of a prompt in chunks of n, by what they take at the depths."""
    depths = np.arange(0, PROMPT, n, dtype=np.float64)
    slope = (ms[2] - ms[1]) / (DEPTHS[2] - DEPTHS[1])
    found = np.where(depths <= DEPTHS[2], np.interp(depths, DEPTHS, ms), ms[2] + slope * (depths - DEPTHS[2]))
    return float(found.sum() * PROMPT / (n * len(depths)))


def measure(case: Case, left: int) -> None:
    """The lines of one number of processors."""
    n_part = case.part.device.facts.n_processors
    whole = case.decode()
    case.device.give_way(True)
    alone = case.decode()
    case.device.give_way(False)
    step = statistics.median(whole)
    sys.stdout.write(f"left {left:3} part {n_part:3}  decode b{len(case.rows)}: whole {step:.2f} ms, left alone {statistics.median(alone):.2f} ({statistics.median(alone) / step:.2f})\n")
    sys.stdout.flush()
    prices: list[list[float]] = [[], [], []]
    gaps: list[float] = []
    for depth in DEPTHS:
        found = case.read(case.loop, WHOLE, depth), case.read(case.part, case.chunk, depth)
        same = case.read(case.loop, case.chunk, depth)
        beside, between = case.both(depth)
        gaps += between
        for prices_of, ms in zip(prices, (*found, beside), strict=True):
            prices_of.append(ms)
        gap, most = statistics.median(between), float(np.percentile(between, 99))
        sys.stdout.write(
            f"   behind {depth:6}: {case.chunk} tokens whole {same:7.2f}, part alone {found[1]:7.2f} ({found[1] / same:.2f}), beside {beside:7.2f} ({beside / same:.2f}); "
            f"gaps {gap:.2f} ({gap / step:.2f}), p99 {most:.2f} ({most / step:.2f}) of {len(between)}\n"
        )
        sys.stdout.flush()
    first = whole_prompt(case.chunk, prices[2]) / whole_prompt(WHOLE, prices[0])
    sys.stdout.write(
        f"   64k beside {len(case.rows)}: gaps p50 {statistics.median(gaps) / step:.2f} p99 {float(np.percentile(gaps, 99)) / step:.2f}, first token {first:.2f} "
        f"(alone {whole_prompt(WHOLE, prices[0]):.0f} ms in steps of {WHOLE}; the part alone {whole_prompt(case.chunk, prices[1]):.0f}); SM clocks beside {min(case.mhz, default=0)} to {max(case.mhz, default=0)} MHz\n"
    )
    sys.stdout.flush()


def main() -> None:
    """Prints the tables, those of the first --left first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--left", type=int, nargs="*", default=[40, 48, 32, 56, 64], help="processors that are left to decode rows")
    parser.add_argument("--all", type=int, default=132, help="processors of the device")
    parser.add_argument("--formats", nargs="*", default=["bf16"])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    plan, ctx, n_slots = blueprint("8b"), PROMPT, options.rows + 1
    n_pages = 1 + ctx // PAGE + options.rows * STREAM_PAGES
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.formats:
            tensors = views(plan, kind, Path(folder))
            for left in options.left:
                sizes = StateSizes(n_slots, ctx, PAGE, n_pages, plan.n_vocab, WHOLE, n_slots, 8, 5, 8, part_processors=options.all - left, part_tokens=options.chunk)
                begun = time.perf_counter()
                device = build_device(Assembly(options.pack, sizes), plan, tensors)
                device.grow_pages(n_pages)
                sys.stdout.write(f"8b.{kind}: built in {time.perf_counter() - begun:.1f} s\n")
                measure(Case(device, options.rows, options.chunk, options.repeats), left)
                device.close()


if __name__ == "__main__":
    main()
