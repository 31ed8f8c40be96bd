"""A layer's mixture of experts in one program against the same ops one by one: a pack may serve a lone token, or a few, in fewer launches, and must not be seen to."""

from __future__ import annotations

import numpy as np
import pytest
from harness import rounded
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Choice, Epilogue, Program, Stacks
from paddock_runner.pack.tensor import T
from test_experts import chosen, stack_of
from weights import random_weight, scaled_fp8

SIZES = StateSizes(64, 64, 16, 72, 100, 64, 64, 8, 5, 3)
M, F, SHARED, N_EXPERTS, N_USED, BEFORE, EPS = 1024, 128, 256, 20, 3, 4096, 1e-6


def matrix(kind, rows, cols, rng):
    return scaled_fp8(kind, rows, cols, "block", rng) if kind == "fp8_e4m3" else random_weight(kind, rows, cols, rng)


@pytest.mark.parametrize("n", [1, 3, 16, 29, 45])
@pytest.mark.parametrize("choice, has_bias", [(Choice("softmax"), False), (Choice("sigmoid", True, 2.5), True), (Choice("chosen"), False)], ids=str)
@pytest.mark.parametrize("shared", ["with a gate", "plain", "none"])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "bf16"])
def test_a_mixture_in_one_program_equals_its_ops_one_by_one(bench, rng, level, kind, shared, choice, has_bias, n):
    if level > 1:
        pytest.skip("levels differ in products, which have tests of their own")
    b = bench(sizes=SIZES)
    b.set_rows([(i, 3, 1) for i in range(n)])  # every row one token: as in a step of decode
    residual, normed = b.output(n, M, T, format=abi.PK_F32), b.output(n, M, T)
    logits, ids, factors = b.output(n, N_EXPERTS, T, format=abi.PK_F32), b.output(n, N_USED, T, format=abi.PK_I32), b.output(n, N_USED, T, format=abi.PK_F32)
    hidden, switch = b.output(n, SHARED, T), b.output(n, 1, T)
    norm = b.upload(1 + 0.2 * rng.normal(size=(1, M)), abi.PK_F32)
    bias64 = rounded(rng.normal(size=(1, N_EXPERTS)) * 0.1, abi.PK_F32) if has_bias else None
    bias = b.upload(bias64, abi.PK_F32) if bias64 is not None else None
    router = matrix("bf16", N_EXPERTS, M, rng).upload(b)
    parts = [[matrix(kind, *shape, rng) for _ in range(N_EXPERTS)] for shape in ((F, M), (F, M), (M, F))]
    stacks = Stacks(*(stack_of(b, part) for part in parts), N_EXPERTS, (None,) * 3, "silu", 0.0, 0.0)
    records = [
        lambda p: p.norm(residual, norm, normed, EPS),
        lambda p: p.matmul(normed, [router], logits),
        lambda p: p.route(logits, bias, ids, factors, choice),
        lambda p: p.experts(normed, (ids, factors), stacks, residual, Epilogue(add=residual, scale=0.7)),
    ]
    if shared == "with a gate":
        o, out = matrix(kind, M, BEFORE, rng).upload(b), b.activations(rng.normal(size=(n, BEFORE)) * 0.02, T)[0]
        records.insert(0, lambda p: p.matmul(out, [o], residual, after=Epilogue(add=residual, scale=0.9)))
    if shared != "none":
        both = [matrix(kind, SHARED, M, rng).upload(b) for _ in range(2)]
        down, own = matrix(kind, M, SHARED, rng).upload(b), matrix("bf16", 1, M, rng).upload(b)
        records.append(lambda p: p.matmul(normed, both, hidden, after=Epilogue(act="silu")))
        if shared == "with a gate":
            records += [lambda p: p.matmul(normed, [own], switch), lambda p: p.sigmoid(hidden, switch, hidden)]
        records.append(lambda p: p.matmul(hidden, [down], residual, after=Epilogue(add=residual, scale=0.5)))
    # What the next layer's norm is multiplied with: several products, in two formats.
    wide, small = b.output(n, 160 + 80, T), b.output(n, 24, T, format=abi.PK_F32)
    products = [(wide, [matrix(kind, rows, M, rng).upload(b) for rows in (160, 80)]), (small, [matrix("bf16", 24, M, rng).upload(b)])]
    records.append(lambda p: p.norm(residual, norm, normed, EPS))
    records += [lambda p, y=y, w=w: p.matmul(normed, w, y) for y, w in products]
    start = rounded(rng.normal(size=(n, M)), abi.PK_F32).astype(np.float32)
    found, scores = [], []
    for groups in ([[record] for record in records], [records], [records], [records]):
        b.device.write(residual.data, start.tobytes())
        for group in groups:
            program = Program()
            for record in group:
                record(program)
            b.run(program, n)
        found.append((b.download(ids, n), b.download(factors, n), b.download(residual, n) - start, b.download(wide, n), b.download(small, n)))
        scores.append(b.download(logits, n))
    wanted, first = found[:2]
    # What stands before the norm reads rows narrowed to FP8 where it is a program by itself, and rows as they are in front of a mixture of few rows: then each choice is judged by its own logits.
    is_apart = kind == "fp8_e4m3" and shared == "with a gate" and 16 < n <= 32 and b.activation == abi.PK_BF16
    if is_apart:
        np.testing.assert_allclose(scores[1], scores[0], rtol=0, atol=5e-2)
        for (its_ids, its_factors, *_), its_scores in zip(found[:2], scores, strict=False):
            own_ids, own_factors = chosen(its_scores.astype(np.float64), 0.0 if bias64 is None else bias64, N_USED, choice)
            np.testing.assert_array_equal(its_ids, own_ids)
            np.testing.assert_allclose(its_factors, own_factors, rtol=2e-3)
        same = (first[0] == wanted[0]).all(1)
        assert same.sum() > n // 2
    else:
        same = np.ones(n, bool)
        np.testing.assert_array_equal(first[0], wanted[0])
        np.testing.assert_allclose(first[1], wanted[1], rtol=2e-3 if b.activation == abi.PK_BF16 else 1e-5)
    # A gated end that leaves its rows narrowed does so before they are rounded to bf16, an op by itself behind that: other codes here and there.
    allowed = 2**-4 if kind == "fp8_e4m3" and n > 16 and b.activation == abi.PK_BF16 else 1e-2
    for got, other in zip(first[2:], wanted[2:], strict=True):
        error = np.linalg.norm(got - other, axis=1)[same] / np.linalg.norm(other, axis=1)[same]
        assert np.isfinite(got).all() and error.max() <= allowed, error
    for again in found[2:]:
        for got, other in zip(again, first, strict=True):
            np.testing.assert_array_equal(got, other)
