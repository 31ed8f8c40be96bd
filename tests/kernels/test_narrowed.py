"""A norm in front of a product of many rows: where the pack narrows activations for FP8 weights, the two work together."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.pack import abi
from paddock_runner.pack.program import Epilogue, Program
from paddock_runner.pack.tensor import T
from test_matmul import check
from weights import scaled_fp8


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
@pytest.mark.parametrize("n", [3, 65, 130, 200])
def test_product_behind_a_norm_equals_numpy(bench, rng, n, scales):
    b = bench()
    if "fp8_e4m3" not in b.pack.description["formats"]:
        pytest.skip("this pack has no fp8_e4m3")
    raw = rng.standard_normal((n, 256)) * np.exp(rng.standard_normal((n, 1)))
    x, x64 = b.activations(raw, T)
    weight = scaled_fp8("fp8_e4m3", 200, 256, scales, rng)
    gain = rng.standard_normal(256).astype(np.float32)
    normed, y, beside = b.output(n, 256, T), b.output(n, 200, T), b.output(n, 200, T)
    program = Program()
    program.norm(x, b.upload(gain, abi.PK_F32), normed, 1e-5)
    packed = weight.upload(b)
    program.matmul(normed, [packed], y)
    program.matmul(normed, [packed], beside, (), Epilogue(scale=1.0))
    b.run(program, n)
    wanted = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + 1e-5) * gain
    seen = b.download(normed, n).astype(np.float64)
    np.testing.assert_allclose(seen, wanted, rtol=2**-7, atol=1e-5)
    got = b.download(y, n)
    check(b, got.astype(np.float64), seen, weight.values.astype(np.float64), "fp8_e4m3")
    np.testing.assert_array_equal(got, b.download(beside, n))
