"""Boards of the layers beside attention on a GPU: gated delta net (decode and prefill) and experts, against bytes and operations.

Usage: python -m bench.gpu_layers PACK --out FOLDER [--only WORD ...]. Limits are measured first, with torch. Random data throughout.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.formats.table import by_name
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.library import load_pack
from paddock_runner.pack.program import DeltaShape, DeltaWeights, Program, Stacks
from paddock_runner.pack.tensor import T

from .gpu_kernels import Bench, ceilings, wall
from .gpu_weights import Weight

L2_BYTES = 200e6
"""What one replay must touch so that nothing is found in the second-level cache."""


@dataclass(frozen=True)
class Net:
    """A gated delta net of Qwen3.5-27B."""

    g: int = 16
    h: int = 48
    width: int = 128
    taps: int = 4

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return (2 * self.g + self.h) * self.width


@dataclass(frozen=True)
class Mixture:
    """A layer of experts."""

    name: str
    m: int
    f: int
    n: int
    k: int
    format: str
    scales: str = "none"

    @property
    def expert_bytes(self) -> int:
        """Of one expert as the checkpoint has it."""
        kind = by_name(self.format)
        return 2 * self.f * kind.row_bytes(self.m) + self.m * kind.row_bytes(self.f)


MIXTURES = [
    Mixture("30b-a3b", 2048, 768, 128, 8, "bf16"), Mixture("30b-a3b", 2048, 768, 128, 8, "fp8_e4m3", "block"), Mixture("30b-a3b", 2048, 768, 128, 8, "q8_0"),
    Mixture("30b-a3b", 2048, 768, 128, 8, "q4_k"), Mixture("gpt-oss-20b", 2880, 2880, 32, 4, "mxfp4"),
]  # fmt: skip


def write_all(b: Bench, address: int, n_bytes: int, block: bytes) -> None:
    """Fills device memory with copies of a block."""
    for at in range(0, n_bytes, len(block)):
        b.device.write(address + at, block[: min(len(block), n_bytes - at)])


def delta_net(
    pack: Any, limits: dict[str, float], rng: np.random.Generator, n_rows: int, n_tokens: int
) -> dict[str, Any]:
    """One layer for n_rows rows of n_tokens; as many layers in a replay as make it larger than the cache."""
    net, n = Net(), n_rows * n_tokens
    state, tail = 4 * net.h * net.width**2, 4 * net.channels * (net.taps - 1)
    layers = min(40, max(2, int(L2_BYTES / (n_rows * state)))) if n_tokens == 1 else 2
    slot = layers * (state + tail)
    b = Bench(pack, sizes=StateSizes(n_rows, 16384, 16, 64, 100, n, n_rows, 8, 5, 3, slot))
    b.state.recurrent_stride = slot
    write_all(b, b.state.recurrent, n_rows * slot, (rng.standard_normal(1 << 22, np.float32) * 0.1).tobytes())
    b.set_rows([(i, 0 if n_tokens > 1 else 7, n_tokens) for i in range(n_rows)])
    values = net.h * net.width
    qkv, z, out = (
        b.activations(rng.standard_normal((n, net.channels), np.float32), T)[0],
        b.activations(rng.standard_normal((n, values), np.float32), T)[0],
        b.output(n, values, T),
    )
    numbers = [b.upload(rng.standard_normal((n, net.h), np.float32), abi.PK_F32, T) for _ in range(2)]
    sizes = (net.channels * net.taps, net.h, net.h, net.width)
    weights = DeltaWeights(*(b.upload(rng.standard_normal(size, np.float32) * 0.5, abi.PK_F32) for size in sizes))
    program = Program()
    for i in range(layers):
        program.delta(
            (qkv, z, *numbers),
            weights,
            out,
            DeltaShape(net.g, net.h, net.width, net.width, net.taps, i * (state + tail), i * (state + tail) + state),
            1e-6,
        )
    b.load(program)
    us = wall(b, n, 0, 1e-6) * 1e3 / layers
    b.close()
    n_bytes = 2 * n_rows * (state + tail) + n * (net.channels + 2 * values) * 2
    # Chunks of 64: K K^T, Q K^T, U, W, W S, Q S, P D, K^T D for each of the value heads.
    flops = 2 * n * net.h * (64 * 128 * 4 + 128 * 128 * 3 + 64 * 128) if n_tokens > 1 else 7 * n * net.h * 128 * 128
    floor = max(n_bytes / limits["copy_gbs"] * 1e-3, flops / limits["bf16_tflops"] * 1e-6 if n_tokens > 1 else 0.0)
    name = f"h200.gdn.decode.r{n_rows}" if n_tokens == 1 else f"h200.gdn.prefill.{n_rows}x{n_tokens}"
    sys.stdout.write(
        f"{name:32} {us:9.1f} us {n_bytes / us * 1e-3:7.0f} GB/s {flops / us * 1e-6:7.1f} TF/s of floor {floor / us:5.2f}\n"
    )
    sys.stdout.flush()
    return {"id": name, "us": us, "gbs": n_bytes / us * 1e-3, "tflops": flops / us * 1e-6, "of_limit": floor / us}


def experts(pack: Any, limits: dict[str, float], rng: np.random.Generator, x: Mixture) -> list[dict[str, Any]]:
    """A mixture at several numbers of tokens; the experts of a replay's records differ."""
    b = Bench(pack, sizes=StateSizes(8, 256, 16, 64, 100, 2048, 64, 8, 5, 3))
    stacks = Stacks(
        *(
            Weight(x.format, rows, cols, x.scales).fill(rng).stack(b.device, x.n)
            for rows, cols in ((x.f, x.m), (x.f, x.m), (x.m, x.f))
        ),
        x.n,
        (None,) * 3,
        "silu",
        0.0,
        0.0,
    )
    found = []
    for n in (1, 8, 32, 128, 2048):
        operand, _ = b.activations(rng.standard_normal((n, x.m), np.float32), T)
        y = b.output(n, x.m, T, 0, abi.PK_F32)
        factors = b.upload(rng.random((n, x.k)), abi.PK_F32, T)
        records, touched = (16 if n == 1 else 4 if n < 128 else 2), 0
        program = Program()
        for _ in range(records):
            ids = np.argsort(rng.random((n, x.n)), 1)[:, : x.k].astype(np.int32)
            touched += len(np.unique(ids))
            program.experts(operand, (b.upload(ids, abi.PK_I32, T), factors), stacks, y)
        b.load(program)
        us = wall(b, n, 0, 1e-6) * 1e3 / records
        n_bytes, flops = touched / records * x.expert_bytes, 6 * n * x.k * x.m * x.f
        floor = max(n_bytes / limits["read_gbs"] * 1e-3, flops / limits["bf16_tflops"] * 1e-6)
        name = f"h200.experts.{x.name}.{x.format}.t{n}"
        sys.stdout.write(
            f"{name:38} {us:9.1f} us {n_bytes / us * 1e-3:7.0f} GB/s {flops / us * 1e-6:7.1f} TF/s of floor {floor / us:5.2f}\n"
        )
        sys.stdout.flush()
        found.append(
            {"id": name, "us": us, "gbs": n_bytes / us * 1e-3, "tflops": flops / us * 1e-6, "of_limit": floor / us}
        )
    b.close()
    return found


def main() -> None:
    """Runs the board and writes it to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", nargs="*", default=[], help="parts of case names: gdn.decode, gdn.prefill, experts, a format"
    )
    options = parser.parse_args()
    rng, pack = np.random.default_rng(), load_pack(options.pack)

    def wanted(name: str) -> bool:
        return not options.only or any(w in name for w in options.only)

    limits = ceilings()
    sys.stdout.write(f"limits {limits}\n")
    rows = []
    if wanted("gdn.decode"):
        rows += [delta_net(pack, limits, rng, n, 1) for n in (1, 8, 32, 128)]
    if wanted("gdn.prefill"):
        rows += [delta_net(pack, limits, rng, *case) for case in ((1, 2048), (1, 8192), (8, 1024))]
    for x in MIXTURES:
        if wanted(f"experts.{x.name}.{x.format}"):
            rows += experts(pack, limits, rng, x)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "layers.json").write_text(json.dumps({"context": limits, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
