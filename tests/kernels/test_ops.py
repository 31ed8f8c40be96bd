"""Each op at each instruction level against float64 numpy: fresh random inputs, poisoned outputs, odd shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases import ADD, ATTENTION, COPY, EMBED, GATE, NORM, QKV, Attention
from harness import decode, encode, rounded
from paddock_runner.formats.reference import dequantize
from paddock_runner.formats.table import by_name
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Heads, Program, Rotation
from paddock_runner.pack.tensor import ELEMENT_BYTES, S, T, Tensor

TOLERANCE = {abi.PK_F32: (2e-5, 2e-6), abi.PK_BF16: (1e-2, 1e-2)}
"""Relative and absolute error allowed by the activation format: f32 sums of up to 2048 terms, or one bf16 rounding each way."""


def close(got, wanted, activation, factor=1.0):
    """got equals wanted within what the activation format allows; no NaN anywhere."""
    relative, absolute = TOLERANCE[activation]
    np.testing.assert_allclose(got, wanted, rtol=relative * factor, atol=absolute * factor)


def rms(x, eps):
    return np.sqrt((x * x).mean(-1, keepdims=True) + eps)


@pytest.mark.parametrize("case", NORM, ids=str)
def test_norm_equals_numpy(bench, rng, case):
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, max(256, case.n), 16, 8, 5, 3))
    x, x64 = b.activations(rng.normal(size=(case.n, case.width)) * 3, T, case.gap)
    w64 = rounded(rng.normal(size=case.width), abi.PK_F32)
    post64 = rounded(rng.normal(size=case.width), abi.PK_F32)
    w, post = b.upload(w64, abi.PK_F32), b.upload(post64, abi.PK_F32)
    residual, r64 = b.activations(rng.normal(size=(case.n, case.width)), T, case.gap)
    out = x if case.in_place else b.output(case.n, case.width, T, case.gap)
    program = Program()
    program.norm(
        x, w, out if case.has_out else None, case.eps, residual if case.has_residual else None, post if case.has_post else None, case.scale
    )
    b.run(program, case.n)
    v = x64 / rms(x64, case.eps) * post64 if case.has_post else x64
    if case.has_residual:
        v = r64 + v * case.scale
        close(b.download(residual, case.n), v, b.activation)
    if case.has_out:
        close(b.download(out, case.n), v / rms(v, case.eps) * w64, b.activation)


def act(x, name):
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "gelu_erf":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x


@pytest.mark.parametrize("case", GATE, ids=str)
def test_gate_equals_numpy(bench, rng, case):
    b = bench()
    x, x64 = b.activations(rng.normal(size=(case.n, 2 * case.width)) * 4, S, case.gap)
    out = b.output(case.n, case.width, S, case.gap)
    program = Program()
    program.gate(x, out, case.act)
    if case.n > b.sizes.max_step_rows:
        x, out = (Tensor(t.data, T, t.cols, t.format, t.stride) for t in (x, out))
        program = Program()
        program.gate(x, out, case.act)
    b.run(program, case.n, min(case.n, b.sizes.max_step_rows))
    close(b.download(out, case.n), act(x64[:, : case.width], case.act) * x64[:, case.width :], b.activation, 4)


@pytest.mark.parametrize("value", [0.0, -1e-30, 30.0, -30.0, 100.0, -100.0, 1e4, -1e4])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu_erf"])
def test_activations_of_extreme_values_stay_finite_and_right(bench, value, name):
    b = bench()
    x, x64 = b.activations(np.array([[value, 1.0]]), T)
    out = b.output(1, 1, T)
    program = Program()
    program.gate(x, out, name)
    b.run(program, 1)
    with np.errstate(over="ignore"):
        close(b.download(out, 1), act(x64[:, :1], name), b.activation)


@pytest.mark.parametrize("case", COPY, ids=str)
def test_copy_converts_as_numpy_does(bench, rng, case):
    b = bench()
    values = rng.integers(0, 200, size=(case.n, case.width)) if case.source in (abi.PK_I32, abi.PK_U8) else rng.normal(size=(case.n, case.width)) * 100
    x, out = b.upload(values, case.source, T, case.gap), b.output(case.n, case.width, T, case.gap, case.target)
    program = Program()
    program.copy(x, out)
    b.run(program, case.n)
    np.testing.assert_array_equal(b.download(out, case.n), rounded(rounded(values, case.source), case.target))


def test_copy_keeps_infinities_and_nan(bench):
    b = bench()
    values = np.array([[np.inf, -np.inf, np.nan, 1e38, 65504.0, 1e-8]], np.float32)
    for target in (abi.PK_F16, abi.PK_BF16):
        x, out = b.upload(values, abi.PK_F32, 1), b.output(1, 6, 1, 0, target)
        program = Program()
        program.copy(x, out)
        b.run(program, 1)
        with np.errstate(over="ignore"):
            wanted = rounded(np.where(np.isnan(values), 0, values), target)
        got = b.download(out, 1)
        assert np.isnan(got[0, 2])
        np.testing.assert_array_equal(np.where(np.isnan(values), 0, got), wanted)


@pytest.mark.parametrize("case", ADD, ids=str)
def test_add_equals_numpy(bench, rng, case):
    b = bench()
    x, x64 = b.activations(rng.normal(size=(case.n, case.width)), T, case.gap)
    y, y64 = b.activations(rng.normal(size=(case.n, case.width)), T)
    out = b.output(case.n, case.width, T, case.gap)
    program = Program()
    program.add(x, y, out, case.scale)
    b.run(program, case.n)
    close(b.download(out, case.n), x64 * case.scale + y64, b.activation)


def table_of(b, rng, case):
    """An embedding table in a format, on the device, and what it holds."""
    kind = by_name(case.format)
    values = rng.normal(size=(case.vocab, case.width))
    raw = np.ascontiguousarray(encode(values, kind.id)).tobytes()
    truth = dequantize(case.format, raw, (case.vocab, case.width)).astype(np.float64)
    if not case.is_packed:
        address = b.device.alloc(len(raw), "table")
        b.device.write(address, raw)
        return Tensor(address, case.vocab, case.width, kind.id), truth
    host = np.frombuffer(raw, np.uint8)
    source = abi.pk_source(host.ctypes.data, host.size, case.vocab, case.width, kind.id, global_scale=1.0)
    n = b.device.packed_bytes(source)
    address = b.device.alloc(n, "table")
    b.device.repack(source, address, n)
    return Tensor(address, case.vocab, case.width, kind.id, 0, abi.PK_PACKED), truth


@pytest.mark.parametrize("case", EMBED, ids=str)
def test_embed_looks_rows_up_and_scales_them(bench, rng, case):
    b = bench()
    table, truth = table_of(b, rng, case)
    ids = rng.integers(0, case.vocab, case.n)
    b.set_rows([(0, 0, case.n)])
    b.set("token_id", ids)
    out = b.output(case.n, case.width, T, 3)
    program = Program()
    program.embed(table, out, case.scale)
    b.run(program, case.n)
    close(b.download(out, case.n), truth[ids] * case.scale, max(b.activation, abi.PK_F32))


def test_gather_takes_the_last_token_of_each_sampled_row(bench, rng):
    b = bench()
    n = b.set_rows([(0, 0, 3), (1, 9, 1), (5, 2, 4), (2, 0, 2)], sampled=[0, 2, 3])
    x, x64 = b.activations(rng.normal(size=(n, 37)), T, 2)
    out = b.output(3, 37, S, 1)
    program = Program()
    program.gather(x, out)
    b.run(program, n, 3)
    np.testing.assert_array_equal(b.download(out, 3), x64[[2, 7, 9]].astype(np.float32))


# ---- q, k, v and attention ----


def attention_bench(bench, case, n_threads=2, n_tokens=512):
    """A bench whose pages hold one layer behind an odd-looking offset, and the op's description of it."""
    element = ELEMENT_BYTES[case.kv_format]
    slot_pages = -(-640 // case.page_tokens)
    k_offset = 256
    v_offset = k_offset + -(-case.n_kv_heads * case.page_tokens * case.width * element // 64) * 64
    page_bytes = -(-(v_offset + case.n_kv_heads * case.page_tokens * case.v_width * element) // 256) * 256
    sizes = StateSizes(6, slot_pages * case.page_tokens, case.page_tokens, 6 * slot_pages + 1, 100, n_tokens, 8, 8, 5, 3)
    b = bench(sizes=sizes, page_bytes=page_bytes, n_threads=n_threads)
    return b, Heads(case.n_heads, case.n_kv_heads, case.width, case.v_width, k_offset, v_offset, case.kv_format)


def rotate(x, positions, frequency, width, layout, magnitude):
    """x [T, heads, D] rotated."""
    angle = positions[:, None, None] * frequency.astype(np.float64)
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    half = width // 2
    first, second = (slice(0, half), slice(half, width)) if layout == "neox" else (slice(0, width, 2), slice(1, width, 2))
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def positions_of(rows):
    return np.concatenate([p + np.arange(n) for _, p, n in rows])


def own_values(b, heads, n, rng):
    """V of the last step's tokens, read back through attention itself.

    Each token attends to itself only (window 1), which gives V; K is checked by the scores of the attention tests.
    """
    q, _ = b.activations(rng.normal(size=(n, heads.n_heads * heads.head_width)), T)
    out = b.output(n, heads.n_heads * heads.v_width, T)
    program = Program()
    program.attention(q, out, heads, 1.0, window=1)
    b.run(program, n)
    return b.download(out, n)


@pytest.mark.parametrize("case", QKV, ids=str)
def test_qkv_normalises_rotates_and_stores(bench, rng, case):
    b, heads = attention_bench(bench, case, n_tokens=1024)
    b.scatter_pages(rng)
    n = b.set_rows(list(case.rows))
    D, Dv, H, K = case.width, case.v_width, case.n_heads, case.n_kv_heads
    x, x64 = b.activations(rng.normal(size=(n, (H + K) * D + K * Dv)), T)
    q = Tensor(x.data, T, H * D, x.format, x.row_bytes) if case.in_place else b.output(n, H * D, T, 4)
    q_norm64, k_norm64 = (rounded(rng.normal(size=D), abi.PK_F32) for _ in range(2))
    norms = (b.upload(q_norm64, abi.PK_F32), b.upload(k_norm64, abi.PK_F32)) if case.has_norm else (None, None)
    frequency = (1 / 10000 ** (np.arange(case.rope_width // 2) / max(case.rope_width // 2, 1))).astype(np.float32)
    rope = Rotation(b.upload(frequency, abi.PK_F32), case.rope_width, case.layout, case.magnitude) if case.rope_width else None
    program = Program()
    program.qkv(x, q, heads, norms, rope, 1e-6)
    b.run(program, n)
    positions = positions_of(case.rows)
    want_q, want_k, want_v = x64[:, : H * D].reshape(n, H, D), x64[:, H * D : (H + K) * D].reshape(n, K, D), x64[:, (H + K) * D :]
    if case.has_norm:
        want_q, want_k = want_q / rms(want_q, 1e-6) * q_norm64, want_k / rms(want_k, 1e-6) * k_norm64
    if rope:
        want_q, want_k = (rotate(v, positions, frequency, case.rope_width, case.layout, case.magnitude) for v in (want_q, want_k))
    if case.in_place:
        got = decode(b.device.read(x.data, n * x.row_bytes), x.format).reshape(n, -1)[:, : H * D]
    else:
        got = b.download(q, n)
    close(got, want_q.reshape(n, -1), b.activation, 5)
    values = own_values(b, heads, n, rng).reshape(n, K, H // K, Dv)
    wanted = rounded(want_v, case.kv_format).reshape(n, K, 1, Dv)
    np.testing.assert_allclose(values, np.broadcast_to(wanted, values.shape), rtol=1e-2, atol=1e-2)


def attend(q, k, v, start, case, scale, sinks):
    """float64 attention of q [n, H, D] at positions start.. over k [m, K, D], v [m, K, Dv]."""
    n, H, _ = q.shape
    out = np.zeros((n, H, v.shape[-1]))
    group = H // case.n_kv_heads
    for h in range(H):
        s = q[:, h] @ k[:, h // group].T * scale
        if case.softcap:
            s = case.softcap * np.tanh(s / case.softcap)
        p, j = (start + np.arange(n))[:, None], np.arange(len(k))[None]
        seen = (j <= p) & ((j > p - case.window) if case.window else True)
        s = np.where(seen, s, -np.inf)
        top = np.maximum(s.max(-1, keepdims=True), sinks[h] if sinks is not None else -np.inf)
        e = np.exp(s - top)
        out[:, h] = e @ v[:, h // group] / (e.sum(-1, keepdims=True) + (np.exp(sinks[h] - top) if sinks is not None else 0))
    return out


def store(b, heads, rows, k, v, rng):
    """Writes keys and values of these rows through the QKV op (no norm, no rotation)."""
    n = b.set_rows(rows)
    H, D = heads.n_heads, heads.head_width
    x, _ = b.activations(np.concatenate([rng.normal(size=(n, H * D)), k.reshape(n, -1), v.reshape(n, -1)], 1), T)
    program = Program()
    program.qkv(x, b.output(n, H * D, T), heads, (None, None), None, 1e-6)
    b.run(program, n)


def store_from_first(b, heads, slot, k, v, rng, at_once):
    """The same of a slot from its first token on, so many tokens a step."""
    for at in range(0, len(k), at_once):
        piece = slice(at, min(len(k), at + at_once))
        store(b, heads, [(slot, at, piece.stop - at)], k[piece], v[piece], rng)


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_equals_numpy(bench, rng, case, level):
    """AMX sums products of numbers split into two bf16 parts, 2^-16 each; scores of ten turn that into 2^-13 of a weight."""
    b, heads = attention_bench(bench, case, case.n_threads)
    b.scatter_pages(rng)
    H, K, D, Dv = case.n_heads, case.n_kv_heads, case.width, case.v_width
    k, v = ([rounded(rounded(rng.normal(size=(p + n, K, w)), b.activation), case.kv_format) for _, p, n in case.rows] for w in (D, Dv))
    for i, (slot, _, _) in enumerate(case.rows):
        store_from_first(b, heads, slot, k[i], v[i], rng, 256)
    n_tokens = b.set_rows(list(case.rows))
    q, q64 = b.activations(rng.normal(size=(n_tokens, H * D)) * 2, T, 3)
    out = b.output(n_tokens, H * Dv, T, 5)
    sinks64 = rounded(rng.normal(size=H) * 2, abi.PK_F32) if case.has_sinks else None
    program = Program()
    program.attention(
        q, out, heads, D**-0.5, case.window, case.softcap, b.upload(sinks64, abi.PK_F32) if sinks64 is not None else None
    )
    b.run(program, n_tokens)
    got, at = b.download(out, n_tokens).reshape(n_tokens, H, Dv), 0
    for i, (_, p, n) in enumerate(case.rows):
        wanted = attend(q64[at : at + n].reshape(n, H, D), k[i], v[i], p, case, D**-0.5, sinks64)
        close(got[at : at + n], wanted, b.activation, 50 if level == 3 else 10)
        at += n


@pytest.mark.parametrize("width", [64, 128])
def test_rows_that_begin_with_the_same_pages_get_their_own_answers(bench, rng, level, width):
    """Two groups of rows that share 304 and 256 positions, one row alone and one that is too short to share; a chunk beside them."""
    rows = ((0, 500, 1), (1, 310, 1), (2, 305, 1), (3, 600, 1), (4, 257, 1), (5, 40, 9))
    shares = {1: (0, 304), 2: (0, 304), 4: (3, 256)}
    case = Attention(8, 2, width, width, rows, kv_format=abi.PK_BF16, has_sinks=True)
    b, heads = attention_bench(bench, case)
    b.scatter_pages(rng)
    table = b.get("page_table", 6 * b.sizes.slot_pages).reshape(6, -1).copy()
    K, D = case.n_kv_heads, width
    k, v = ([rounded(rng.normal(size=(p + n, K, D)), abi.PK_BF16) for _, p, n in rows] for _ in range(2))
    for slot, (other, common) in shares.items():
        table[slot, : common // 16] = table[other, : common // 16]
        k[slot][:common], v[slot][:common] = k[other][:common], v[other][:common]
    b.set("page_table", table)
    for i, (slot, p, n) in enumerate(rows):
        for at in range(shares.get(slot, (0, 0))[1], p + n, 256):
            piece = slice(at, min(p + n, at + 256))
            store(b, heads, [(slot, at, piece.stop - at)], k[i][piece], v[i][piece], rng)
    n_tokens = b.set_rows(list(rows))
    q, q64 = b.activations(rng.normal(size=(n_tokens, 8 * D)) * 2, T)
    out = b.output(n_tokens, 8 * D, T)
    sinks64 = rounded(rng.normal(size=8) * 2, abi.PK_F32)
    program = Program()
    program.attention(q, out, heads, D**-0.5, sinks=b.upload(sinks64, abi.PK_F32))
    b.run(program, n_tokens)
    got, at = b.download(out, n_tokens).reshape(n_tokens, 8, D), 0
    for i, (_, p, n) in enumerate(rows):
        wanted = attend(q64[at : at + n].reshape(n, 8, D), k[i], v[i], p, case, D**-0.5, sinks64)
        close(got[at : at + n], wanted, b.activation, 50 if level == 3 else 10)
        at += n


def test_dead_rows_read_no_pages_and_give_zeros(bench, rng):
    case = Attention(4, 2, 64, 64, ((0, 3, 1), (1, 0, 9), (2, 5, 1)))
    b, heads = attention_bench(bench, case)
    n = b.set_rows(list(case.rows), dead=(0, 1, 2))
    q, _ = b.activations(rng.normal(size=(n, 256)), T)
    out = b.output(n, 256, T)
    program = Program()
    program.attention(q, out, heads, 0.1)
    b.run(program, n)
    assert not b.download(out, n).any()
