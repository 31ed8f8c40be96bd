"""Matrix products and embeddings of the CUDA pack, every format and number of rows, against float64 numpy on fresh random inputs.

Usage: python -m bench.gpu_check PACK [--small]. Prints one line per format; exits 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from paddock_runner.pack import abi
from paddock_runner.pack.library import load_pack
from paddock_runner.pack.program import Epilogue, Program
from paddock_runner.pack.tensor import S, T, Tensor

from .gpu_weights import Weight

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/kernels"))
from harness import Bench
from paddock_runner.memory.state import StateSizes

KINDS = [
    ("bf16", "none"), ("f16", "none"), ("f32", "none"), ("fp8_e4m3", "none"), ("fp8_e4m3", "tensor"), ("fp8_e4m3", "row"), ("fp8_e4m3", "block"),
    ("fp8_e5m2", "tensor"), ("q8_0", "none"), ("q4_0", "none"), ("q4_1", "none"), ("q5_0", "none"), ("q5_1", "none"), ("q2_k", "none"),
    ("q3_k", "none"), ("q4_k", "none"), ("q5_k", "none"), ("q6_k", "none"), ("iq4_nl", "none"), ("iq4_xs", "none"), ("mxfp4", "none"), ("nvfp4", "none"),
]  # fmt: skip
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130, 300)
LIMIT = 6e-3
K_LIMIT = 8e-3
FP8_LIMIT = 4e-2
"""Relative error allowed by norm: bf16 operands; K-quants, whose superblocks' factors are rounded to bf16, too; with more than 64 rows fp8 weights meet activations narrowed to fp8."""


def limit(name: str) -> float:
    """What a format's products may be off by."""
    return FP8_LIMIT if name.startswith("fp8") else K_LIMIT if name.endswith("_k") else LIMIT


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Relative error by norm; infinite when anything is no number."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)) if np.isfinite(got).all() else float("inf")


def products(b: Bench, rng: np.random.Generator, kind: tuple[str, str], shapes: tuple[int, ...], k: int, rows: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    """(what, relative error) of plain, biased and gated products with every number of rows."""
    weights = [Weight(kind[0], n, k, kind[1]).fill(rng) for n in shapes]
    packed = [w.upload(b.device) for w in weights]
    exact = [w.values().astype(np.float64) for w in weights]
    wide = sum(shapes)
    bias64 = [rng.normal(size=n).astype(np.float32).astype(np.float64) for n in shapes]
    bias = [b.upload(v, abi.PK_F32) for v in bias64]
    for m in rows:
        x, x64 = b.activations(rng.normal(size=(m, k)), T)
        symbol = S if m <= b.sizes.max_step_rows else T
        x = Tensor(x.data, symbol, x.cols, x.format, x.stride)
        y = b.output(m, wide, symbol, format=abi.PK_F32)
        program = Program()
        program.matmul(x, packed, y)
        b.run(program, m, m if symbol == S else 0)
        plain = np.concatenate([x64 @ w.T for w in exact], 1)
        yield f"m{m}", error(b.download(y, m), plain)
        add, add64 = b.activations(rng.normal(size=(m, wide)) * 3, symbol)
        y = b.output(m, wide, symbol)
        program = Program()
        # Where a cap is far below the products, what is narrowed near zero decides between its two ends.
        cap = float(np.float32(2 * np.std(plain) + 1))
        program.matmul(x, packed, y, bias, Epilogue(add=add, scale=0.5, softcap=cap))
        b.run(program, m, m if symbol == S else 0)
        full = cap * np.tanh((plain + np.concatenate(bias64)) * 0.5 / cap) + add64
        yield f"m{m} bias cap add", error(b.download(y, m), full)
        f = shapes[0]
        y = b.output(m, f, symbol)
        gate = [packed[0], packed[0]] if shapes[1] != f else packed[:2]
        up = exact[0] if shapes[1] != f else exact[1]
        program = Program()
        program.matmul(x, gate, y, (), Epilogue(act="silu"))
        b.run(program, m, m if symbol == S else 0)
        yield f"m{m} gated", error(b.download(y, m), silu(x64 @ exact[0].T) * (x64 @ up.T))


def embeds(b: Bench, rng: np.random.Generator, kind: tuple[str, str]) -> float:
    """Relative error of looking rows up in a packed table."""
    table = Weight(kind[0], b.sizes.n_vocab, 512, kind[1]).fill(rng)
    packed, ids = table.upload(b.device), rng.integers(0, b.sizes.n_vocab, 77)
    b.set("token_id", ids)
    out = b.output(77, 512, T, format=abi.PK_F32)
    program = Program()
    program.embed(packed, out, 2.0)
    b.run(program, 77)
    return error(b.download(out, 77), 2.0 * table.values()[ids].astype(np.float64))


def main() -> None:
    """Checks what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--small", action="store_true", help="few cases, for a memory checker")
    options = parser.parse_args()
    rng, pack, bad = np.random.default_rng(), load_pack(options.pack), 0
    kinds = [k for k in KINDS if k[0] in ("bf16", "fp8_e4m3", "q4_k", "q6_k")] if options.small else KINDS
    for kind in kinds:
        b = Bench(pack, sizes=StateSizes(8, 256, 16, 64, 100, 512, 64, 8, 5, 3))
        found = [("embed", embeds(b, rng, kind))]
        sets = [((96, 40, 32), 512, (1, 9, 65))] if options.small else [((96, 40, 32), 512, ROWS), ((1024, 1024), 4096, (1, 4, 16, 64, 256)), ((200, 200), 12288 if kind[0] != "f32" else 768, (1, 8, 40, 100))]
        for shapes, k, rows in sets:
            found += [(f"{w} k{k}", e) for w, e in products(b, rng, kind, shapes, k, rows)]
        b.close()
        wrong = [(w, e) for w, e in found if not e < limit(kind[0])]
        bad += len(wrong)
        worst = max(found, key=lambda item: item[1])
        sys.stdout.write(f"{kind[0]:9} {kind[1]:7} {len(found)} checks, worst {worst[1]:.1e} at {worst[0]}, {len(wrong)} wrong {[(w, f'{e:.1e}') for w, e in wrong[:8]]}\n")
        sys.stdout.flush()
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
