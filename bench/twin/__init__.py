"""The Python engine beside a loop in C++ that gives the same steps to the same pack.

Usage: python -m bench.twin MODEL [--pack PACK] [--cells 128/128c8 ...] [--rounds 3] [--threads N] [--machine NAME [--commit NAME]]
Each round runs a cell with the engine (recording every step's input block and how many were in flight), then gives the same blocks to the
pack again from C++ (replay.cpp; `make twin` builds it, and so does this when it is not there). Throughput: answers' tokens over the time from
the first launch to the last result; first token: from the first launch of a wave to the result that has it. There are as many slots as the largest cell
has streams, as in a server with --max-batch. Beside the figures: how long the device waited between steps, where it keeps times.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic_ns
from typing import Any

import numpy as np
from paddock_runner.engine.process import freeze
from paddock_runner.pack.abi import PK_TIMES

from bench import board
from bench.longprefill import Scene, opened

FOLDER = Path(__file__).resolve().parent
CELL = re.compile(r"(\d+)/(\d+)c(\d+)")


class Replay(ctypes.Structure):
    """struct Replay of replay.cpp."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("step", "wait", "program", "results", "done", "blocks", "offsets", "ahead", "arrivals", "launched_ns", "read_ns", "tokens")),
        *((name, ctypes.c_int64) for name in ("n_steps", "n_results", "max_step_rows")),
        ("first_seq", ctypes.c_uint64),
        ("n_drawn", ctypes.c_int64),
    ]


def library() -> ctypes.CDLL:
    """The loop in C++, built when it is older than its source."""
    source, target = FOLDER / "replay.cpp", FOLDER.parent.parent / "build" / "twin.so"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        target.parent.mkdir(exist_ok=True)
        subprocess.run(["c++", "-std=c++20", "-O2", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return ctypes.CDLL(str(target))


class Recorder:
    """Stands before a device and keeps every step's input, when it was given, and when its results were read."""

    def __init__(self, scene: Scene) -> None:
        self.engine, self.device = scene.engine, scene.device
        self.blocks: list[bytes] = []
        self.ahead: list[int] = []
        self.arrivals: list[int] = []
        self.launched: list[int] = []
        self.read: list[int] = []
        self._step, self._read = self.device.step, self.engine._read
        self.device.step = self.step  # type: ignore[method-assign]
        self.engine._read = self.take  # type: ignore[method-assign]

    def step(self, address: int) -> None:
        """Before the pack gets it."""
        head = np.ctypeslib.as_array((ctypes.c_int32 * 10).from_address(address))
        new, rows, pages, texts, masks, payload = (int(head[i]) for i in (5, 3, 6, 7, 8, 9))
        n = 40 + 152 * new + 16 * (rows + pages + texts) + 8 * masks + 4 * payload
        self.blocks.append(ctypes.string_at(address, -(-n // 8) * 8))
        self.ahead.append(len(self.engine.in_flight) - 1)
        self.arrivals.append(self.engine.in_flight[-1].n_rows)
        self.launched.append(monotonic_ns())
        self._step(address)

    def take(self, step: Any, is_alone: bool) -> None:
        """When the engine reads a step."""
        self._read(step, is_alone)
        self.read.append(monotonic_ns())

    def stop(self) -> None:
        """The device is itself again."""
        self.device.step, self.engine._read = self._step, self._read  # type: ignore[method-assign]


def run_engine(scene: Scene, n_in: int, n_out: int, streams: int) -> Recorder:
    """One wave of streams with the engine."""
    recorder = Recorder(scene)
    ids = [scene.ask(n_in, n_out) for _ in range(streams)]
    while not all(i in scene.ended for i in ids):
        scene.turn()
    while scene.engine.in_flight:
        scene.turn()
    recorder.stop()
    return recorder


def run_twin(scene: Scene, loop: ctypes.CDLL, recorder: Recorder) -> tuple[list[int], list[int], int]:
    """The same steps from C++: when each was given and read, and tokens drawn."""
    device, sizes, n = scene.device, scene.engine.sizes, len(recorder.blocks)
    first = int(device.done[0])
    offsets = np.cumsum([0, *map(len, recorder.blocks[:-1])]).astype(np.int64)
    blocks = np.frombuffer(b"".join(recorder.blocks), np.uint64).copy()
    blocks[offsets // 8] = np.arange(first + 1, first + n + 1)
    arrays = [np.array(recorder.ahead, np.int32), np.array(recorder.arrivals, np.int32), np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(sizes.n_slots, np.int32)]
    pack, address = device.pack, ctypes.cast
    r = Replay(
        address(pack.function("pk_step"), ctypes.c_void_p).value, address(pack.function("pk_wait"), ctypes.c_void_p).value, device._program.value,
        device.state.results, device.state.done, blocks.ctypes.data, offsets.ctypes.data, *(a.ctypes.data for a in arrays),
        n, sizes.n_results, sizes.max_step_rows, first,
    )  # fmt: skip
    status = loop.replay(ctypes.byref(r))
    if status:
        raise pack.failure("pk_step", status)
    engine = scene.engine
    engine.launched_seq = engine.read_seq = engine.slots.seq = int(device.done[0])
    return arrays[2].tolist(), arrays[3].tolist(), int(r.n_drawn)


def figures(recorder: Recorder, launched: list[int], read: list[int], n_tokens: int) -> tuple[float, float]:
    """Tokens per second, and milliseconds to the median first token."""
    first = sorted(read[i] for i, block in enumerate(recorder.blocks) for _ in range(_firsts(block)))
    return n_tokens / (read[-1] - launched[0]) * 1e9, (statistics.median(first) - launched[0]) / 1e6


def _firsts(block: bytes) -> int:
    """Rows of prefill that draw a token."""
    head = np.frombuffer(block, np.int32, 10)
    rows = np.frombuffer(block, np.int32, 4 * int(head[3]), 40 + 152 * int(head[5])).reshape(-1, 4)
    return int(((rows[:, 1] > 1) & (rows[:, 2] & 1 > 0) & (rows[:, 2] & 32 == 0)).sum())


def waits(scene: Scene, n_steps: int) -> str:
    """How long the device worked in the last n_steps, and had nothing to do between them."""
    times = scene.device.times(min(n_steps, PK_TIMES))
    gaps = sorted(max(0, b[0] - a[1]) / 1e3 for a, b in pairwise(times))
    busy = sum(end - begin for begin, end in times) / 1e6
    return f"{sum(gaps) / 1e3:.2f} ms in {len(times)} steps of {busy:.1f} ms, p50 {gaps[len(gaps) // 2]:.1f} p90 {gaps[len(gaps) * 9 // 10]:.1f} us" if gaps else "not known"


def main() -> None:
    """Measures and prints; with --machine writes the board."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pack", default="")
    parser.add_argument("--cells", nargs="+", default=["128/32c1", "128/32c8", "32/64c16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--machine", default="")
    parser.add_argument("--commit", default="", help="of this tree, where it is no git checkout")
    options = parser.parse_args()
    cells = [tuple(map(int, match.groups())) for cell in options.cells if (match := CELL.fullmatch(cell))]
    options.streams, options.prompt, options.beside = max(c for _, _, c in cells) - 1, max(a + b for a, b, _ in cells), []
    loop, rows, of = library(), list[dict[str, Any]](), board.model_name(options.model)
    with TemporaryDirectory() as folder:
        scene = Scene(opened(options.model, options.prompt, Path(folder)), options, 0.0)
    freeze()
    run_engine(scene, 64, 8, 2)
    for (n_in, n_out, streams), name in zip(cells, options.cells, strict=True):
        ours, theirs = [], []
        for _ in range(options.rounds):
            recorder = run_engine(scene, n_in, n_out, streams)
            ours.append(figures(recorder, recorder.launched, recorder.read, streams * n_out))
            waited = waits(scene, len(recorder.blocks))
            launched, read, n_drawn = run_twin(scene, loop, recorder)
            assert n_drawn == streams * n_out, (n_drawn, streams * n_out)
            theirs.append(figures(recorder, launched, read, n_drawn))
            sys.stdout.write(f"{name}: {ours[-1][0]:.1f} tok/s, {ours[-1][1]:.2f} ms; C++ {theirs[-1][0]:.1f}, {theirs[-1][1]:.2f}; the device waited {waited}; C++ {waits(scene, len(recorder.blocks))}\n")
            sys.stdout.flush()
        rate, first = ([x[i] for x in ours] for i in (0, 1))
        their_rate, their_first = ([x[i] for x in theirs] for i in (0, 1))
        for id in (f"{options.machine or 'here'}.twin.{name}", f"{options.machine or 'here'}.twin.{of}.{name}"):
            rows.append(board.row(f"{id}.out_tok_s", rate, "tok/s", peer=("C++ loop", their_rate)))
            rows.append(board.row(f"{id}.ttft_p50_ms", first, "ms", "lower", peer=("C++ loop", their_first)))
        if options.machine:
            board.write(options.machine, "twin", rows, options.commit, load_average=round(os.getloadavg()[0], 2), model=Path(options.model).name)
    for row in (r for r in rows if f".{of}." not in r["id"]):
        sys.stdout.write(f"{row['id']:34} {row['value']:10.2f} {row['unit']:6} C++ {row['peer_value']:10.2f}  ratio {row['vs_peer']:.4f}\n")
    scene.device.close()
