"""What encoders, latent attention and shared keys add to the ops, against float64 numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cases import Attention
from harness import decode, rounded
from paddock_runner.errors import PackError
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Program, View
from paddock_runner.pack.tensor import S, T, Tensor
from test_ops import act, attention_bench, close, rms, store


@pytest.mark.parametrize(("n", "width", "has_bias", "in_place"), [(1, 1, True, False), (3, 37, False, True), (5, 384, True, True), (2, 1000, True, False)])
def test_layer_norm_equals_numpy(bench, rng, n, width, has_bias, in_place):
    b = bench()
    x, x64 = b.activations(rng.normal(size=(n, width)) * 3 + 7, T, 2)
    w64, bias64 = (rounded(rng.normal(size=width), abi.PK_F32) for _ in range(2))
    out = x if in_place else b.output(n, width, T, 3)
    program = Program()
    program.layer_norm(x, b.upload(w64, abi.PK_F32), b.upload(bias64, abi.PK_F32) if has_bias else None, out, 1e-5)
    b.run(program, n)
    centred = x64 - x64.mean(-1, keepdims=True)
    close(b.download(out, n), centred / rms(centred, 1e-5) * w64 + bias64 * has_bias, b.activation, 20)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu_erf", "relu2"])
def test_gate_without_a_second_half_is_the_activation(bench, rng, name):
    b = bench()
    x, x64 = b.activations(rng.normal(size=(5, 77)) * 4, T, 3)
    program = Program()
    program.gate(x, x, name)
    b.run(program, 5)
    close(b.download(x, 5), np.maximum(x64, 0) ** 2 if name == "relu2" else act(x64, name), b.activation, 4)


@pytest.mark.parametrize("n_types", [0, 2])
def test_embed_adds_rows_for_positions_and_types(bench, rng, n_types):
    vocab = 50
    sizes = StateSizes(8, 256, 16, 64, vocab * max(n_types, 1), 256, 16, 8, 5, 3)
    b = bench(sizes=sizes)
    table64, positions64, types64 = (rng.normal(size=(n, 24)).astype(np.float32).astype(np.float64) for n in (vocab, 9, 2))
    table, positions, types = (b.upload(v, abi.PK_F32) for v in (table64, positions64, types64))
    n = b.set_rows([(0, 0, 3), (1, 4, 6)])
    ids, at = rng.integers(0, sizes.n_vocab, n), np.array([0, 1, 2, 4, 5, 6, 7, 8, 9])
    b.set("token_id", ids)
    out = b.output(n, 24, T)
    program = Program()
    program.embed(table, out, 0.5, (positions, types if n_types else None), 2)
    b.run(program, n)
    wanted = table64[ids % vocab] * 0.5 + positions64[np.minimum(at + 2, 8)] + (types64[ids // vocab] if n_types else 0)
    close(b.download(out, n), wanted, b.activation)


@pytest.mark.parametrize("pool", ["first", "mean"])
def test_gather_takes_first_rows_and_means(bench, rng, pool):
    b = bench()
    n = b.set_rows([(0, 0, 3), (1, 9, 1), (5, 2, 4), (2, 0, 2)], sampled=[0, 2, 3])
    x, x64 = b.activations(rng.normal(size=(n, 37)), T, 2)
    out = b.output(3, 37, S, 1)
    program = Program()
    program.gather(x, out, pool)
    b.run(program, n, 3)
    parts = [x64[a : a + count] for a, count in ((0, 3), (4, 4), (8, 2))]
    close(b.download(out, 3), np.array([p[0] if pool == "first" else p.mean(0) for p in parts]), b.activation)


def attend_both(q, k, v, window, scale):
    """float64 attention without causality, |i - j| < window."""
    n, H, _ = q.shape
    out = np.zeros((n, H, v.shape[-1]))
    group = H // k.shape[1]
    far = np.abs(np.arange(n)[:, None] - np.arange(n)[None]) >= window if window else np.zeros((n, n), bool)
    for h in range(H):
        s = np.where(far, -np.inf, q[:, h] @ k[:, h // group].T * scale)
        e = np.exp(s - s.max(-1, keepdims=True))
        out[:, h] = e @ v[:, h // group] / e.sum(-1, keepdims=True)
    return out


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize(("heads", "width"), [((6, 6), 32), ((4, 2), 64), ((3, 1), 20)])
def test_bidirectional_attention_equals_numpy(bench, rng, heads, width, window, level):
    rows = ((2, 0, 1), (0, 0, 4), (1, 0, 133), (4, 0, 31))
    case = Attention(*heads, width, width, rows, kv_format=abi.PK_F32)
    b, layout = attention_bench(bench, case)
    b.scatter_pages(rng)
    k, v = ([rounded(rng.normal(size=(n, heads[1], width)), b.activation) for _, _, n in rows] for _ in range(2))
    for i, row in enumerate(rows):
        store(b, layout, [row], k[i], v[i], rng)
    n_tokens = b.set_rows(list(rows))
    q, q64 = b.activations(rng.normal(size=(n_tokens, heads[0] * width)), T, 3)
    out = b.output(n_tokens, heads[0] * width, T, 5)
    program = Program()
    program.attention(q, out, layout, width**-0.5, View(window, True))
    b.run(program, n_tokens)
    got, at = b.download(out, n_tokens).reshape(n_tokens, heads[0], width), 0
    for i, (_, _, n) in enumerate(rows):
        wanted = attend_both(q64[at : at + n].reshape(n, heads[0], width), k[i], v[i], window, width**-0.5)
        close(got[at : at + n], wanted, b.activation, 50 if level == 3 else 10)
        at += n


@pytest.mark.parametrize(("H", "D", "Dv"), [(5, 40, 24), (16, 576, 512), (3, 36, 20)])
def test_latent_values_are_the_end_of_the_keys(bench, rng, level, H, D, Dv):
    """One key head for all, values are its last dimensions: chunks, single tokens and continued rows give what numpy gives."""
    rows = ((0, 0, 37), (1, 0, 1), (2, 20, 3), (3, 300, 1))
    case = Attention(H, 1, D, Dv, rows, kv_format=abi.PK_F32)
    b, layout = attention_bench(bench, case)
    layout = dataclasses.replace(layout, parts=abi.PK_PARTS_LATENT)
    b.scatter_pages(rng)
    keys = [rounded(rng.normal(size=(p + n, D)), abi.PK_F32) for _, p, n in rows]
    for (slot, p, n), k in zip(rows, keys, strict=True):
        b.set_rows([(slot, 0, p + n)])
        x, _ = b.activations(np.concatenate([rng.normal(size=(p + n, H * D)), k], 1), T)
        program = Program()
        program.qkv(x, b.output(p + n, H * D, T), layout, (None, None), None, 1e-6)
        b.run(program, p + n)
    n_tokens = b.set_rows(list(rows))
    q, q64 = b.activations(rng.normal(size=(n_tokens, H * D)), T)
    out = b.output(n_tokens, H * Dv, T)
    program = Program()
    program.attention(q, out, layout, D**-0.5)
    b.run(program, n_tokens)
    got, at = b.download(out, n_tokens).reshape(n_tokens, H, Dv), 0
    for (_, p, n), k in zip(rows, keys, strict=True):
        for t in range(n):
            seen = k[: p + t + 1]
            s = q64[at].reshape(H, D) @ seen.T * D**-0.5
            e = np.exp(s - s.max(-1, keepdims=True))
            close(got[at], e @ seen[:, D - Dv :] / e.sum(-1, keepdims=True), b.activation, 20)
            at += 1


def test_queries_alone_leave_the_pages_and_values_may_be_normed(bench, rng):
    case = Attention(4, 2, 16, 12, ((0, 0, 9),), kv_format=abi.PK_F32)
    b, layout = attention_bench(bench, case)
    b.scatter_pages(rng)
    n = b.set_rows(list(case.rows))
    k64, v64 = (rounded(rng.normal(size=(n, 2, w)), b.activation) for w in (16, 12))
    x, _ = b.activations(np.concatenate([rng.normal(size=(n, 64)), k64.reshape(n, -1), v64.reshape(n, -1)], 1), T)
    program, w64 = Program(), rounded(rng.normal(size=12), abi.PK_F32)
    program.qkv(x, b.output(n, 64, T), layout, (None, None, b.upload(w64, abi.PK_F32)), None, 1e-6)
    shared = dataclasses.replace(layout, parts=abi.PK_PARTS_Q)
    q, q64 = b.activations(rng.normal(size=(n, 64)), T)
    turned = b.output(n, 64, T)
    program.qkv(q, turned, shared, (None, None), None, 1e-6)
    out = b.output(n, 48, T)
    program.attention(turned, out, layout, 1.0, 1)
    b.run(program, n)
    wanted = v64 / rms(v64, 1e-6) * w64
    close(b.download(out, n).reshape(n, 2, 2, 12), np.repeat(wanted[:, :, None], 2, 2), b.activation, 5)
    close(decode(b.device.read(turned.data, n * turned.row_bytes), turned.format).reshape(n, 64), q64, b.activation)


def test_wrong_parameters_are_refused_by_name(bench, rng):
    b = bench()
    x = b.output(4, 16, T)
    w = b.upload(np.ones(16), abi.PK_F32)
    for expected, build in (
        ("takes no post_w", lambda p: p._add(abi.pk_op_norm, abi.PK_OP_NORM, {"x": x, "w": w, "post_w": w, "out": x}, kind=1)),
        ("takes no bias", lambda p: p._add(abi.pk_op_norm, abi.PK_OP_NORM, {"x": x, "w": w, "bias": w, "out": x})),
        ("kind is 7", lambda p: p._add(abi.pk_op_norm, abi.PK_OP_NORM, {"x": x, "w": w, "out": x}, kind=7)),
        ("pool is 3", lambda p: p._add(abi.pk_op_gather, abi.PK_OP_GATHER, {"x": x, "out": Tensor(x.data, S, 16, x.format, x.row_bytes)}, pool=3)),
    ):
        program = Program()
        build(program)
        with pytest.raises(PackError, match=expected):
            b.load(program)
