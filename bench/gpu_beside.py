"""What streams feel while a session's pages go to host memory and come back: gaps between steps on the device's clock, before, during both, and how long both take.

Usage: python -m bench.gpu_beside --pack PACK --out FOLDER [--model 8b] [--format fp8] [--tokens 14000] [--streams 16] [--rounds 3] [--plain]
The engine runs in this process on random weights (bench.gpu_models). A prompt is answered; while others decode, its pages are forgotten, so that they are copied out; then it is asked again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.process import freeze
from paddock_runner.engine.tiering import TierConfig
from paddock_runner.memory.state import StateSizes

from bench import board
from bench.gpu_models import blueprint, views
from tests.soak.rig import Answer, Rig

PAGE, SETTLED = 16, 60
"""Tokens of a page; steps before and after which gaps are looked at."""


class Scene:
    """Streams that decode, and a session beside them."""

    def __init__(self, device: Any, sizes: StateSizes, host_bytes: int, streams: int, n_tokens: int) -> None:
        self.device = device
        self.rig = Rig(sizes, device=device, policy=Policy(gather_ms=0.0, lead_ms=0.0))
        engine = self.engine = self.rig.engine
        engine.launched_seq = engine.read_seq = engine.slots.seq = int(device.done[0])
        self.rig.runner.use_tiers(device, TierConfig(host_bytes, 0, Path(), ("bench",)))
        self.rng = np.random.default_rng(3)
        self.prompt = self.ids(n_tokens)
        self.answer = self.until_done(self.rig.ask(self.prompt, 4, temperature=0.0))
        self.streams = [self.rig.ask(self.ids(100), 8000, temperature=0.0) for _ in range(streams)]
        self.took, self.is_same = dict[str, float](), False
        while min(len(s.tokens) for s in self.streams) < 20:
            self.turn()

    def ids(self, n: int) -> list[int]:
        """A prompt."""
        return self.rng.integers(300, 150000, n).tolist()  # type: ignore[no-any-return]

    def turn(self) -> None:
        """One turn of the engine."""
        self.rig.turn()

    def until_done(self, answer: Answer) -> list[int]:
        """Turns until it has ended."""
        while answer.end is None:
            self.rig.turn()
        return answer.tokens

    def gaps(self, run: Callable[[], None]) -> np.ndarray:
        """Milliseconds between ends of the steps that are launched meanwhile."""
        first = self.engine.launched_seq
        run()
        last = self.engine.launched_seq
        while self.engine.read_seq < last:
            self.turn()
        while True:
            done = int(self.device.done[0])
            ends = [end for _, end in self.device.times(done - first + 1)]
            if done == int(self.device.done[0]):
                return np.diff(np.array(ends[: last - first + 1], np.float64)) / 1e6

    def steps(self, n: int) -> None:
        """So many more steps."""
        end = self.engine.launched_seq + n
        while self.engine.launched_seq < end:
            self.turn()

    def send_out(self) -> None:
        """The session's pages leave the device."""
        begun = perf_counter()
        self.engine.ledger.tree.evict(len(self.prompt) // PAGE)
        while not self.copies_are_made():
            self.turn()
        self.took["out"] = perf_counter() - begun
        self.steps(12)

    def ask_again(self) -> None:
        """They come back."""
        begun = perf_counter()
        again = self.rig.ask(self.prompt, 4, temperature=0.0)
        while not again.tokens:
            self.turn()
        self.took["back"] = perf_counter() - begun
        self.is_same = self.until_done(again) == self.answer

    def copies_are_made(self) -> bool:
        """Nothing is under way."""
        given, made = self.device.copied()
        return bool(given == made)


def line(name: str, gaps: np.ndarray, seconds: float, n_bytes: int) -> str:
    """A row of the table."""
    p50, p99 = np.percentile(gaps, [50, 99])
    return f"{name:8} {len(gaps):4} steps  p50 {p50:6.2f} ms  p99 {p99:6.2f}  largest {gaps.max():6.2f}" + (f"  {n_bytes / 1e9:.2f} GB in {1e3 * seconds:.1f} ms" if seconds else "")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pack", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--model", default="8b")
    add("--format", default="fp8")
    add("--tokens", type=int, default=14000)
    add("--streams", type=int, default=16)
    add("--rounds", type=int, default=3)
    add("--commit", default="", help="of this tree, where it is no git checkout")
    add("--plain", action="store_true", help="kernels whose numbers of a row depend on the others: the answer that is asked for again may differ")
    a = parser.parse_args()
    plan = blueprint(a.model)
    ctx = -(-max(a.tokens + 64, 9000) // PAGE) * PAGE
    n_pages = 1 + (a.tokens // PAGE + 8) * 2 + a.streams * 9000 // PAGE
    sizes = StateSizes(a.streams + 4, ctx, PAGE, n_pages, plan.n_vocab, 2048, 256, 8, 5, 8)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        device = build_device(Assembly(a.pack, sizes, is_invariant=not a.plain), plan, views(plan, a.format, Path(folder)))
    device.grow_pages(n_pages)
    size = (a.tokens // PAGE) * device.kv_page_bytes
    scene = Scene(device, sizes, size + (64 << 20), a.streams, a.tokens)
    freeze()
    samples = dict[str, list[float]]()
    for _ in range(a.rounds):
        found = {"before": scene.gaps(lambda: scene.steps(SETTLED)), "out": scene.gaps(scene.send_out)}
        scene.steps(SETTLED)
        found["back"] = scene.gaps(scene.ask_again)
        scene.steps(SETTLED)
        tiers = scene.rig.runner.keeper.tiers  # type: ignore[union-attr]
        for name, gaps in found.items():
            sys.stdout.write(line(name, gaps, scene.took.get(name, 0.0), size) + "\n")
            for what, value in (("p50", np.median(gaps)), ("max", gaps.max())):
                samples.setdefault(f"h200.beside.{a.model}.{a.format}.{name}.{what}", []).append(float(value))
        sys.stdout.write(f"pages out {tiers.n_out}, back {tiers.n_in}, {tiers.rate['host'] / 1e9:.1f} GB/s believed; the same answer: {scene.is_same}\n")
        sys.stdout.flush()
    rows = [board.row(name, values, "ms", "lower") for name, values in samples.items()]
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / f"beside-{a.model}-{a.format}.json").write_text(json.dumps(board.document("h200", rows, a.commit, tokens=a.tokens, streams=a.streams), indent=1) + "\n")


if __name__ == "__main__":
    main()
