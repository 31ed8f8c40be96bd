"""Contexts opened for it (is_invariant): a row's numbers are bit for bit what they are alone, whatever else a step has and wherever a prompt was cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import test_delta
import test_mamba
from harness import Bench, rounded, to_bf16
from paddock_runner.errors import UnsupportedError
from paddock_runner.formats.table import WEIGHT_FORMATS, by_name
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.library import Pack
from paddock_runner.pack.program import Epilogue, Heads, MambaShape, MambaWeights, Program, Rotation, Stacks, View
from paddock_runner.pack.tensor import S, T
from test_experts import stack_of
from test_matmul import check
from weights import random_weight, scaled_fp8

COMPANY = (1, 2, 3, 8, 17, 32, 33, 64, 65, 127, 128, 129)
"""Rows of a step, every width of a launch and one more."""
N_ROWS = 300


@pytest.fixture
def bench(pack: Pack) -> Iterator[Callable[..., Bench]]:
    """Makes benches of that kind; closes them."""
    made: list[Bench] = []

    def make(**options: object) -> Bench:
        made.append(Bench(pack, is_invariant=True, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


SIZES = StateSizes(8, 512, 16, 8, 100, 512, 160, 8, 3, 3)


def product(b, w, values, rows=T, after=None, biases=(), old=None):
    """y of one record in f32, for these rows of x."""
    n = len(values)
    columns = w[0].rows if after is not None and after.act != "none" else sum(x.rows for x in w)
    x, _ = b.activations(values, rows)
    y = b.output(n, columns, rows, format=abi.PK_F32)
    program = Program()
    if old is not None:
        after = Epilogue(after.act if after else "none", add=b.upload(old, abi.PK_F32, rows))
    program.matmul(x, w, y, biases, after or Epilogue())
    b.run(program, n, n if rows == S else 0)
    return b.download(y, n)


@pytest.mark.parametrize("name", [f for f in WEIGHT_FORMATS if f != "q4_z"])
def test_product_of_a_row_is_the_same_in_any_company(bench, rng, name):
    b = bench(sizes=SIZES)
    if name not in b.pack.description["formats"]:
        pytest.skip(f"this pack has no {name}")
    for n_out, cols in ((33, 512), (1100, 1024)):
        weight, values = random_weight(name, n_out, cols, rng), rng.standard_normal((N_ROWS, cols))
        w = [weight.upload(b)]
        whole = product(b, w, values)
        check(b, whole, rounded(values, b.activation), weight.values.astype(np.float64), name)
        for n in COMPANY:
            first = int(rng.integers(0, N_ROWS - n + 1))
            np.testing.assert_array_equal(product(b, w, values[first : first + n]), whole[first : first + n], err_msg=f"{n_out} x {cols}, {n} rows")


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "q4_k", "q8_0"])
def test_sampled_rows_gates_and_sums_are_the_same_in_any_company(bench, rng, name):
    b, cols = bench(sizes=SIZES), 512
    w = [random_weight(name, 200, cols, rng).upload(b) for _ in range(2)]
    values, old = rng.standard_normal((150, cols)) * 0.3, rng.standard_normal((150, 400)).astype(np.float32)
    bias = [b.upload(rng.standard_normal(200).astype(np.float32), abi.PK_F32), None]
    runs = {
        "sampled": lambda part: product(b, w, values[part], S),
        "gated": lambda part: product(b, w, values[part], T, Epilogue(act="silu"), bias),
        "added": lambda part: product(b, w, values[part], T, None, bias, old[part]),
    }
    for what, run in runs.items():
        whole = run(slice(0, 150))
        for n in (1, 2, 7, 31, 64, 127):
            first = int(rng.integers(0, 150 - n + 1))
            np.testing.assert_array_equal(run(slice(first, first + n)), whole[first : first + n], err_msg=f"{what}, {n} rows")


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_product_with_scales_beside_is_the_same_in_any_company(bench, rng, kind):
    b, values = bench(sizes=SIZES), rng.standard_normal((N_ROWS, 640))
    w = [scaled_fp8("fp8_e4m3", 300, 640, kind, rng).upload(b)]
    whole = product(b, w, values)
    for n in COMPANY:
        np.testing.assert_array_equal(product(b, w, values[-n:]), whole[-n:], err_msg=f"{n} rows")


@pytest.mark.parametrize("cols", [96, 1024, 4096])
def test_norms_and_gates_of_a_row_are_the_same_in_any_company(bench, rng, cols):
    b, values = bench(sizes=SIZES), rng.standard_normal((N_ROWS, 2 * cols))
    w = [b.upload(rng.standard_normal(cols), abi.PK_F32) for _ in range(2)]

    def run(part: slice) -> np.ndarray:
        n = len(values[part])
        x, residual = (b.activations(v, T)[0] for v in (values[part, :cols], values[part, cols:]))
        both, _ = b.activations(values[part], T)
        out, gated = (b.output(n, cols, T, format=abi.PK_F32) for _ in range(2))
        program = Program()
        program.norm(x, w[0], out, 1e-5, residual, w[1])
        program.gate(both, gated, "silu")
        b.run(program, n)
        return np.concatenate([b.download(t, n) for t in (out, gated, residual)], 1)

    whole = run(slice(0, N_ROWS))
    for n in (1, 2, 31, 64, 65, 127):
        np.testing.assert_array_equal(run(slice(n, 2 * n)), whole[n : 2 * n], err_msg=f"{n} rows")


@pytest.mark.parametrize("name", [f for f in WEIGHT_FORMATS if f != "q4_z"])
def test_an_embedding_is_the_same_in_any_company(bench, rng, name):
    b, cols = bench(sizes=SIZES), 512
    if name not in b.pack.description["formats"]:
        pytest.skip(f"this pack has no {name}")
    table, ids = random_weight(name, 100, cols, rng).upload(b), rng.integers(0, 100, 200)

    def run(part: slice) -> np.ndarray:
        n = len(ids[part])
        b.set("token_id", ids[part])
        out, program = b.output(n, cols, T, format=abi.PK_F32), Program()
        program.embed(table, out, 0.7)
        b.run(program, n)
        return b.download(out, n)

    whole = run(slice(0, 200))
    for n in (1, 2, 8, 9, 65):
        np.testing.assert_array_equal(run(slice(n, 2 * n)), whole[n : 2 * n], err_msg=f"{n} rows")


CTX, PAGE, SLOTS = 2048, 16, 40
STEPS = {
    "alone": [[(0, p, 1)] for p in (0, 15, 511, 512, 700, 1023, 1024, 1500)] + [[(1, 1999, 1)]],
    "decode": [[(0, 700, 1), *((s, 97 * s % 2000, 1) for s in range(1, 32))], [(s, 40 * s + 3, 1) for s in range(1, 40)] + [(0, 1024, 1)]],
    "whole": [[(0, 0, 1501)]],
    "chunks": [[(0, 0, 512), (1, 1990, 10)], [(0, 512, 188), (2, 300, 1)], [(2, 0, 301), (0, 700, 330)], [(3, 5, 1), (0, 1030, 471)]],
    "guesses": [[(0, 509, 5), (1, 1998, 3)], [(3, 100, 3), (0, 1020, 9), (4, 1000, 2)]],
}
"""Rows (slot, first position, tokens) of steps in which the same tokens are asked for in other ways."""


def attend(b, rows, table, queries, heads, view, sinks):
    """Outputs by (slot, position) of one step."""
    n = b.set_rows(rows)
    b.set("page_table", table)
    values = np.concatenate([queries[(977 * slot + p + np.arange(count)) % len(queries)] for slot, p, count in rows])
    q, _ = b.activations(values, T)
    out = b.output(n, heads.n_heads * heads.v_width, T, format=abi.PK_F32)
    program = Program()
    program.attention(q, out, heads, heads.head_width**-0.5, view, 20.0 if sinks else 0.0, sinks)
    b.run(program, n, len(rows))
    places = [(slot, p + i) for slot, p, count in rows for i in range(count)]
    return dict(zip(places, b.download(out, n), strict=True))


@pytest.mark.parametrize(
    "kv_name, shape, window",
    [
        ("bf16", (8, 2, 128), 0), ("bf16", (8, 2, 128), 200), ("fp8_e4m3", (8, 2, 128), 0), ("f32", (8, 2, 128), 200),
        ("bf16", (8, 2, 64), 0), ("fp8_e4m3", (8, 2, 64), 200), ("bf16", (6, 6, 96), 200), ("f32", (4, 1, 256), 0), ("bf16", (4, 1, 256), 200),
    ],
    ids=str,
)  # fmt: skip
def test_attention_of_a_token_is_the_same_in_any_company_and_chunk(bench, pack, rng, kv_name, shape, window):
    (n_heads, n_kv, width), kv_format = shape, by_name(kv_name).id
    element = by_name(kv_name).block_bytes
    k_bytes, n_pages = n_kv * PAGE * width * element, 150
    b = bench(sizes=StateSizes(SLOTS, CTX, PAGE, n_pages, 100, CTX, 64, 8, 3, 3), page_bytes=2 * k_bytes)
    if kv_name not in b.pack.description["kv_formats"]:
        pytest.skip(f"this pack has no keys in {kv_name}")
    numbers = rng.standard_normal((n_pages, 2 * k_bytes // element)).astype(np.float32)
    if kv_format == abi.PK_FP8_E4M3:
        raw = rng.integers(0, 0x78, numbers.shape).astype(np.uint8) | (rng.integers(0, 2, numbers.shape).astype(np.uint8) << 7)
    else:
        raw = to_bf16(numbers) if kv_format == abi.PK_BF16 else numbers
    b.device.write(b.device.kv_address, raw.tobytes())
    table = rng.integers(1, n_pages, (SLOTS, CTX // PAGE)).astype(np.int32)
    queries = rng.standard_normal((3001, n_heads * width)).astype(np.float32) * (0.02 if kv_format == abi.PK_FP8_E4M3 else 1)
    heads = Heads(n_heads, n_kv, width, width, 0, k_bytes, kv_format)
    other = Bench(pack, page_bytes=2 * k_bytes, sizes=b.sizes)
    other.device.write(other.device.kv_address, raw.tobytes())
    sunk = rng.standard_normal(n_heads)
    sinks = b.upload(sunk, abi.PK_F32) if window else None
    seen = {}
    for name, steps in STEPS.items():
        for rows in steps:
            for place, got in attend(b, rows, table, queries, heads, View(window), sinks).items():
                assert np.isfinite(got).all(), (name, place)
                first, before = seen.setdefault(place, (name, got))
                np.testing.assert_array_equal(got, before, err_msg=f"{place}: {name} and {first}")
    others = None if sinks is None else other.upload(sunk, abi.PK_F32)
    for rows in (STEPS["whole"][0], STEPS["decode"][0]):
        for place, wanted in attend(other, rows, table, queries, heads, View(window), others).items():
            np.testing.assert_allclose(seen[place][1], wanted, rtol=0, atol=2e-2 * np.abs(wanted).max(), err_msg=f"{place} and where others count")
    other.close()


@pytest.mark.parametrize("shape", [(16, 8, 128), (8, 2, 64)], ids=str)
def test_heads_of_a_token_are_the_same_however_its_row_is_cut(bench, rng, shape):
    """Queries, and keys and values in their pages, of 600 tokens: normed and turned."""
    (n_heads, n_kv, width), n = shape, 600
    k_bytes = n_kv * PAGE * width * 2
    b = bench(sizes=StateSizes(8, CTX, PAGE, 150, 100, 640, 64, 8, 3, 3), page_bytes=2 * k_bytes)
    heads = Heads(n_heads, n_kv, width, width, 0, k_bytes, abi.PK_BF16)
    values = rng.standard_normal((n, (n_heads + 2 * n_kv) * width))
    norms = tuple(b.upload(1 + 0.2 * rng.standard_normal(width), abi.PK_F32) for _ in range(2))
    rope = Rotation(b.upload((1 / 10000 ** (np.arange(width // 2) / (width // 2))).astype(np.float32), abi.PK_F32), width, "neox", 1.0)
    b.scatter_pages(rng)

    def run(cuts: list[int]) -> tuple[np.ndarray, bytes]:
        found = []
        b.device.fill(b.device.kv_address, 0, 150 * 2 * k_bytes)
        for first, end in zip([0, *cuts], [*cuts, n], strict=True):
            b.set_rows([(0, first, end - first)])
            x, _ = b.activations(values[first:end], T)
            q = b.output(end - first, n_heads * width, T, format=abi.PK_F32)
            program = Program()
            program.qkv(x, q, heads, norms, rope, 1e-6)
            b.run(program, end - first)
            found.append(b.download(q, end - first))
        return np.concatenate(found), b.device.read(b.device.kv_address, 150 * 2 * k_bytes)

    whole, pages = run([])
    assert np.isfinite(whole).all() and any(pages)
    for cuts in ([1, 2, 5, 40, 300], [17, 320], [256, 257], list(range(8, n, 37))):
        queries, others = run(cuts)
        np.testing.assert_array_equal(queries, whole, err_msg=str(cuts))
        assert others == pages, cuts


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "q8_0", "q4_k"])
def test_experts_of_a_token_are_the_same_in_any_company(bench, rng, name):
    b, m, f, n_experts, k = bench(sizes=SIZES), 256, 256, 6, 2
    if name not in b.pack.description["formats"]:
        pytest.skip(f"this pack has no {name}")
    stacks = Stacks(*(stack_of(b, [random_weight(name, rows, cols, rng) for _ in range(n_experts)]) for rows, cols in ((f, m), (f, m), (m, f))), n_experts)
    values, ids = rng.standard_normal((N_ROWS, m)) * 0.3, np.array([rng.permutation(n_experts)[:k] for _ in range(N_ROWS)])
    factors, old = rng.random((N_ROWS, k)).astype(np.float32), rng.standard_normal((N_ROWS, m)).astype(np.float32)

    def run(part: slice) -> np.ndarray:
        n = len(values[part])
        x, _ = b.activations(values[part], T)
        y, program = b.output(n, m, T, format=abi.PK_F32), Program()
        program.experts(x, (b.upload(ids[part], abi.PK_I32, T), b.upload(factors[part], abi.PK_F32, T)), stacks, y, Epilogue(add=b.upload(old[part], abi.PK_F32, T)))
        b.run(program, n)
        return b.download(y, n)

    whole = run(slice(0, N_ROWS))
    for n in (1, 2, 7, 31, 64, 127, 200):
        first = int(rng.integers(0, N_ROWS - n + 1))
        np.testing.assert_array_equal(run(slice(first, first + n)), whole[first : first + n], err_msg=f"{n} rows")


CUTS = {"whole": [90], "steps": [1] * 90, "mixed": [1, 7, 64, 2, 1, 15]}


def cut(b, width, run, slot_bytes, rng):
    """The outputs of 90 tokens, and a slot's memory after them, however they are cut and whoever is beside them."""
    inputs, found = rng.standard_normal((90, width)), {}
    for name, counts in CUTS.items():
        b.device.fill(b.state.recurrent, 0, 8 * slot_bytes)
        outputs, at = [], 0
        for i, count in enumerate(counts):
            others = [(slot, 0, 1 + (i + slot) % 5) for slot in range(2, 2 + i % 4)] if name != "whole" else []
            rows = [*others[:1], (1, at, count), *others[1:]]
            n = b.set_rows(rows)
            first = sum(r[2] for r in others[:1])
            values = rng.standard_normal((n, width))
            values[first : first + count] = inputs[at : at + count]
            outputs.append(run(values, n)[first : first + count])
            at += count
        found[name] = np.concatenate(outputs), b.device.read(b.state.recurrent + slot_bytes, slot_bytes)
    for name, (out, memory) in found.items():
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(out, found["whole"][0], err_msg=name)
        assert memory == found["whole"][1], name


@pytest.mark.parametrize("dims", [test_delta.SMALL, test_delta.REAL], ids=["small", "real"])
def test_delta_of_a_token_is_the_same_however_its_row_is_cut(bench, rng, dims):
    layer = test_delta.Layer(bench, rng, dims)
    b, values = layer.b, dims.h * dims.dv

    def run(x: np.ndarray, n: int) -> np.ndarray:
        qkv, z = b.activations(x[:, : dims.c], T)[0], b.activations(x[:, dims.c : dims.c + values], T)[0]
        numbers = [b.upload(x[:, at : at + dims.h], abi.PK_F32, T) for at in (dims.c + values, dims.c + values + dims.h)]
        out, program = b.output(n, values, T, format=abi.PK_F32), Program()
        program.delta((qkv, z, *numbers), layer.weights, out, layer.shape, test_delta.EPS)
        b.run(program, n)
        return b.download(out, n)

    cut(b, dims.c + values + 2 * dims.h, run, layer.slot_bytes, rng)


def test_mamba_and_convolution_of_a_token_are_the_same_however_their_row_is_cut(bench, rng):
    m = test_mamba
    b = bench(sizes=m.SIZES)
    b.state.recurrent_stride = m.SLOT_BYTES
    weights = MambaWeights(*(b.upload(rng.standard_normal(n) * 0.6, abi.PK_F32) for n in (m.C * m.W, m.C, m.H, m.H, m.H, m.H * m.P)))
    shape = MambaShape(m.H, m.P, m.G, m.N, m.W, 1, *m.OFFSETS, 0.0, float("inf"))
    taps = b.upload(rng.standard_normal(24 * 3), abi.PK_F32)

    def mamba(x: np.ndarray, n: int) -> np.ndarray:
        parts = (b.activations(x[:, : m.C], T)[0], b.activations(x[:, m.C : m.C + m.H * m.P], T)[0], b.upload(x[:, -m.H :], abi.PK_F32, T))
        out, program = b.output(n, m.H * m.P, T, format=abi.PK_F32), Program()
        program.mamba(parts, weights, out, shape, m.EPS)
        b.run(program, n)
        return b.download(out, n)

    def convolution(x: np.ndarray, n: int) -> np.ndarray:
        out, program = b.output(n, 24, T, format=abi.PK_F32), Program()
        program.conv(b.activations(x, T)[0], (taps, None), out, 3, 64)
        b.run(program, n)
        return b.download(out, n)

    cut(b, m.C + m.H * m.P + m.H, mamba, m.SLOT_BYTES, rng)
    cut(b, 72, convolution, m.SLOT_BYTES, rng)


def test_a_layer_that_is_not_the_same_in_company_is_refused_by_name(bench):
    b = bench()
    if b.pack.description["pack"] == "cpu":
        pytest.skip("the CPU pack has none")
    program, q = Program(), b.output(4, 64, T)
    program.streams(q, q, b.output(4, 32, T), q)
    with pytest.raises(UnsupportedError, match=r"residual streams; the CUDA pack has no kernels for it whose numbers of a row depend on the row alone"):
        b.load(program)
