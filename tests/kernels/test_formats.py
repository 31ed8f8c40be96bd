"""Packed weights: their size is what the plan says, no bit of them is lost, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.errors import PackError, UnsupportedError
from paddock_runner.formats import cuda
from paddock_runner.formats.table import WEIGHT_FORMATS, by_name, packed_bytes
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Program
from paddock_runner.pack.tensor import T
from weights import grouped_fp4, random_weight, scaled_fp8

SHAPES = [(1, 32), (17, 96), (48, 256), (33, 576), (16, 896), (5, 1024)]


def supported(b, name):
    if name not in b.pack.description["formats"]:
        pytest.skip(f"this pack has no {name}")


def shapes_of(name):
    return [(rows, cols) for rows, cols in SHAPES if cols % by_name(name).block_elements == 0]


def looked_up(bench, weight, **how):
    """Every row of a packed matrix, through the embedding op of a model with as many tokens; skips what the pack has not."""
    b = bench(sizes=StateSizes(1, 256, 16, 17, weight.rows, 256, 1))
    supported(b, weight.format)
    table = weight.upload(b, **how)
    out = b.output(weight.rows, weight.cols, T)
    b.set_rows([(0, 0, weight.rows)])
    b.set("token_id", np.arange(weight.rows))
    program = Program()
    program.embed(table, out)
    b.run(program, weight.rows)
    return b.download(out, weight.rows), b.activation == abi.PK_F32


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_packed_size_is_what_the_plan_says(bench, name):
    b = bench()
    if name not in b.pack.description["formats"]:
        pytest.skip(f"{name} has no kernels in this pack")
    formula = packed_bytes if b.pack.description["pack"] == "cpu" else cuda.packed_bytes
    for rows, cols in shapes_of(name):
        source = abi.pk_source(0, rows * by_name(name).row_bytes(cols), rows, cols, by_name(name).id, global_scale=1.0)
        assert b.device.packed_bytes(source) == formula(name, rows, cols)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_rows_come_back_bit_for_bit(bench, rng, name):
    for rows, cols in shapes_of(name):
        weight = random_weight(name, rows, cols, rng)
        got, is_exact = looked_up(bench, weight)
        if is_exact:
            np.testing.assert_array_equal(got, weight.values)
        else:
            np.testing.assert_allclose(got, weight.values, rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_parts_of_rows_become_what_the_whole_does(bench, rng, name, is_pinned):
    weight = random_weight(name, 250, 512, rng)
    whole, parts = looked_up(bench, weight)[0], looked_up(bench, weight, part_rows=128, is_pinned=is_pinned)[0]
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("make", [lambda rng: scaled_fp8("fp8_e4m3", 250, 300, "block", rng), lambda rng: scaled_fp8("fp8_e4m3", 250, 300, "row", rng), lambda rng: grouped_fp4("nvfp4", 250, 64, rng), lambda rng: grouped_fp4("mxfp4", 250, 96, rng)])
def test_parts_take_their_own_scales(bench, rng, make, is_pinned):
    weight = make(rng)
    whole, parts = looked_up(bench, weight)[0], looked_up(bench, weight, part_rows=128, is_pinned=is_pinned)[0]
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize("first, n", [(100, 128), (128, 100), (0, 400), (256, 128), (-128, 128), (0, -1)])
def test_a_part_that_is_none_is_refused_with_its_rows(bench, rng, first, n):
    b = bench()
    weight = random_weight("bf16", 300, 256, rng)
    source = weight.source()
    n_bytes = b.device.packed_bytes(source)
    source.first_row, source.part_rows = first, n
    with pytest.raises(PackError, match=f"rows {first} to {first + n} of 300 are no part"):
        b.device.repack(source, b.device.alloc(n_bytes, "weight"), n_bytes)


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_scales_beside_fp8_reach_every_element(bench, rng, name, kind):
    weight = scaled_fp8(name, 150, 300, kind, rng)
    got, is_exact = looked_up(bench, weight)
    np.testing.assert_allclose(got, weight.values, rtol=1e-6 if is_exact else 2**-8, atol=1e-30)


@pytest.mark.parametrize("name, cols", [("nvfp4", 64), ("nvfp4", 48), ("mxfp4", 96)])
def test_fp4_of_safetensors_reaches_every_element(bench, rng, name, cols):
    weight = grouped_fp4(name, 21, cols, rng)
    got, is_exact = looked_up(bench, weight)
    np.testing.assert_allclose(got, weight.values, rtol=1e-6 if is_exact else 2**-8, atol=1e-30)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"format": 99}, "no kernel for format 99; it has them for f32, f16"),
        ({"format": abi.PK_I32}, "no kernel for i32"),
        ({"n_bytes": 33}, "takes 34 bytes, there are 33"),
        ({"cols": 33}, "rows of 33 elements"),
        ({"rows": 0}, "0 rows of 32 columns"),
        ({"offset": 1.0}, "an offset of 1"),
        ({"global_scale": 2.0}, "a scale of 2"),
        ({"scales": abi.PK_SCALES_ROW}, "scales of kind 2 beside format q8_0"),
        (
            {"format": abi.PK_FP8_E4M3, "n_bytes": 32, "scales": abi.PK_SCALES_ROW, "scale_rows": 3, "scale_cols": 1},
            "needs 1 x 1",
        ),
    ],
)
def test_source_that_does_not_fit_is_refused_by_name(bench, change, sentence):
    b = bench()
    if b.pack.description["pack"] != "cpu":
        pytest.skip("the sentences are the CPU pack's")
    source = abi.pk_source(0, 34, 1, 32, abi.PK_Q8_0, global_scale=1.0)
    for field, value in change.items():
        setattr(source, field, value)
    with pytest.raises((PackError, UnsupportedError), match=sentence):
        b.device.packed_bytes(source)


def test_repack_into_the_wrong_number_of_bytes_is_refused_with_both(bench, rng):
    b = bench()
    if b.pack.description["pack"] != "cpu":
        pytest.skip("the sentences are the CPU pack's")
    weight = random_weight("q4_0", 4, 64, rng)
    address = b.device.alloc(4096, "weight")
    with pytest.raises(PackError, match="1000 bytes for the packed matrix, it takes 576"):
        b.device.repack(weight.source(), address, 1000)
