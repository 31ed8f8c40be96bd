"""A norm in front of a product of many rows: where the pack narrows activations for FP8 weights, the two work together."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Epilogue, Program
from paddock_runner.pack.tensor import T
from test_matmul import check, product
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



TALL = StateSizes(8, 1024, 16, 520, 100, 1024, 16, 8, 5, 3)


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_products_of_more_rows_than_clusters_take_equal_numpy(bench, rng, scales):
    b = bench(sizes=TALL)
    if "fp8_e4m3" not in b.pack.description["formats"]:
        pytest.skip("this pack has no fp8_e4m3")
    parts = [scaled_fp8("fp8_e4m3", rows, 896, scales, rng) for rows in (384, 130, 5)]
    on_device = [w.upload(b) for w in parts]
    bias = rng.standard_normal(130).astype(np.float32)
    for n in (513, 700):
        x, x64 = b.activations(rng.standard_normal((n, 896)), T)
        got = product(b, x, on_device, n, (None, b.upload(bias, abi.PK_F32), None)).astype(np.float64)
        got[:, 384:514] -= bias
        at = 0
        for part in parts:
            check(b, got[:, at : at + part.rows], x64, part.values.astype(np.float64), "fp8_e4m3")
            at += part.rows
        np.testing.assert_array_equal(product(b, x, on_device[:1], n, (), gap=3), got[:, :384])


@pytest.mark.parametrize("n", [200, 513, 1000])
def test_a_chain_of_narrowed_products_is_what_its_products_are(bench, rng, n):
    b = bench(sizes=TALL)
    if "fp8_e4m3" not in b.pack.description["formats"]:
        pytest.skip("this pack has no fp8_e4m3")
    gate, up, down = (scaled_fp8("fp8_e4m3", rows, cols, "block", rng) for rows, cols in ((384, 256), (384, 256), (300, 384)))
    w = [v.upload(b) for v in (gate, up, down)]
    raw = rng.standard_normal((n, 256)) * np.exp(rng.standard_normal((n, 1)))
    x, _ = b.activations(raw, T)
    residual = rng.standard_normal((n, 300)).astype(np.float32)
    gain = b.upload(rng.standard_normal(256).astype(np.float32), abi.PK_F32)
    normed, hidden, y = b.output(n, 256, T), b.output(n, 384, T), b.upload(residual, abi.PK_F32, T)
    program = Program()
    # Twice over: what lies between the products of the first time is nobody's but theirs.
    for _ in range(2):
        program.norm(x, gain, normed, 1e-5)
        program.matmul(normed, w[:2], hidden, (), Epilogue(act="silu"))
        program.matmul(hidden, w[2:], y, (), Epilogue(add=y))
    b.run(program, n)
    again, beside = b.output(n, 384, T), b.upload(residual, abi.PK_F32, T)
    for made in ((normed, w[:2], again, Epilogue(act="silu")), (again, w[2:], beside, Epilogue(add=beside)), (again, w[2:], beside, Epilogue(add=beside))):
        program = Program()
        program.matmul(*made[:3], (), made[3])
        b.run(program, n)
    np.testing.assert_array_equal(b.download(hidden, n), b.download(again, n))
    got = b.download(y, n)
    np.testing.assert_array_equal(got, b.download(beside, n))
    check(b, (got - residual) / 2, b.download(hidden, n).astype(np.float64), down.values.astype(np.float64), "fp8_e4m3")
