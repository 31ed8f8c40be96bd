"""Ops that few families need against float64 numpy; a pack that has none says so when a program is loaded."""

from __future__ import annotations

import numpy as np
import pytest
from harness import POISON, rounded
from paddock_runner.errors import PackError
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import (
    DeltaShape,
    DeltaWeights,
    Heads,
    Kept,
    MambaShape,
    MambaWeights,
    NgramShape,
    Program,
    Rotation,
)
from paddock_runner.pack.tensor import T, Tensor
from test_ops import close
from weights import random_weight


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


ROWS = ([[(3, 0, 1), (1, 0, 2), (5, 0, 30)], ()], [[(5, 30, 1), (3, 1, 4), (1, 2, 1)], (2,)], [[(1, 2, 1), (3, 0, 3), (5, 31, 2)], ()])
"""Steps of rows (slot, position, tokens), and which rows are dead."""


def needs(b, op):
    if op not in b.pack.description["ops"]:
        pytest.skip(f"this pack has no {op}")


def test_a_table_s_rows_are_chosen_by_the_last_tokens_of_the_text(bench, rng):
    b = bench()
    needs(b, "ngram")
    width, end = 5, 7
    multipliers, sizes = (3, 2**61 + 1, 12345677), (11, 13, 17, 19)
    pieces = [random_weight("f32", 31, width, rng) for _ in range(2)]
    n_bytes = b.device.packed_bytes(pieces[0].source())
    step = -(-n_bytes // 256) * 256
    base = b.device.alloc(2 * step, "table")
    for i, piece in enumerate(pieces):
        b.device.repack(piece.source(), base + i * step, n_bytes)
    table = np.concatenate([piece.values for piece in pieces])
    text = rng.integers(0, 12, 40)
    b.set("tokens", text, at=2 * (b.sizes.max_ctx_tokens + 1))
    n = b.set_rows([(2, 0, 5), (2, 20, 20), (4, 3, 1)], dead=(2,))
    out = b.output(n, 4 * width, T, 3)
    program = Program()
    program.ngram(Tensor(base, 31, width, abi.PK_F32, step, abi.PK_PACKED), out, NgramShape(multipliers, sizes, 2, end, 2))
    b.run(program, n)
    got = b.download(out, n)
    for t, position in enumerate([*range(5), *range(20, 40)]):
        last = [int(text[position])]
        for k in (1, 2):
            seen = text[max(position - k, 0) : position]
            last.append(int(text[position - k]) if position >= k and end not in seen else end)
        mixed, want, first = last[0] * multipliers[0], [], 0
        for g in (1, 2):
            mixed ^= (last[g] * multipliers[g]) & (2**64 - 1)
            signed = mixed - 2**64 if mixed >= 2**63 else mixed
            for size in sizes[2 * g - 2 : 2 * g]:
                want.append(table[first + signed % size])
                first += size
        close(got[t], np.concatenate(want), b.activation)
    assert not got[n - 1].any()


def test_streams_take_a_value_by_their_own_likeness(bench, rng):
    b = bench()
    needs(b, "streams")
    (q, q64), (k, k64), (v, v64) = (b.activations(rng.normal(size=(9, n)), T, 2) for n in (36, 36, 12))
    program = Program()
    program.streams(q, k, v, q)
    b.run(program, 9)
    g = (q64 * k64).reshape(9, 3, 12).sum(-1) / np.sqrt(12)
    g = np.sign(g) * np.sqrt(np.maximum(np.abs(g), 1e-6))
    close(b.download(q, 9), ((1 / (1 + np.exp(-g)))[..., None] * v64[:, None]).reshape(9, 36), b.activation)


def test_a_dilated_convolution_begins_continues_and_skips_dead_rows(bench, rng):
    channels, width, dilation, offset = 21, 3, 2, 64
    n_tail = (width - 1) * dilation
    slot_bytes = offset + -(-4 * channels * n_tail // 64) * 64
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, 256, 16, 8, 5, 3, slot_bytes))
    needs(b, "dilated")
    b.state.recurrent_stride = slot_bytes
    b.device.fill(b.state.recurrent, POISON, 8 * slot_bytes)
    w = rounded(rng.normal(size=(channels, width)), abi.PK_F32)
    conv = b.upload(w.reshape(1, -1), abi.PK_F32)
    tails = np.full((8, n_tail, channels), np.nan)
    for rows, dead in ROWS:
        n = b.set_rows(rows, dead=dead)
        (x, x64), (out, add) = (b.activations(rng.normal(size=(n, channels)), T, 4) for _ in range(2))
        program = Program()
        program.dilated(x, conv, out, (width, dilation), offset)
        b.run(program, n)
        got, at = b.download(out, n), 0
        for r, (slot, position, count) in enumerate(rows):
            part, at = slice(at, at + count), at + count
            if r in dead:
                continue
            seen = np.concatenate([tails[slot] if position else np.zeros((n_tail, channels)), x64[part]])
            sums = np.stack([np.einsum("ci,ic->c", w, seen[t : t + n_tail + 1 : dilation]) for t in range(count)])
            tails[slot] = seen[count:]
            close(got[part], add[part] + sums / (1 + np.exp(-sums)), b.activation, 10)


@pytest.mark.parametrize(("format", "block", "kept", "n"), [(abi.PK_F32, 4, 2, 37), (abi.PK_BF16, 4, 2, 37), (abi.PK_F16, 4, 2, 37), (abi.PK_BF16, 2, 70, 640), (abi.PK_BF16, 1, 300, 601)])
def test_attention_sees_the_best_blocks_of_an_index_and_the_newest_tokens(bench, rng, format, block, kept, n):
    h, kv, d, dv, hi, di = 4, 2, 16, 12, 3, 8
    element = 4 if format == abi.PK_F32 else 2
    at_v, at_i = 16 * kv * d * element, 16 * kv * (d + dv) * element
    b = bench(sizes=StateSizes(8, 1024, 16, 300, 100, 700, 16, 8, 5, 3), page_bytes=at_i + 16 * di * element)
    needs(b, "sparse")
    b.scatter_pages(rng)
    b.set_rows([(3, 0, n)])
    heads = Heads(h, kv, d, dv, 0, at_v, format)
    x, x64 = b.activations(rounded(rng.normal(size=(n, heads.width)), format), T)
    both, both64 = b.activations(rounded(rng.normal(size=(n, (hi + 1) * di)), format), T)
    norm = rng.normal(size=(1, di)) + 2
    rope = Rotation(b.upload(np.array([[1.0, 0.1]]), abi.PK_F32), 4, "neox", 1.0)
    q, index_q = x.columns(0, h * d), both.columns(0, hi * di)
    out = b.output(n, h * dv, T)
    program = Program()
    program.qkv(x, q, heads, (None, None), None, 1e-6)
    program.qkv(both, index_q, Heads(hi, 1, di, di, at_i, at_i, format, abi.PK_PARTS_LATENT), (None, None), None, 1e-6)
    program.sparse((q, out), heads, d**-0.5, (index_q, b.upload(norm, abi.PK_F32)), (hi, di, block, kept, at_i), rope, 1e-6)
    b.run(program, n)
    got = b.download(out, n).reshape(n, h, dv)
    queries, keys, values = np.split(x64, [h * d, (h + kv) * d], axis=1)
    keys, values = keys.reshape(n, kv, d), values.reshape(n, kv, dv)
    means = both64[: n // block * block, hi * di :].reshape(-1, block, di).mean(1)
    means = means / np.sqrt((means**2).mean(-1, keepdims=True) + 1e-6) * norm
    angles = np.arange(len(means))[:, None] * block * np.array([1.0, np.float32(0.1)])
    first, second = means[:, :2] * np.cos(angles) - means[:, 2:4] * np.sin(angles), means[:, 2:4] * np.cos(angles) + means[:, :2] * np.sin(angles)
    means = np.concatenate([first, second, means[:, 4:]], axis=1)
    for t in range(n):
        n_blocks = (t + 1) // block
        scores = np.maximum(both64[t, : hi * di].reshape(hi, di) @ means[:n_blocks].T, 0).sum(0)
        order = np.argsort(-scores, kind="stable")
        if n_blocks > kept and 0 < scores[order[kept - 1]] - scores[order[kept]] < 1e-4:
            continue  # what f32 rounds decides
        seen = [j for i in sorted(order[:kept]) for j in range(i * block, (i + 1) * block)] + [*range(n_blocks * block, t + 1)]
        for head in range(h):
            logits = keys[seen, head // 2] @ queries[t, head * d : (head + 1) * d] * d**-0.5
            weights = np.exp(logits - logits.max())
            close(got[t, head], weights / weights.sum() @ values[seen, head // 2], b.activation, 10)


def test_a_delta_net_gated_by_a_sigmoid_gives_what_the_other_gives_less_a_factor(bench, rng):
    heads, width, taps, n = 2, 8, 4, 11
    slot_bytes = 64 + -(-4 * heads * width * width // 64) * 64 + 4 * 3 * heads * width * taps
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, 256, 16, 8, 5, 3, -(-slot_bytes // 64) * 64))
    needs(b, "delta_sigmoid")
    b.state.recurrent_stride = b.sizes.recurrent_bytes
    b.set_rows([(3, 0, n)])
    shape = DeltaShape(heads, heads, width, width, taps, 64, 64 + -(-4 * heads * width * width // 64) * 64)
    vectors = (rng.normal(size=(1, k)) for k in (3 * heads * width * taps, heads, heads, width))
    weights = DeltaWeights(*(b.upload(x, abi.PK_F32) for x in vectors))
    qkv, (z, z64) = b.activations(rng.normal(size=(n, 3 * heads * width)), T)[0], b.activations(rng.normal(size=(n, heads * width)), T)
    numbers = [b.upload(rng.normal(size=(n, heads)), abi.PK_F32, T) for _ in range(2)]
    got = []
    for gate in ("silu", "sigmoid"):
        out, program = b.output(n, heads * width, T), Program()
        program.delta((qkv, z, *numbers), weights, out, shape, 1e-6, gate)
        b.run(program, n)
        got.append(b.download(out, n))
    close(got[1] * z64, got[0], b.activation)


def test_wrong_numbers_of_rare_ops_are_refused(bench, rng):
    b = bench()
    needs(b, "ngram")
    table = random_weight("f32", 8, 5, rng).upload(b)
    for sizes, sentence in (((11, 13), r"rows of all parts is 24, it must be 1 to 8"), ((0, 3), r"a part's rows is 0")):
        program = Program()
        program.ngram(table, b.output(3, 10, T), NgramShape((3, 5), sizes, 2, 7, 1))
        with pytest.raises(PackError, match=sentence):
            b.load(program)


DRAFTS = [abi.PK_ROW_SAMPLE | abi.PK_ROW_DRAFT | held for held in (0, abi.PK_ROW_HELD | 4 << 16, abi.PK_ROW_HELD | 1 << 16)]
"""Flags of rows of guesses: a free one, and two that are held and had masks for four and for one of their draws."""


@pytest.mark.parametrize("width", [8, 128])
def test_a_delta_net_takes_back_what_was_guessed_wrong(bench, rng, width):
    """Rows of four tokens of which two, four and one count: their states are those of rows that ran so many."""
    heads, taps, n = 2, 4, 4
    channels, state = 3 * heads * width, 4 * heads * width * width
    size = -(-(state + 4 * channels * (taps - 1)) // 64) * 64
    rows_at, slot_bytes = 64 + 2 * size, -(-(64 + 2 * size + 4 * n * (channels + 2 * heads)) // 64) * 64
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, 256, 16, 8, 5, 3, slot_bytes))
    needs(b, "settle")
    b.state.recurrent_stride = slot_bytes
    before = rng.normal(size=8 * slot_bytes // 4).astype(np.float32)
    weights = DeltaWeights(*(b.upload(rng.normal(size=(1, k)), abi.PK_F32) for k in (channels * taps, heads, heads, width)))
    shape = DeltaShape(heads, heads, width, width, taps, 64, 64 + state)
    qkv64 = rng.normal(size=(3 * n, channels))
    numbers64 = [rng.normal(size=(3 * n, heads)) for _ in range(2)]

    def run(rows, tokens, lengths):
        b.device.write(b.state.recurrent, before.tobytes())
        count = b.set_rows(rows)
        b.set("row_flags", DRAFTS if lengths else [abi.PK_ROW_SAMPLE] * 3)
        inputs = [b.activations(qkv64[tokens], T)[0], *(b.upload(x[tokens], abi.PK_F32, T) for x in numbers64)]
        program, kept = Program(), Kept(size, 64 + size, rows_at, n)
        if lengths:
            program.keep(inputs[0], (inputs[1], inputs[2]), 64, kept)
            for slot, length in lengths.items():
                b.set("length", [length], at=slot)
        program.delta((inputs[0], b.activations(np.zeros((count, heads * width)), T)[0], *inputs[1:]), weights, b.output(count, heads * width, T), shape, 1e-6)
        if lengths:
            program.settle(program.records[-1], 64, kept)
        b.run(program, count)
        got = np.frombuffer(b.device.read(b.state.recurrent, 8 * slot_bytes), np.float32).reshape(8, -1)
        return got[:, 16 : 16 + size // 4]

    settled = run([(1, 9, n), (4, 20, n), (6, 3, n)], [*range(3 * n)], {1: 11, 4: 24, 6: 4})
    short = run([(1, 9, 2), (4, 20, 4), (6, 3, 1)], [0, 1, 4, 5, 6, 7, 8], {})
    for slot in (1, 4, 6):
        assert np.allclose(settled[slot], short[slot], rtol=1e-5, atol=1e-6) and (not b.device.facts.is_host or np.array_equal(settled[slot], short[slot])), slot


@pytest.mark.parametrize("kind", ["mamba", "conv"])
def test_mambas_and_convolutions_take_back_what_was_guessed_wrong(bench, rng, kind):
    """As above: rows of four tokens of which two, four and one count."""
    heads, width, groups, n_state, taps, n = 4, 16, 2, 8, 4, 4
    channels = heads * width + 2 * groups * n_state if kind == "mamba" else 24
    n_inputs, state = (channels + heads, 4 * heads * width * n_state) if kind == "mamba" else (3 * channels, 0)
    size = -(-(state + 4 * channels * (taps - 1)) // 64) * 64
    rows_at, slot_bytes = 64 + 2 * size, -(-(64 + 2 * size + 4 * n * n_inputs) // 64) * 64
    b = bench(sizes=StateSizes(8, 256, 16, 64, 100, 256, 16, 8, 5, 3, slot_bytes))
    needs(b, f"settle_{kind}")
    b.state.recurrent_stride = slot_bytes
    before = rng.normal(size=8 * slot_bytes // 4).astype(np.float32)
    vectors = [b.upload(rng.normal(size=(1, k)), abi.PK_F32) for k in (channels * taps, channels, heads, heads, heads, heads * width)]
    x64, dt64 = rng.normal(size=(3 * n, n_inputs - heads if kind == "mamba" else n_inputs)), rng.normal(size=(3 * n, heads))

    def run(rows, tokens, lengths):
        b.device.write(b.state.recurrent, before.tobytes())
        count = b.set_rows(rows)
        b.set("row_flags", DRAFTS if lengths else [abi.PK_ROW_SAMPLE] * 3)
        for slot, length in lengths.items():
            b.set("length", [length], at=slot)
        x, dt = b.activations(x64[tokens], T)[0], b.upload(dt64[tokens], abi.PK_F32, T)
        program, kept = Program(), Kept(size, 64 + size, rows_at, n)
        if lengths:
            program.keep(x, (dt if kind == "mamba" else None, None), 64, kept)
        if kind == "mamba":
            shape = MambaShape(heads, width, groups, n_state, taps, 1, 64, 64 + state, 0.01, 2.0)
            program.mamba((x, b.activations(np.zeros((count, heads * width)), T)[0], dt), MambaWeights(*vectors), b.output(count, heads * width, T), shape, 1e-6)
        else:
            program.conv(x, (vectors[0], vectors[1]), b.output(count, channels, T), taps, 64)
        if lengths:
            program.settle(program.records[-1], 64, kept)
        b.run(program, count)
        return np.frombuffer(b.device.read(b.state.recurrent, 8 * slot_bytes), np.float32).reshape(8, -1)[:, 16 : 16 + size // 4]

    settled = run([(1, 9, n), (4, 20, n), (6, 3, n)], [*range(3 * n)], {1: 11, 4: 24, 6: 4})
    short = run([(1, 9, 2), (4, 20, 4), (6, 3, 1)], [0, 1, 4, 5, 6, 7, 8], {})
    for slot in (1, 4, 6):
        assert np.allclose(settled[slot], short[slot], rtol=1e-5, atol=1e-6) and (not b.device.facts.is_host or np.array_equal(settled[slot], short[slot])), slot


def test_a_guess_stands_behind_the_token_that_was_drawn(bench, rng):
    b = bench()
    needs(b, "guess")
    b.set("tokens", np.arange(8 * 257) % 90)
    n = b.set_rows([(2, 10, 1), (3, 4, 3), (5, 0, 2)], dead=(2,))
    for slot, length in ((2, 11), (3, 7), (5, 2)):
        b.set("length", [length], at=slot)
    logits64 = rng.normal(size=(3, 100))
    logits = b.upload(logits64, abi.PK_F32, abi.PK_ROWS_S)
    program = Program()
    program.shift()
    program.guess(logits, 0)
    b.run(program, n, 3)
    text = b.get("tokens", 8 * 257).reshape(8, 257)
    assert [text[2, 12], text[3, 8]] == np.argmax(logits64[:2], axis=1).tolist() and text[5, 3] == (5 * 257 + 3) % 90
    assert b.get("token_id", n)[:4].tolist() == [(s * 257 + p + 1) % 90 for s, p in ((2, 10), (3, 4), (3, 5), (3, 6))]
