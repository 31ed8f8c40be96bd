"""Kernel board of the CPU pack: each op in microseconds, as a share of this machine's bandwidth or matrix peak, measured in the same run.

Usage: python -m bench.kernels [--threads 2] [--rounds 5] [--only WORD] [--pack FILE]
Products of few rows and decode attention are held to bandwidth (bytes that must move; over copies and layers that no private
cache holds), products of many rows and prefill attention to the fastest product that the machine has. Row ops and sampling work
on what the op before left in the caches: they have no limit here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.library import Pack, find_pack, load_pack
from paddock_runner.pack.program import Epilogue, Heads, Program, Rotation
from paddock_runner.pack.tensor import S, T, Tensor

from . import board
from .gpu_weights import Weight

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/kernels"))
from harness import Bench

WIDTH, ROWS = 2048, 4096
"""A product's shape: large enough that dispatch is nothing, small enough for every cache question to be the same."""

COPIES_MIB = 96
"""Weights of one product, over several copies: more than any private cache holds."""


@dataclass(frozen=True)
class Timed:
    """One record to time: microseconds come out, and what it must move or compute goes into its limit."""

    id: str
    us: list[float]
    n_bytes: float = 0.0
    n_flops: float = 0.0


def ceilings(threads: int) -> dict[str, float]:
    """Bandwidth and product rates of this machine with so many threads."""
    source = Path(__file__).with_name("ceilings.cpp")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "ceilings"
        subprocess.run(
            [os.environ.get("CXX", "g++"), "-O2", "-std=c++20", "-pthread", str(source), "-o", str(target)], check=True
        )
        out = subprocess.run(
            [str(target), str(threads), str(COPIES_MIB)], check=True, capture_output=True, text=True
        ).stdout
    return dict(json.loads(out))


class Rig:
    """Benches of one pack, and the timing of single records on them."""

    def __init__(self, pack: Pack, threads: int, rounds: int) -> None:
        self.pack, self.threads, self.rounds = pack, threads, rounds
        self.rng = np.random.default_rng(11)

    def bench(self, n_tokens: int, n_rows: int, n_vocab: int = 100, ctx: int = 64, page_bytes: int = 0) -> Bench:
        """A bench that holds such a step."""
        sizes = StateSizes(n_rows, ctx, 16, n_rows * ctx // 16 + 1, n_vocab, n_tokens, n_rows)
        return Bench(self.pack, 0, self.threads, page_bytes, sizes)

    def time(self, b: Bench, program: Program, n_tokens: int, n_samples: int) -> list[float]:
        """Microseconds of the program's average record, once per round; the best of three runs each."""
        b.load(program)
        b.device.run(n_tokens, n_samples, 2)
        n = len(program.records)
        return [
            min(sum(b.device.run(n_tokens, n_samples, 1, is_timed=True)) / n for _ in range(3))
            for _ in range(self.rounds)
        ]


def products(rig: Rig) -> Iterator[Timed]:
    """y [m, 4096] = x [m, 2048] W^T in every format, for 1, 8 and 512 rows."""
    for name in rig.pack.description["formats"]:
        b = rig.bench(512, 1)
        weight = Weight(name, ROWS, WIDTH).fill(rig.rng)
        first = weight.upload(b.device)
        copies = [first] + [
            weight.upload(b.device) for _ in range(max(1, COPIES_MIB * 2**20 // weight.data.nbytes) - 1)
        ]
        x, _ = b.activations(rig.rng.standard_normal((512, WIDTH)), T)
        y = b.output(512, ROWS, T)
        for m in (1, 8, 512):
            program = Program()
            for w in copies if m < 512 else copies[:4]:
                program.matmul(x, [w], y)
            us = rig.time(b, program, m, 0)
            moved, flops = (weight.data.nbytes, 0.0) if m < 512 else (0.0, 2.0 * m * ROWS * WIDTH)
            yield Timed(f"matmul.{name}.m{m}", us, moved, flops)
        b.close()


def row_ops(rig: Rig) -> Iterator[Timed]:
    """Row ops over 512 tokens of width 2048, and the cost of a record that does next to nothing."""
    n, width = 512, 2048
    b = rig.bench(n, 1)
    x, _ = b.activations(rig.rng.standard_normal((n, 2 * width)), T)
    half, other, out = x.columns(0, width), b.output(n, width, T), b.output(n, width, T)
    b.device.fill(other.data, 0, n * width * 4)
    w = b.upload(np.ones(width), abi.PK_F32)
    ops = {
        "norm": lambda p: p.norm(half, w, out, 1e-5),
        "norm_residual": lambda p: p.norm(half, w, out, 1e-5, other, None, 0.0),
        "gate": lambda p: p.gate(x, out, "silu"),
        "add": lambda p: p.add(half, other, out),
        "copy": lambda p: p.copy(half, out),
    }
    for name, record in ops.items():
        program = Program()
        record(program)
        yield Timed(f"{name}.t512", rig.time(b, program, n, 0))
    program = Program()
    for _ in range(200):
        program.add(half, other, out)
    yield Timed("record.t1", rig.time(b, program, 1, 0))
    b.close()


def attention(rig: Rig) -> Iterator[Timed]:
    """SmolLM2's heads (9 of 64 over 3) in f16 pages of 30 layers: a prompt of 512; one and eight rows behind 512 or 4096 keys."""
    n_heads, n_kv, width, n_layers = 9, 3, 64, 30
    half = n_kv * 16 * width * 2
    layers = [Heads(n_heads, n_kv, width, width, 2 * i * half, (2 * i + 1) * half, abi.PK_F16) for i in range(n_layers)]
    for name, rows in (
        ("prefill.t512", [(0, 0, 512)]),
        ("decode.b1.k512", [(0, 511, 1)]),
        ("decode.b8.k512", [(i, 511, 1) for i in range(8)]),
        ("decode.b1.k4096", [(0, 4095, 1)]),
    ):
        n = sum(r[2] for r in rows)
        b = rig.bench(n, len(rows), ctx=4096 if len(rows) == 1 else 512, page_bytes=2 * half * n_layers)
        b.device.fill(b.device.kv_address, 0, b.sizes.n_pages * b.page_bytes)
        b.scatter_pages(rig.rng)
        b.set_rows(rows)
        q, _ = b.activations(rig.rng.standard_normal((n, n_heads * width)), T)
        program, out = Program(), b.output(n, n_heads * width, T)
        for heads in layers:
            program.attention(q, out, heads, width**-0.5)
        us = rig.time(b, program, n, 0)
        seen = sum((p + 1 + p + m) * m / 2 for _, p, m in rows)
        is_prefill = name.startswith("prefill")
        yield Timed(
            f"attention.{name}",
            us,
            0.0 if is_prefill else seen * n_kv * width * 4,
            4.0 * seen * n_heads * width if is_prefill else 0.0,
        )
        if is_prefill:
            qkv, _ = b.activations(rig.rng.standard_normal((n, (n_heads + 2 * n_kv) * width)), T)
            frequency = b.upload(1e4 ** -(np.arange(width // 2) / (width // 2)), abi.PK_F32)
            program = Program()
            program.qkv(
                qkv,
                qkv.columns(0, n_heads * width),
                layers[0],
                (None, None),
                Rotation(frequency, width, "neox", 1.0),
                1e-5,
            )
            yield Timed("qkv.t512", rig.time(b, program, n, 0))
        b.close()


def samplers(rig: Rig) -> Iterator[Timed]:
    """One row of 49,152 and of 262,144 logits: greedy, and with the usual filters."""
    for n_vocab in (49152, 262144):
        for name, fields in (
            ("greedy", {"temperature": 0.0}),
            ("top_k40_p95", {"temperature": 0.8, "top_k": 40, "top_p": 0.95}),
            ("top_p95", {"temperature": 1.0, "top_p": 0.95}),
        ):
            b = rig.bench(8, 1, n_vocab, 512)
            b.set_rows([(0, 100, 1)])
            p = abi.pk_sampling(0.0, 1.0, 0.0, 1.0, 1.0)
            p.n_logprobs = -1
            for key, value in fields.items():
                setattr(p, key, value)
            b.set_sampling(0, p)
            values = rig.rng.standard_normal((1, n_vocab)) * 2
            values[0, rig.rng.integers(0, n_vocab, 60)] += rig.rng.exponential(3, 60) + 6
            program = Program()
            program.sample(b.upload(values, abi.PK_F32, S))
            yield Timed(f"sample.{name}.v{n_vocab}", rig.time(b, program, 1, 1))
            b.close()


def gated(rig: Rig) -> Iterator[Timed]:
    """The pair of products with a gate in one record, as a feed-forward layer runs it."""
    b = rig.bench(512, 1)
    weights: list[Tensor] = [Weight("q4_k", ROWS, WIDTH).fill(rig.rng).upload(b.device) for _ in range(2)]
    x, _ = b.activations(rig.rng.standard_normal((512, WIDTH)), T)
    program = Program()
    program.matmul(x, weights, b.output(512, ROWS, T), (), Epilogue(act="silu"))
    yield Timed("matmul_gated.q4_k.m512", rig.time(b, program, 512, 0), 0.0, 4.0 * 512 * ROWS * WIDTH)
    b.close()


def as_row(timed: Timed, found: dict[str, float]) -> dict[str, object]:
    """A board row in microseconds, with the time that the machine's limit would take."""
    limit = None
    if timed.n_flops:
        limit = timed.n_flops / max(found["f32_gflops"], found["bf16_gflops"]) / 1e3
    elif timed.n_bytes:
        limit = timed.n_bytes / found["read_gbs"] / 1e3
    return board.row(f"cpu.kernel.{timed.id}", timed.us, "us", "lower", limit)


def main() -> None:
    """Measures what is asked for and writes the board."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--machine", default="cpu2")
    arguments = parser.parse_args()
    found = ceilings(arguments.threads)
    rig = Rig(load_pack(arguments.pack or find_pack("cpu")), arguments.threads, arguments.rounds)
    rows = []
    for group in (products, gated, row_ops, attention, samplers):
        if arguments.only in group.__name__:
            rows += [as_row(timed, found) for timed in group(rig)]
    board.write(arguments.machine, "kernels", rows, threads=arguments.threads, **found)


if __name__ == "__main__":
    main()
