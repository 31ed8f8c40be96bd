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
@pytest.mark.parametrize("n", [3, 33, 65, 130, 200])
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
    for n in (300, 513, 700):
        x, x64 = b.activations(rng.standard_normal((n, 896)), T)
        got = product(b, x, on_device, n, (None, b.upload(bias, abi.PK_F32), None)).astype(np.float64)
        got[:, 384:514] -= bias
        at = 0
        for part in parts:
            check(b, got[:, at : at + part.rows], x64, part.values.astype(np.float64), "fp8_e4m3")
            at += part.rows
        np.testing.assert_array_equal(product(b, x, on_device[:1], n, (), gap=3), got[:, :384])


@pytest.mark.parametrize("n", [200, 300, 513, 1000])
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


@pytest.mark.parametrize("n", [3, 40, 65, 200])
def test_product_behind_a_sigmoid_gate_equals_numpy(bench, rng, n):
    b = bench()
    if "fp8_e4m3" not in b.pack.description["formats"]:
        pytest.skip("this pack has no fp8_e4m3")
    (x, x64), (gate, gate64) = (b.activations(rng.standard_normal((n, 384)) * np.exp(rng.standard_normal((n, 1))), T) for _ in range(2))
    weight = scaled_fp8("fp8_e4m3", 200, 384, "block", rng)
    gated, y, beside = b.output(n, 384, T), b.output(n, 200, T), b.output(n, 200, T)
    program = Program()
    program.sigmoid(x, gate, gated)
    packed = weight.upload(b)
    program.matmul(gated, [packed], y)
    program.matmul(gated, [packed], beside)
    b.run(program, n)
    seen = b.download(gated, n).astype(np.float64)
    np.testing.assert_allclose(seen, x64 / (1 + np.exp(-gate64)), rtol=2**-7, atol=1e-5)
    got = b.download(y, n)
    check(b, got.astype(np.float64), seen, weight.values.astype(np.float64), "fp8_e4m3")
    np.testing.assert_array_equal(got, b.download(beside, n))


@pytest.mark.parametrize(("n", "m", "f"), [(24, 512, 640), (40, 512, 640), (70, 512, 640), (128, 640, 512), (130, 256, 384), (600, 256, 384)])
def test_layers_in_one_program_equal_their_records_one_by_one(bench, rng, n, m, f):
    """Rows that only products with FP8 weights read may be left narrowed alone, and norms between products of few rows to these: nobody may miss them."""
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, 600, 8, 8, 5, 3))
    if "fp8_e4m3" not in b.pack.description["formats"]:
        pytest.skip("this pack has no fp8_e4m3")
    residual, normed, hidden, mixed = b.output(n, m, T, format=abi.PK_F32), b.output(n, m, T), b.output(n, f, T), b.output(n, 2 * f, T)
    records = []
    for _ in range(3):
        gain = b.upload(1 + 0.2 * rng.standard_normal(m), abi.PK_F32)
        q, gate, up, o, down = (scaled_fp8("fp8_e4m3", rows, cols, "block", rng).upload(b) for rows, cols in ((f, m), (f, m), (f, m), (m, f), (m, f)))
        values, gates = mixed.columns(0, f), mixed.columns(f, f)
        records += [
            lambda p, gain=gain: p.norm(residual, gain, normed, 1e-5),
            lambda p, q=q, values=values: p.matmul(normed, [q], values),
            lambda p, up=up, gates=gates: p.matmul(normed, [up], gates),
            lambda p, values=values, gates=gates: p.sigmoid(values, gates, hidden),
            lambda p, o=o: p.matmul(hidden, [o], residual, after=Epilogue(add=residual)),
            lambda p, gain=gain: p.norm(residual, gain, normed, 1e-5),
            lambda p, gate=gate, up=up: p.matmul(normed, [gate, up], hidden, after=Epilogue(act="silu")),
            lambda p, down=down: p.matmul(hidden, [down], residual, after=Epilogue(add=residual)),
        ]
    start = rng.standard_normal((n, m)).astype(np.float32)
    found = []
    for groups in ([[record] for record in records], [records]):
        b.device.write(residual.data, start.tobytes())
        for group in groups:
            program = Program()
            for record in group:
                record(program)
            b.run(program, n)
        found.append([b.download(x, n) for x in (residual, normed, hidden)])
    for which, (one, all_at_once) in enumerate(zip(*found, strict=True)):
        assert np.isfinite(one).all()
        if n > 128:
            np.testing.assert_array_equal(all_at_once, one)
        elif which != 1:  # a norm between products of few rows may be made by them, so that codes near the middle go the other way, and leaves nothing to read behind the program
            assert np.linalg.norm(all_at_once - one) <= 0.15 * np.linalg.norm(one)


@pytest.mark.parametrize("n", [150, 256])
def test_a_layer_of_products_that_hand_norms_on_is_what_its_records_are(bench, rng, n):
    """Products large enough for tall tiles make the norms between them in halves, one run of records after the other, and round elsewhere."""
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, 600, 8, 8, 5, 3))
    if "fp8_e4m3" not in b.pack.description["formats"]:
        pytest.skip("this pack has no fp8_e4m3")
    m, f = 1024, 9728
    gain = [b.upload(1 + 0.2 * rng.standard_normal(m), abi.PK_F32) for _ in range(2)]
    o, gate, up, down, q = (scaled_fp8("fp8_e4m3", rows, cols, "block", rng).upload(b) for rows, cols in ((m, f), (f, m), (f, m), (m, f), (f, m)))
    before, _ = b.activations(rng.standard_normal((n, f)), T)
    start = (300 * rng.standard_normal((n, m)) * np.exp(rng.standard_normal((n, 1)))).astype(np.float32)

    def run(is_one: bool) -> list[np.ndarray]:
        residual, normed, hidden, y = b.upload(start, abi.PK_F32, T), b.output(n, m, T), b.output(n, f, T), b.output(n, f, T)
        programs = [Program() for _ in range(6)]
        at = [programs[0 if is_one else i] for i in range(6)]
        at[0].matmul(before, [o], residual, after=Epilogue(add=residual))
        at[1].norm(residual, gain[0], normed, 1e-5)
        at[2].matmul(normed, [gate, up], hidden, after=Epilogue(act="silu"))
        at[3].matmul(hidden, [down], residual, after=Epilogue(add=residual))
        at[4].norm(residual, gain[1], normed, 1e-5)
        at[5].matmul(normed, [q], y)
        for program in programs[: 1 if is_one else 6]:
            b.run(program, n)
        return [b.download(x, n) for x in (residual, y)]

    # Rows that differ by d before they are narrowed differ by the root of d times a code's step behind it: 1 % at first, then 4, then 6.
    for alone, joined, again, near in zip(run(False), run(True), run(True), (0.1, 0.15), strict=True):
        assert np.isfinite(alone).all()
        np.testing.assert_array_equal(joined, again)
        assert np.linalg.norm(joined - alone) <= near * np.linalg.norm(alone)
