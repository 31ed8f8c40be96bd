"""Mixtures of a real shape with experts in host memory, on the CUDA pack, without HTTP: tokens against all experts on the device, speed, hits, bytes over PCIe.

Usage: python -m bench.gpu_offload PACK --out FOLDER [--formats fp8 q4_k_m bf16] [--shares 100 50 25] [--layers N] [--rows 1 8 32] [--prompts 2048 8192]. Weights are random, each expert's
its own part of one file per format. Decode is fed random tokens, so that choices are as even as a random router makes them: real routers have favourites, and find more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.blueprint.blueprint import Blueprint
from paddock_runner.blueprint.names import expected_shapes
from paddock_runner.engine.assemble import Kept, fill_device
from paddock_runner.engine.experts import FetchedExperts
from paddock_runner.files.view import Scales, TensorView
from paddock_runner.formats.table import by_name
from paddock_runner.memory.state import StateSizes
from paddock_runner.model import decoder, moe
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device
from paddock_runner.pack.library import load_pack

from .fit_shapes import blueprint, format_of
from .gpu_models import SHORT_PAGES, Driver
from .gpu_weights import Weight

POOL_BYTES = 192 << 20
STEPS, GREEDY = 12, 16


def views(plan: Blueprint, kind: str, folder: Path) -> dict[str, TensorView]:
    """Every tensor, at places of its own in one file of random values per format."""
    rng, found, pools = np.random.default_rng(1), {}, {}
    (folder / "scales").write_bytes(np.full(1 << 18, 1.5e-3, np.float32).tobytes())
    shapes = expected_shapes(plan)
    formats = {n: format_of(n, kind, s, int(n.split(".")[1]) if n.startswith("layers.") else -1, plan.n_layers) for n, s in shapes.items()}
    for name in sorted(set(formats.values())):
        form = by_name(name)
        most = max(int(np.prod(s)) // form.block_elements * form.block_bytes for n, s in shapes.items() if formats[n] == name)
        raw = (1 + 0.1 * rng.standard_normal(1 << 16, np.float32)).tobytes() if name == "f32" else Weight(name, 4096, 8192).fill(rng).data.tobytes()
        pools[name] = folder / name
        with pools[name].open("wb") as file:
            for _ in range(0, max(most + len(raw), POOL_BYTES if name not in ("f32", "bf16") or kind == "bf16" else 0), len(raw)):
                file.write(raw)
    for name, shape in shapes.items():
        form, scales = by_name(formats[name]), None
        n_bytes = int(np.prod(shape)) // form.block_elements * form.block_bytes
        if form.name == "fp8_e4m3":
            grid = (-(-shape[0] // 128), -(-shape[1] // 128))
            scales = Scales("block", TensorView(name + "_scale_inv", grid, "f32", folder / "scales", 0, 4 * grid[0] * grid[1]), (128, 128))
        room = (pools[form.name].stat().st_size - n_bytes) // form.block_bytes
        found[name] = TensorView(name, shape, form.name, pools[form.name], int(rng.integers(0, room + 1)) * form.block_bytes, n_bytes, scales)
    return found


class Fed(Driver):
    """A driver whose rows may be given their next token."""

    def feed(self, tokens: dict[int, int], lengths: dict[int, int]) -> None:
        """One step of one row a slot, each with that token at its end."""
        self.seq += 1
        runs = b"".join(struct.pack("4i", s, lengths[s], 1, i) for i, s in enumerate(tokens))
        payload = np.array(list(tokens.values()), np.int32).tobytes()
        n = len(tokens)
        blob = bytes(abi.pk_step_head(self.seq, n, n, n, 0, 0, n, 0, n)) + b"".join(struct.pack("4i", s, 1, abi.PK_ROW_SAMPLE, 0) for s in tokens) + runs + payload
        buffer = np.frombuffer(blob + b"\0" * 8, np.uint8).copy()
        self.device.step(buffer.ctypes.data)
        self.wait(self.seq - self.ahead)
        for s in tokens:
            lengths[s] += 1

    def drawn(self, n: int) -> list[int]:
        """The tokens of the last step."""
        self.wait(self.seq)
        at = self.seq % self.device.state.n_results * self.device.state.max_step_rows
        return [struct.unpack_from("3i", bytes(self.device.results[(at + r) * 24 : (at + r) * 24 + 12]))[1] for r in range(n)]


@dataclass
class Case:
    """One device with a share of the experts. experts: None when all lie there."""

    name: str
    share: int
    driver: Fed
    experts: FetchedExperts | None
    rng: np.random.Generator

    def told(self) -> dict[str, float]:
        """The counts so far."""
        return self.experts.report() if self.experts is not None else dict.fromkeys(("found_total", "kept_total", "passed_total", "ahead_total", "copied_bytes_total", "computed_total"), 0)

    def begin(self, batch: int, n: int = 128, seed: int = 5) -> dict[int, int]:
        """Slots with prompts of their own; returns their lengths."""
        rng = np.random.default_rng(seed)
        self.driver.send([(s, n) for s in range(batch)], {s: rng.integers(0, 150000, n) for s in range(batch)})
        self.driver.wait(self.driver.seq)
        return dict.fromkeys(range(batch), n)

    def greedy(self, batch: int) -> list[list[int]]:
        """What that many rows say, a list of tokens a step."""
        self.begin(batch)
        found = [self.driver.drawn(batch)]
        for _ in range(GREEDY):
            self.driver.send([(s, 1) for s in range(batch)])
            found.append(self.driver.drawn(batch))
        return found

    def decode(self, batch: int) -> dict[str, Any]:
        """Rows of random tokens: tok/s, share found, GB/s."""
        lengths = self.begin(batch)
        for _ in range(STEPS // 2):
            self.driver.feed({s: int(self.rng.integers(0, 150000)) for s in range(batch)}, lengths)
        self.driver.wait(self.driver.seq)
        before, start = self.told(), time.perf_counter()
        for _ in range(STEPS):
            self.driver.feed({s: int(self.rng.integers(0, 150000)) for s in range(batch)}, lengths)
        self.driver.wait(self.driver.seq)
        return self.row(f"decode.b{batch}", batch * STEPS, time.perf_counter() - start, before)

    def prefill(self, n: int) -> dict[str, Any]:
        """A prompt of n random tokens."""
        times = []
        for i in range(4):
            text = self.rng.integers(0, 150000, n)
            self.driver.wait(self.driver.seq)
            before, start = self.told(), time.perf_counter()
            self.driver.send([(0, n)], {0: text})
            self.driver.wait(self.driver.seq)
            times += [time.perf_counter() - start] if i else []
        return self.row(f"prefill.{n}", n, statistics.median(times), before)

    def row(self, what: str, n: int, seconds: float, before: dict[str, float]) -> dict[str, Any]:
        """A row of the board, printed too."""
        now = self.told()
        found, kept, passed, ahead, n_bytes, computed = (
            now[k] - before[k] for k in ("found_total", "kept_total", "passed_total", "ahead_total", "copied_bytes_total", "computed_total")
        )
        wanted = found + kept + passed + computed
        row = {
            "id": f"h200.offload.{self.name}.{self.share}.{what}", "value": n / seconds, "unit": "tok/s", "better": "higher", "samples": STEPS,
            "found_share": found / wanted if wanted else 1.0, "ahead": ahead, "computed": computed, "copied_gbs": n_bytes / seconds / 1e9, "copied_bytes": n_bytes,
        }  # fmt: skip
        sys.stdout.write(f"{self.name} {self.share:3} % {what:14} {n / seconds:9.1f} tok/s, {seconds * 1e3:8.1f} ms, found {row['found_share']:.3f}, {ahead:5} ahead, {computed:5} by the host, {n_bytes / 1e9:7.2f} GB at {row['copied_gbs']:5.1f} GB/s\n")
        sys.stdout.flush()
        return row


def run(options: argparse.Namespace, kind: str, folder: Path, rows: list[dict[str, Any]]) -> None:
    """All shares of one format: their rows are added, and written when a share is done."""
    plan = blueprint("30b-a3b")
    plan = replace(plan, layers=plan.layers[: options.layers or plan.n_layers])
    tensors = views(plan, kind, folder)
    said: dict[int, list[tuple[int, list[list[int]]]]] = {}
    most = max(options.rows)
    longest = max(2048, 128 * most, *options.prompts)
    n_pages = 1 + longest // 16 + most * SHORT_PAGES
    for share in options.shares:
        experts = plan.layers[0].experts
        n_slots = experts.n_experts * share // 100 if experts is not None and share < 100 else 0
        sizes = StateSizes(most, longest, 16, n_pages, plan.n_vocab, longest, most, 8, 5, 8, n_expert_slots=n_slots)
        start = time.perf_counter()
        device = Device(load_pack(options.pack))
        fetched = fill_device(device, sizes, Kept("bf16"), plan, tensors, cold_experts=options.cold)
        device.grow_pages(n_pages)
        sys.stdout.write(f"{kind} {share} %: {plan.n_layers} layers, loaded in {time.perf_counter() - start:.1f} s; allocated {({k: round(v / 1e9, 2) for k, v in device.allocated.items()})}\n")
        if fetched is not None:
            sys.stdout.write(f"{fetched.cold()}\n")
        case = Case(f"30b-a3b-{plan.n_layers}l.{kind}", share, Fed(device), fetched, np.random.default_rng(3))
        for batch in (1, min(8, most)):
            tokens = case.greedy(batch)
            same = [s for s, words in said.setdefault(batch, []) if words == tokens]
            sys.stdout.write(f"{kind} {share} %: {GREEDY} greedy steps of {batch} row(s): same tokens as {same} of {[s for s, _ in said[batch]]} %; {[t[0] for t in tokens[:6]]}\n")
            said[batch].append((share, tokens))
        rows += [case.decode(batch) for batch in options.rows]
        rows += [case.prefill(n) for n in options.prompts]
        device.close()
        (options.out / "offload.json").write_text(json.dumps({"rows": rows}, indent=1))


def main() -> None:
    """Runs the board."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", nargs="*", default=["fp8"])
    parser.add_argument("--shares", type=int, nargs="*", default=[100, 50, 25], help="percent of the experts that have places; 100: experts on the device alone, whose lone tokens have a kernel of their own, so that 99 is what 50 is to be compared with")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--cold", default="auto", choices=("auto", "copy", "cpu"), help="who computes missing experts in steps of few rows (config's cold_experts)")
    parser.add_argument("--ahead", default="", help="KiB of a layer's experts that are copied on a guess instead of what is built in; none: nothing is copied ahead, prompts' neither")
    options = parser.parse_args()
    if options.ahead == "none":
        decoder._later_experts = lambda *_: None  # type: ignore[assignment,return-value]
    elif options.ahead:
        moe.AHEAD_BYTES = int(options.ahead) << 10
    rows: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in options.formats:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            run(options, kind, Path(folder), rows)


if __name__ == "__main__":
    main()
