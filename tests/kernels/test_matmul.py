"""Matrix products of every format at each instruction level against float64 numpy, and that a row does not know its company."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.formats.table import WEIGHT_FORMATS, by_name
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device
from paddock_runner.pack.program import Epilogue, Program
from paddock_runner.pack.tensor import S, T
from test_ops import act
from weights import grouped_fp4, random_weight, scaled_fp8

N_ROWS = (1, 2, 5, 8, 17, 40, 64, 130)
"""Rows of x: the borders of every path: dot products, few rows, tiles, halves and wholes of tiles."""

SHAPES = [(1, 32), (17, 96), (48, 256), (17, 576), (48, 896), (576, 288)]
PLAIN = ("f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2")
FOLDING = ("q2_k", "q3_k", "q6_k", "mxfp4", "nvfp4")
"""Scales go into the codes of AMX tiles: sums there come in another order."""


def tolerance(b, name, n_rows=1):
    """Allowed error as a share of |x| |w|: 15-bit activations, or f32 sums (two bf16 parts under AMX), or bf16 activations; many rows are
    narrowed to FP8 where the weights are: half a step of three bits is 2^-4 of a value."""
    if b.activation != abi.PK_F32:
        return 2**-4 if name == "fp8_e4m3" and n_rows > 16 else 1e-2
    return 1e-5 if name in PLAIN else 1e-4


def check(b, got, x, w, name):
    """got equals x w^T within what the format and the activations allow."""
    wanted = x @ w.T
    allowed = tolerance(b, name, len(x)) * np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None, :]
    if b.activation != abi.PK_F32:
        allowed = allowed + 2**-8 * np.abs(wanted)
    assert got.shape == wanted.shape
    assert not np.isnan(got).any()
    worst = np.max(np.abs(got - wanted) / allowed)
    assert worst <= 1, f"{got.shape}: error is {worst:.2f} of what is allowed"


def product(b, x, weights, n, biases=(), after=None, gap=0):
    """y of one record, for x as it is on the device; the output begins poisoned."""
    columns = weights[0].rows if after and after.act != "none" else sum(w.rows for w in weights)
    y = b.output(n, columns, T, gap)
    program = Program()
    program.matmul(x, weights, y, biases, after or Epilogue())
    b.run(program, n)
    return b.download(y, n)


@pytest.mark.parametrize("rows, cols, n", [((48, 48), 320, 1100), ((8,), 5120, 2049), ((32, 8, 88), 136, 1024)], ids=str)
def test_few_columns_of_many_rows_equal_numpy(bench, rng, rows, cols, n):
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, n, 8, 8, 5, 3))
    x, x64 = b.activations(rng.standard_normal((n, cols)), T, 8)
    weights = [random_weight("bf16", r, cols, rng) for r in rows]
    y = b.output(n, sum(rows), T, 2, abi.PK_F32)
    program = Program()
    program.matmul(x, [w.upload(b) for w in weights], y)
    b.run(program, n)
    check(b, b.download(y, n).astype(np.float64), x64, np.concatenate([w.values for w in weights]).astype(np.float64), "bf16")


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_product_equals_numpy(bench, rng, name):
    b = bench()
    if name not in b.pack.description["formats"]:
        pytest.skip(f"this pack has no {name}")
    for rows, cols in SHAPES:
        if cols % by_name(name).block_elements:
            continue
        weight = random_weight(name, rows, cols, rng)
        w = weight.upload(b)
        for n in N_ROWS:
            x, x64 = b.activations(rng.standard_normal((n, cols)), T, 3 if n % 2 else 0)
            check(b, product(b, x, [w], n, gap=5), x64, weight.values.astype(np.float64), name)


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_product_with_scaled_fp8_equals_numpy(bench, rng, kind):
    b = bench()
    weight = scaled_fp8("fp8_e4m3", 150, 320, kind, rng)
    w = weight.upload(b)
    for n in (1, 8, 20, 40):
        x, x64 = b.activations(rng.standard_normal((n, 320)), T)
        check(b, product(b, x, [w], n), x64, weight.values.astype(np.float64), weight.format)


@pytest.mark.parametrize("name, cols", [("nvfp4", 176), ("mxfp4", 160)])
def test_product_with_fp4_of_safetensors_equals_numpy(bench, rng, name, cols):
    b = bench()
    if name not in b.pack.description["formats"]:
        pytest.skip(f"this pack has no {name}")
    weight = grouped_fp4(name, 40, cols, rng)
    w = weight.upload(b)
    for n in (1, 7, 40):
        x, x64 = b.activations(rng.standard_normal((n, cols)), T)
        check(b, product(b, x, [w], n), x64, weight.values.astype(np.float64), name)


@pytest.mark.parametrize("n", [1, 6, 50])
def test_weights_side_by_side_of_different_formats_with_biases(bench, rng, n):
    b = bench()
    parts = [random_weight(f, rows, 256, rng) for f, rows in (("q4_k", 40), ("q8_0", 17), ("f16", 9))]
    biases = [rng.standard_normal(40).astype(np.float32), None, rng.standard_normal(9).astype(np.float32)]
    x, x64 = b.activations(rng.standard_normal((n, 256)), T)
    on_device = [None if v is None else b.upload(v, abi.PK_F32) for v in biases]
    got = product(b, x, [p.upload(b) for p in parts], n, on_device)
    at = 0
    for part, bias in zip(parts, biases, strict=True):
        piece = got[:, at : at + part.rows] - (0 if bias is None else bias)
        check(b, piece.astype(np.float64), x64, part.values.astype(np.float64), "q4_k")
        at += part.rows


@pytest.mark.parametrize("name, rows, cols, n", [("q4_k", (384, 130, 5), 512, 300), ("q8_0", (130, 130, 130), 1024, 600), ("q6_k", (256, 384, 384), 256, 2049), ("f16", (40, 300, 150), 136, 520)], ids=str)
def test_weights_side_by_side_of_many_rows_of_x(bench, rng, name, rows, cols, n):
    """Of formats that are unpacked panel by panel: several weights in a panel, a weight in two."""
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, n, 8, 8, 5, 3))
    parts = [random_weight(name, r, cols, rng) for r in rows]
    bias = rng.standard_normal(rows[1]).astype(np.float32)
    x, x64 = b.activations(rng.standard_normal((n, cols)), T)
    got = product(b, x, [p.upload(b) for p in parts], n, [None, b.upload(bias, abi.PK_F32), None], gap=3).astype(np.float64)
    got[:, rows[0] : rows[0] + rows[1]] -= bias
    check(b, got, x64, np.concatenate([p.values for p in parts]).astype(np.float64), name)


@pytest.mark.parametrize("n", [1, 8, 40])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize(
    "formats", [("q4_0", "q4_0"), ("q5_k", "q6_k"), ("bf16", "f32"), ("q4_1", "f16")], ids="-".join
)
def test_gated_product_equals_numpy(bench, rng, n, name, formats):
    b = bench()
    gate, up = (random_weight(f, 49, 256, rng) for f in formats)
    bias = rng.standard_normal(49).astype(np.float32)
    x, x64 = b.activations(rng.standard_normal((n, 256)) * 0.5, T)
    got = product(b, x, [gate.upload(b), up.upload(b)], n, [b.upload(bias, abi.PK_F32), None], Epilogue(act=name))
    g, u = x64 @ gate.values.T.astype(np.float64) + bias, x64 @ up.values.T.astype(np.float64)
    allowed = [1e-4 * np.outer(np.linalg.norm(x64, axis=1), np.linalg.norm(w.values, axis=1)) for w in (gate, up)]
    error = 1.2 * allowed[0] * np.abs(u) + np.abs(act(g, name)) * allowed[1] + 1e-6 * np.abs(u * g)
    if b.activation != abi.PK_F32:
        error = 100 * error + 2**-8 * np.abs(act(g, name) * u)
    assert (np.abs(got - act(g, name) * u) <= error).all()


@pytest.mark.parametrize("n", [1, 7, 33])
@pytest.mark.parametrize("name", ["q4_0", "bf16"])
@pytest.mark.parametrize("added", ["nothing", "beside", "in place"])
def test_scale_cap_and_addend_come_in_this_order(bench, rng, n, name, added):
    b = bench()
    weight = random_weight(name, 35, 96, rng)
    x, x64 = b.activations(rng.standard_normal((n, 96)) * 4, T)
    other, other64 = b.activations(rng.standard_normal((n, 35)), T)
    y = other if added == "in place" else b.output(n, 35, T)
    program = Program()
    program.matmul(
        x, [weight.upload(b)], y, (), Epilogue(add=None if added == "nothing" else other, scale=0.7, softcap=3.0)
    )
    b.run(program, n)
    wanted = 3 * np.tanh(x64 @ weight.values.T.astype(np.float64) * 0.7 / 3) + (0 if added == "nothing" else other64)
    np.testing.assert_allclose(b.download(y, n), wanted, atol=2e-3 if b.activation == abi.PK_F32 else 4e-2)


@pytest.mark.parametrize("n", [20, 33, 64, 65, 100, 128, 140])
@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "q8_0", "q6_k"])
def test_logits_of_many_sampled_rows_equal_numpy(bench, rng, name, n):
    """How many rows a step samples, only the device knows: every kernel of the ladder looks whether they are its own."""
    b = bench(sizes=StateSizes(160, 256, 16, 200, 100, 256, 160, 8, 5, 3))
    if name not in b.pack.description["formats"]:
        pytest.skip(f"this pack has no {name}")
    cols = 1024 if name == "q6_k" else 640
    weight = scaled_fp8(name, 1088, cols, "block", rng) if name == "fp8_e4m3" else random_weight(name, 1088, cols, rng)
    x, x64 = b.activations(rng.standard_normal((n, cols)), S)
    y = b.output(n, 1088, S, format=abi.PK_F32)
    program = Program()
    program.matmul(x, [weight.upload(b)], y)
    b.run(program, 1, n)
    check(b, b.download(y, n).astype(np.float64), x64, weight.values.astype(np.float64), name)


def test_no_rows_write_nothing(bench, rng):
    b = bench()
    weight = random_weight("q4_0", 16, 32, rng)
    x, _ = b.activations(rng.standard_normal((4, 32)), S)
    y = b.output(4, 16, S)
    program = Program()
    program.matmul(x, [weight.upload(b)], y)
    b.run(program, 1, 0)
    assert np.isnan(b.download(y, 4)).all()


@pytest.mark.parametrize("name", ["q4_k", "q8_0", "q6_k", "f16"])
def test_activations_with_outliers_zeros_and_tiny_rows_keep_their_precision(bench, rng, name):
    b = bench()
    weight = random_weight(name, 40, 512, rng)
    w = weight.upload(b)
    for n in (1, 8, 40):
        values = rng.standard_normal((n, 512))
        values[0, 100] = 3e4
        values[n // 2] *= 1e-20 if n > 1 else 1
        values[n - 1, 256:] = 0
        x, x64 = b.activations(values, T)
        check(b, product(b, x, [w], n), x64, weight.values.astype(np.float64), name)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["q4_1", "q6_k", "q8_0", "bf16", "f32"])
def test_a_row_that_is_not_finite_says_so_and_leaves_others_alone(bench, rng, name, bad):
    b = bench()
    weight = random_weight(name, 20, 512, rng)
    w = weight.upload(b)
    for n in (1, 4, 8, 40):
        values = rng.standard_normal((n, 512))
        values[0, 300] = bad
        x, _ = b.activations(values, T)
        got = product(b, x, [w], n)
        assert not np.isfinite(got[0]).any()
        assert np.isfinite(got[1:]).all()


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_row_alone_equals_the_row_in_company(bench, rng, name):
    b = bench()
    if b.pack.description["pack"] != "cpu":
        pytest.skip("the CPU pack's promise")
    cols = 1024 if by_name(name).block_elements > 32 else 864
    weight = random_weight(name, 50, cols, rng)
    w, values = weight.upload(b), rng.standard_normal((130, cols))
    alone = product(b, b.activations(values[:1], T)[0], [w], 1)[0]
    norm = np.linalg.norm(values[0]) * np.linalg.norm(weight.values, axis=1)
    for n in (2, 3, 5, 9, 31, 33, 130):
        got = product(b, b.activations(values[:n], T)[0], [w], n)[0]
        if name in PLAIN + FOLDING:
            assert np.max(np.abs(got - alone) / norm) < (4e-6 if name in PLAIN else 1e-7)
        else:
            np.testing.assert_array_equal(got, alone)


@pytest.mark.parametrize("name", [f for f in WEIGHT_FORMATS if f not in PLAIN + FOLDING])
def test_every_instruction_level_gives_the_same_bits(pack, rng, name):
    if pack.description["pack"] != "cpu":
        pytest.skip("levels are the CPU pack's")
    from harness import Bench

    cols = 512
    weight, values = random_weight(name, 33, cols, rng), rng.standard_normal((40, cols))
    found = {}
    for wanted in (1, 2, 3):
        probe = Device(pack, 0, 1, wanted)
        arch = probe.facts.arch
        probe.close()
        if arch in found:
            continue
        b = Bench(pack, wanted)
        found[arch] = product(b, b.activations(values, T)[0], [weight.upload(b)], 40)
        b.close()
    for other in list(found.values())[1:]:
        np.testing.assert_array_equal(other, next(iter(found.values())))


@pytest.mark.parametrize("name", ["f32", "bf16", "q8_0"])
def test_rows_shared_out_among_many_threads_are_all_written_once(bench, rng, name):
    b = bench(n_threads=8)
    for rows, cols, n in ((1, 32, 130), (16, 896, 200), (33, 320, 250)):
        weight = random_weight(name, rows, cols, rng)
        w = weight.upload(b)
        x, x64 = b.activations(rng.standard_normal((n, cols)), T)
        for _ in range(3):
            check(b, product(b, x, [w], n), x64, weight.values.astype(np.float64), name)


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "q4_k"])
def test_tiles_that_do_not_fill_the_device_are_cut_along_k(bench, rng, name):
    b = bench()
    weights = [random_weight(name, rows, 2304, rng) for rows in (272, 40, 33)]
    on_device = [w.upload(b) for w in weights]
    exact = np.concatenate([w.values for w in weights]).astype(np.float64)
    for n in (50, 131, 256):
        x, x64 = b.activations(rng.standard_normal((n, 2304)) * 0.1, T)
        check(b, product(b, x, on_device, n), x64, exact, name)
        got = product(b, x, [on_device[0], on_device[0]], n, (), Epilogue(act="gelu_tanh"))
        u = x64 @ weights[0].values.T.astype(np.float64)
        allowed = tolerance(b, name, n) * np.outer(
            np.linalg.norm(x64, axis=1), np.linalg.norm(weights[0].values, axis=1)
        )
        assert (
            np.abs(got - act(u, "gelu_tanh") * u)
            <= 2.2 * allowed * np.abs(u) + 1.3 * allowed**2 + 2**-8 * np.abs(act(u, "gelu_tanh") * u) + 1e-6
        ).all()


@pytest.mark.parametrize("n", [129, 193, 256])
@pytest.mark.parametrize("names", [("q4_k", "q4_k"), ("q5_k", "q5_k"), ("q6_k", "q6_k"), ("q8_0", "q8_0"), ("q4_k", "q6_k")], ids="-".join)
def test_block_formats_by_more_than_a_tile_of_rows_equal_numpy_and_themselves(bench, rng, names, n):
    """One row, half of a tile and a whole one behind the first 128, by K that is dealt out in a cluster and by less."""
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, 300, 8, 8, 5, 3))
    for cols in (1280, 256):
        weights = [random_weight(name, rows, cols, rng, size=1 / 64) for name, rows in zip(names, (416, 104), strict=True)]
        w = [weight.upload(b) for weight in weights]
        exact = np.concatenate([weight.values for weight in weights]).astype(np.float64)
        x, x64 = b.activations(rng.standard_normal((n, cols)), T)
        start = rng.standard_normal((n, 416)).astype(np.float32)
        seen = []
        for _ in range(2):
            residual, program = b.upload(start, abi.PK_F32, T), Program()
            program.matmul(x, [w[0]], residual, (), Epilogue(add=residual))
            b.run(program, n)
            seen.append((product(b, x, w, n, gap=3), b.download(residual, n), product(b, x, [w[0], w[0]], n, (), Epilogue(act="silu"))))
        for first, second in zip(*seen, strict=True):
            np.testing.assert_array_equal(first, second)
        side, residual, gated = (a.astype(np.float64) for a in seen[0])
        check(b, side, x64, exact, names[0])
        check(b, residual - start, x64, exact[:416], names[0])
        g = x64 @ exact[:416].T
        allowed = tolerance(b, names[0], n) * np.outer(np.linalg.norm(x64, axis=1), np.linalg.norm(exact[:416], axis=1))
        assert (np.abs(gated - act(g, "silu") * g) <= 2.2 * allowed * np.abs(g) + 1.3 * allowed**2 + 2**-8 * np.abs(act(g, "silu") * g) + 1e-6).all()


@pytest.mark.parametrize("n_tiles", [1, 4, 5, 6, 7, 11, 14, 15, 16])
def test_fp8_by_few_rows_with_every_number_of_tiles_a_block_equals_numpy_and_itself(bench, rng, n_tiles):
    """A block, or two, have so many tiles of 16 rows, or of eight of gate and up, most of them; K ends within what a block takes at once."""
    b = bench()
    if b.pack.description["pack"] == "cpu":
        pytest.skip("a GPU shares weights out among its processors")
    n_processors = b.device.facts.n_processors
    blocks = n_processors // 2
    weight = scaled_fp8("fp8_e4m3", 16 * (blocks * (n_tiles - 1) + blocks // 3 + 1), 640, "block", rng)
    gate, up = (scaled_fp8("fp8_e4m3", 8 * (n_processors * (n_tiles - 1) + n_processors // 3 + 1), 640, "block", rng) for _ in range(2))
    w, sides = weight.upload(b), [gate.upload(b), up.upload(b)]
    for n in (3, 8, 9, 16):
        x, x64 = b.activations(rng.standard_normal((n, 640)), T)
        start = rng.standard_normal((n, weight.rows)).astype(np.float32)
        seen = []
        for _ in range(2):
            residual, program = b.upload(start, abi.PK_F32, T), Program()
            program.matmul(x, [w], residual, (), Epilogue(add=residual))
            b.run(program, n)
            seen.append((product(b, x, [w], n), b.download(residual, n), product(b, x, sides, n, (), Epilogue(act="silu"))))
        for first, second in zip(*seen, strict=True):
            np.testing.assert_array_equal(first, second)
        plain, added, gated = (a.astype(np.float64) for a in seen[0])
        check(b, plain, x64, weight.values.astype(np.float64), "fp8_e4m3")
        check(b, added - start, x64, weight.values.astype(np.float64), "fp8_e4m3")
        g, u = (x64 @ side.values.T.astype(np.float64) for side in (gate, up))
        sizes = [1e-2 * np.outer(np.linalg.norm(x64, axis=1), np.linalg.norm(side.values, axis=1)) for side in (gate, up)]
        error = 1.2 * sizes[0] * np.abs(u) + np.abs(act(g, "silu")) * sizes[1] + 1.2 * sizes[0] * sizes[1] + 2**-7 * np.abs(act(g, "silu") * u) + 1e-6
        assert (np.abs(gated - act(g, "silu") * u) <= error).all()


@pytest.mark.parametrize(("n", "most"), [(129, 129), (250, 250), (400, 400), (513, 640), (640, 640), (705, 768), (1000, 1024), (1100, 1536)])
def test_tall_tiles_cut_along_k_equal_numpy_and_themselves(bench, rng, n, most):
    """Of launches made for `most` rows."""
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, most, 8, 8, 5, 3))
    weights = [random_weight("bf16", rows, 4104, rng, size=1 / 64) for rows in (2048, 64)]
    w = [weight.upload(b) for weight in weights]
    exact = np.concatenate([weight.values for weight in weights]).astype(np.float64)
    bias = rng.standard_normal(2112).astype(np.float32)
    biases = [b.upload(bias[:2048], abi.PK_F32), b.upload(bias[2048:], abi.PK_F32)]
    x, x64 = b.activations(rng.standard_normal((n, 4104)), T)
    start = rng.standard_normal((n, 2048)).astype(np.float32)
    seen = []
    for _ in range(2):
        side, residual, program = b.output(n, 2112, T, 0, abi.PK_F32), b.upload(start, abi.PK_F32, T), Program()
        program.matmul(x, w, side, biases)
        program.matmul(x, [w[0]], residual, (), Epilogue(add=residual))
        b.run(program, n)
        seen.append((b.download(side, n), b.download(residual, n), product(b, x, w, n)))
    for first, second in zip(*seen, strict=True):
        np.testing.assert_array_equal(first, second)
    check(b, seen[0][0].astype(np.float64) - bias, x64, exact, "bf16")
    check(b, seen[0][1].astype(np.float64) - start, x64, exact[:2048], "bf16")
    check(b, seen[0][2], x64, exact, "bf16")


@pytest.mark.parametrize("act_name", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("n", "most"), [(140, 140), (330, 330), (580, 640), (900, 1024)])
def test_tall_tiles_of_gate_and_up_equal_numpy(bench, rng, n, most, act_name):
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, most, 8, 8, 5, 3))
    gate, up = (random_weight("bf16", 4224, 1032, rng, size=1 / 32) for _ in range(2))
    x, x64 = b.activations(rng.standard_normal((n, 1032)), T)
    got = product(b, x, [gate.upload(b), up.upload(b)], n, (), Epilogue(act=act_name))
    wanted = act(x64 @ gate.values.T.astype(np.float64), act_name) * (x64 @ up.values.T.astype(np.float64))
    assert np.abs(got - wanted).max() < 2e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_many_rows_through_fp4_lose_no_more_than_through_fp8(bench, rng, name):
    b = bench()
    gate, up = (random_weight(name, 150, 320, rng) for _ in range(2))
    w = [gate.upload(b), up.upload(b)]
    plain = rng.standard_normal((200, 320))
    plain[3] *= 1e-12
    plain[5] *= 1e12
    plain[9, 64:] = 0
    uneven = plain.copy()
    uneven[:, 7] *= 300
    for values, n_after, limit in ((plain, 0, 3e-2), (uneven, 0, 2**-4), (plain, 1, 2**-3)):
        x, x64 = b.activations(values, T)
        g, u = (x64 @ v.values.T.astype(np.float64) for v in (gate, up))
        got = product(b, x, w, 200, (), Epilogue(act="gelu_tanh") if n_after else None, gap=3)
        wanted = act(g, "gelu_tanh") * u if n_after else np.concatenate([g, u], 1)
        off = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert off.max() < limit, (off.max(), off.argmax())
    plain[11, 33] = np.nan
    got = product(b, b.activations(plain, T)[0], w, 200)
    assert np.isnan(got[11]).all() and np.isfinite(np.delete(got, 11, 0)).all()
