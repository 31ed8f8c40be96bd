"""Microseconds per engine step with a pack that does nothing: read results, publish, take in, decide, launch.

Closed loops: every request that ends is followed at once by a new one. `chat`: 1,024 prompt tokens of which half are known, answers of
512 to 1,535 tokens (engine.step_us.32 and .128). `short`: 128, and 64 to 191, where nearly every step of 128 slots has
someone coming or going.
`.quiet`: the steps of `chat` in which nobody comes, goes or is prefilled. The pack's clock pretends to be a GPU with an 8B model, so
prefill is spread over steps as it would be there. The front is asleep at every step, so that each step also pays for waking it.
All loads alternate, a thousand steps each.
Usage: python -m bench.control [--steps 20000] [--machine NAME]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from time import perf_counter_ns

from paddock_runner.engine.loop import Engine
from paddock_runner.engine.process import Runner, freeze
from paddock_runner.memory.state import StateSizes
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.messages import Ask, Done
from paddock_runner.wire.port import EnginePort, FrontPort

from bench import board

CELLS = {"chat": (1024, 512, 512, 1535), "short": (128, 64, 64, 191)}
"""Prompt tokens, those of them that every prompt has in common, fewest and most tokens of an answer."""
TARGET_US = {32: 25.0, 128: 50.0}


class Idle(ctypes.Structure):
    """struct idle of idle_pack.c."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("n_slots", "max_step_rows", "n_results", "reserved")),
        *((name, ctypes.c_void_p) for name in ("length", "max_length", "alive", "results", "done", "now_ns")),
    ]


class Facts:
    """Every step is done when `step` returns, so each turn reads one step and launches one, as with run-ahead."""

    run_ahead = 0
    has_drafts = False


class IdleDevice:
    """The pack that does nothing, bound as pack/device.py binds a real one."""

    def __init__(self, sizes: StateSizes, library: ctypes.CDLL) -> None:
        self.facts, self.aside = Facts(), None
        self._arrays = [(ctypes.c_int32 * sizes.n_slots)() for _ in range(3)]
        self._results = (ctypes.c_uint8 * (24 * sizes.n_results * sizes.max_step_rows))()
        self._done = (ctypes.c_uint64 * 1)()
        self._now = (ctypes.c_int64 * 1)(1_000_000_000)
        addresses = [ctypes.addressof(a) for a in (*self._arrays, self._results, self._done, self._now)]
        self._state = Idle(sizes.n_slots, sizes.max_step_rows, sizes.n_results, 0, *addresses)
        self._address = ctypes.addressof(self._state)
        self._step = library.idle_step
        self._step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.results = memoryview(self._results).cast("B")
        self.top = memoryview(bytearray(8))
        self.done = memoryview(self._done).cast("B").cast("Q")
        self.now = memoryview(self._now).cast("B").cast("q")
        self.n_pages, self.allocated = sizes.n_pages, dict[str, int]()

    def step(self, input_address: int) -> None:
        """Runs one step."""
        self._step(self._address, input_address)

    def clock(self) -> int:
        """The pack's own time."""
        now: int = self.now[0]
        return now

    def give_way(self, is_on: bool) -> None:
        """There is no part."""

    def wait(self, seq: int, timeout_us: int) -> bool:
        """Every step is done when `step` returns."""
        return True

    def times(self, n: int) -> list[tuple[int, int]]:
        """None are kept."""
        return []

    def shrink_pages(self, n_pages: int) -> int:
        """All pages stay."""
        return self.n_pages

    def copy_page(self, source: int, to: int) -> None:
        """Pages hold nothing."""

    def grow_pages(self, n_pages: int) -> int:
        """All pages are there."""
        return self.n_pages


class Load:
    """A closed loop of `n` streams on one engine."""

    def __init__(self, n: int, cell: str, library: ctypes.CDLL) -> None:
        self.cell = CELLS[cell]
        sizes = StateSizes(
            n_slots=n + 4, max_ctx_tokens=4096, page_tokens=16, n_pages=(n + 4) * 200 + 1, n_vocab=32000,
            max_step_tokens=2048, max_step_rows=n + 64, max_bias=16, max_top=1,
        )  # fmt: skip
        channel = Channel.create()
        self.front = FrontPort(channel, True)
        device = IdleDevice(sizes, library)
        self.engine = Engine(sizes, device, [EnginePort(channel, True)], clock=device.clock)
        self.runner = Runner(self.engine)
        self.random = random.Random(n)
        self.n_asked = self.n_tokens = 0
        self.us: list[float] = []
        self.quiet_us: list[float] = []
        for _ in range(n):
            self.ask()

    def ask(self) -> None:
        """One more request."""
        self.n_asked += 1
        n_prompt, n_shared, least, most = self.cell
        tail = [(self.n_asked * 31 + i) % 32000 for i in range(n_prompt - n_shared)]
        prompt = array("i", [*range(n_shared), *tail])
        self.front.ask(Ask(self.n_asked, prompt, max_tokens=self.random.randint(least, most)))

    def turn(self) -> None:
        """One timed turn of the engine, then the front's share, untimed."""
        self.front._reader.park()
        counters = self.engine.counters
        before = counters.requests + counters.n_ended + counters.prefill_tokens
        start = perf_counter_ns()
        self.runner.turn()
        us = (perf_counter_ns() - start) / 1000
        self.us.append(us)
        if before == counters.requests + counters.n_ended + counters.prefill_tokens:
            self.quiet_us.append(us)
        self.front._reader.unpark()
        for event in self.front.poll():
            if isinstance(event, Done):
                self.n_tokens += event.output_tokens
                self.ask()


def build(folder: Path) -> ctypes.CDLL:
    """Compiles the pack that does nothing."""
    target = folder / "idle_pack.so"
    source = Path(__file__).with_name("idle_pack.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return ctypes.CDLL(str(target))


def main() -> None:
    """Measures 32 and 128 slots in turns and writes the board."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--machine", default="cpu2")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
    loads = {(n, cell): Load(n, cell, library) for n in TARGET_US for cell in CELLS}
    freeze()
    for load in loads.values():
        for _ in range(2000):
            load.turn()
        load.us.clear()
        load.quiet_us.clear()
    for _ in range(max(1, arguments.steps // 1000)):
        for load in loads.values():
            for _ in range(1000):
                load.turn()
    rows = []
    for (n, cell), load in loads.items():
        row = board.row(f"engine.step_us.{n}" + ("" if cell == "chat" else f".{cell}"), load.us, "us", "lower")
        rows.append(row | {"p99": round(statistics.quantiles(load.us, n=100)[-1], 2), "mean": round(statistics.fmean(load.us), 2)})
        if cell == "chat":
            rows[-1]["target"] = TARGET_US[n]
            rows.append(board.row(f"engine.step_us.{n}.quiet", load.quiet_us, "us", "lower"))
    context = {"load_average": round(os.getloadavg()[0], 2), "python": sys.version.split()[0], "steps": arguments.steps}
    board.write(arguments.machine, "engine", rows, **context)


if __name__ == "__main__":
    main()
