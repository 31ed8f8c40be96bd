"""Ops that few families need against float64 numpy; a pack that has none says so when a program is loaded."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.errors import PackError
from paddock_runner.pack import abi
from paddock_runner.pack.program import Program
from paddock_runner.pack.tensor import T
from test_ops import close


@pytest.mark.parametrize("cols", [1, 4, 32])
def test_softplus_gates_rows_heads_or_elements(bench, rng, cols):
    b = bench()
    x, x64 = b.activations(rng.normal(size=(9, 32)), T, 2)
    g, g64 = b.activations(rng.normal(size=(9, cols)) * 6, T, 1)
    program = Program()
    program.softplus(x, g, x)
    if "softplus" not in b.pack.description["ops"]:
        with pytest.raises(PackError, match=r"op 0 \(softplus\): the \w+ pack has no kernel for it"):
            b.load(program)
        return
    b.run(program, 9)
    close(b.download(x, 9), x64 * np.repeat(np.log1p(np.exp(g64)), 32 // cols, axis=1), b.activation)


def test_softplus_gates_that_do_not_divide_the_row_are_refused(bench, rng):
    b = bench()
    x, _ = b.activations(rng.normal(size=(9, 32)), T, 2)
    g, _ = b.activations(rng.normal(size=(9, 4)), T, 1)
    program = Program()
    program.softplus(x, g, x)
    program.records[0].g.cols = 5
    with pytest.raises(PackError, match=r"op 0 \(softplus\)"):
        b.load(program)


@pytest.mark.parametrize(("has_logits", "has_scales", "is_normalised"), [(True, False, False), (True, True, True), (False, True, False)])
def test_weights_of_chosen_experts_are_sigmoids_and_factors(bench, rng, has_logits, has_scales, is_normalised):
    b = bench()
    ids64 = np.stack([rng.permutation(12)[:3] for _ in range(9)])
    before = rng.random((9, 3)).astype(np.float32)
    ids, weights = b.upload(ids64, abi.PK_I32, T, 1), b.upload(before, abi.PK_F32, T, 2)
    logits64, scales64 = rng.normal(size=(9, 12)).astype(np.float32), rng.normal(size=12).astype(np.float32)
    program = Program()
    scales = b.upload(scales64[None], abi.PK_F32) if has_scales else None
    program.weigh((ids, weights), b.upload(logits64, abi.PK_F32, T) if has_logits else None, scales, is_normalised)
    if "weigh" not in b.pack.description["ops"]:
        with pytest.raises(PackError, match=r"op 0 \(weigh\): the \w+ pack has no kernel for it"):
            b.load(program)
        return
    b.run(program, 9)
    want = 1 / (1 + np.exp(-np.take_along_axis(logits64, ids64, 1).astype(np.float64))) if has_logits else before
    want = want / want.sum(1, keepdims=True) if is_normalised else want
    assert np.allclose(b.download(weights, 9), want * scales64[ids64] if has_scales else want, rtol=1e-6)
