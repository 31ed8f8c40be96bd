"""A norm between two products of few rows, which a pack may leave to them: the residual and what comes behind are the same."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.pack import abi
from paddock_runner.pack.program import Epilogue, Program
from paddock_runner.pack.tensor import T
from test_ops import act
from weights import random_weight, scaled_fp8

SMALL, EVEN, WIDE, UNITS, TALL, TALL8 = (512, 256, 144), (640, 768, 384), (4096, 2048, 384), (1280, 1024, 416), (2048, 4104, 4224), (1024, 8192, 9728)
"""Of the residual, of what comes before it, and behind: EVEN's have enough K to be dealt out in a cluster, WIDE's are cut in three on an H200, as an 8B's are, UNITS' in units of block formats, TALL's are large enough for tall tiles, TALL8's for those of FP8, with a last wave of an H200 that is cut in two."""
FORMATS, ROWS = ("bf16", "fp8_e4m3", "q4_k", "q5_k", "q8_0"), (2, 3, 16, 21, 40, 64, 70)
CASES = [(name, n, SMALL) for n in ROWS for name in FORMATS]
CASES += [(name, n, EVEN) for n in (33, 64, 96, 100, 128) for name in ("bf16", "fp8_e4m3")] + [("fp8_e4m3", n, EVEN) for n in (17, 32)]
CASES += [("bf16", n, WIDE) for n in (33, 64, 97, 128)]
CASES += [(name, n, UNITS) for n in (33, 64, 97, 128, 200) for name in ("q4_k", "q6_k", "q8_0")]
CASES += [(name, n, shape) for name, shape in (("bf16", TALL), ("fp8_e4m3", TALL8)) for n in (150, 250)]


def made(name, rows, cols, rng):
    """A weight of the format; FP8 with scales of blocks."""
    return scaled_fp8(name, rows, cols, "block", rng) if name == "fp8_e4m3" else random_weight(name, rows, cols, rng, negative=0.5, size=1 / 64)


@pytest.mark.parametrize("name, n, shape", CASES, ids=str)
def test_norm_between_products_equals_numpy(bench, rng, name, n, shape):
    b, (width, inner, hidden) = bench(), shape
    if name not in b.pack.description["formats"]:
        pytest.skip(f"this pack has no {name}")
    front, gate, up = made(name, width, inner, rng), made(name, hidden, width, rng), made(name, hidden, width, rng)
    start = (rng.standard_normal((n, width)) * 4 ** rng.standard_normal((n, 1))).astype(np.float32)
    gain = (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)
    x, x64 = b.activations(rng.standard_normal((n, inner)), T)
    w = [weight.upload(b) for weight in (front, gate, up)]
    gains = b.upload(gain, abi.PK_F32)
    found = []
    for together in (False, True, True):
        residual, normed, y = b.upload(start, abi.PK_F32, T), b.output(n, width, T), b.output(n, hidden, T)
        programs = [Program() for _ in range(3)]
        programs[0].matmul(x, [w[0]], residual, (), Epilogue(add=residual))
        programs[0 if together else 1].norm(residual, gains, normed, 1e-6)
        programs[0 if together else 2].matmul(normed, w[1:], y, (), Epilogue(act="silu"))
        for program in programs[: 1 if together else 3]:
            b.run(program, n)
        found.append((b.download(residual, n), b.download(y, n)))
    (alone, y_alone), (joined, y_joined), again = found
    np.testing.assert_array_equal(joined, again[0])
    np.testing.assert_array_equal(y_joined, again[1])
    r = start + x64 @ front.values.T.astype(np.float64)
    for seen in (alone, joined):
        allowed = 1e-2 * np.linalg.norm(x64, axis=1)[:, None] * np.linalg.norm(front.values, axis=1)[None, :] + 1e-5 * np.abs(r)
        assert (np.abs(seen - r) <= (allowed if name != "fp8_e4m3" or n <= 16 else 7 * allowed)).all()
    # Behind the norm: against a product of what was seen in the residual, so that only this norm and this product are judged.
    normed64 = joined / np.sqrt((joined.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * gain
    g, u = normed64 @ gate.values.T.astype(np.float64), normed64 @ up.values.T.astype(np.float64)
    near = 2**-4 if name == "fp8_e4m3" and n > 16 else 1e-2
    sizes = [near * np.linalg.norm(normed64, axis=1)[:, None] * np.linalg.norm(v.values, axis=1)[None, :] for v in (gate, up)]
    error = 1.2 * sizes[0] * np.abs(u) + np.abs(act(g, "silu")) * sizes[1] + 1.2 * sizes[0] * sizes[1] + 2**-7 * np.abs(act(g, "silu") * u) + 1e-6
    for seen in (y_alone, y_joined):
        assert (np.abs(seen - act(g, "silu") * u) <= error).all()
