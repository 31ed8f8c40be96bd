"""Whole steps: the input goes into the state, rows run, results come out; dead rows change nothing; bad inputs are refused.

The model here is a table: the logits after token t are row t of an embedding table, so that the next token is known.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field

import numpy as np
import pytest
from harness import POISON
from paddock_runner.errors import PackError
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.program import Pages, Program
from paddock_runner.pack.tensor import S, T, Tensor
from test_sample import sampling

V = 40
RESULT = np.dtype([("slot", "i4"), ("token", "i4"), ("flags", "i4"), ("length", "i4"), ("logprob", "f4"), ("n_top", "i4")])


@dataclass
class Input:
    """A step input in the making: Python lists, laid out by `block`."""

    seq: int
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    news: list[tuple[int, int, abi.pk_sampling, list[tuple[int, float]]]] = field(default_factory=list)
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    texts: list[tuple[int, int, list[int]]] = field(default_factory=list)
    masks: list[tuple[int, list[int]]] = field(default_factory=list)
    head: dict[str, int] = field(default_factory=dict)

    def block(self) -> ctypes.Array:
        """The bytes that pk_step reads."""
        payload = b""
        parts = []
        for slot, length, p, bias in self.news:
            p.n_bias = len(bias) if bias else p.n_bias
            parts.append(struct.pack("<4i", slot, length, len(payload) // 4, 0) + bytes(p))
            payload += b"".join(struct.pack("<if", *b) for b in bias)
        parts += [struct.pack("<4i", slot, n, flags, 0) for slot, n, flags in self.rows]
        parts += [struct.pack("<4i", *w, *(() if len(w) == 4 else (0,))) for w in self.pages]
        for slot, position, tokens in self.texts:
            parts.append(struct.pack("<4i", slot, position, len(tokens), len(payload) // 4))
            payload += struct.pack(f"<{len(tokens)}i", *tokens)
        for slot, words in self.masks:
            parts.append(struct.pack("<2i", slot, len(payload) // 4))
            payload += struct.pack(f"<{len(words)}I", *words)
        counts = {
            "n_tokens": sum(n for _, n, _ in self.rows), "n_rows": len(self.rows), "n_samples": sum(n if f & abi.PK_ROW_DRAFT else f & 1 for _, n, f in self.rows),
            "n_new": len(self.news), "n_pages": len(self.pages), "n_texts": len(self.texts), "n_masks": len(self.masks), "n_payload": len(payload) // 4,
        }  # fmt: skip
        raw = struct.pack("<Q8i", self.seq, *(counts | self.head).values()) + b"".join(parts) + payload
        return (ctypes.c_uint64 * (-(-len(raw) // 8))).from_buffer_copy(raw.ljust(-(-len(raw) // 8) * 8, b"\0"))


class Machine:
    """The table model on a bench."""

    def __init__(self, bench, table=None, has_pool=False):
        self.b = b = bench(sizes=StateSizes(4, 32, 8, 20, V, 16, 4, 4, 3, 3))
        table = np.full((V, V), -3.0) if table is None else table
        if table.max() == -3.0:
            table[np.arange(V), (np.arange(V) + 1) % V] = 4.0
        logits, hidden = b.output(4, V, S, 0, abi.PK_F32), b.output(16, V, T)
        program = Program()
        program.prepare()
        program.embed(b.upload(table, abi.PK_F32), hidden)
        gathered = b.output(4, V, S)
        program.gather(hidden, gathered)
        program.copy(gathered, logits)
        program.sample(logits)
        program.commit()
        self.windows = b.output(1, 4 * 4 + 16, format=abi.PK_I32)
        if has_pool:
            program.pool(Pages(64, 64, self.windows.data, self.windows.data + 4 * 4 * 4))
        b.load(program, (16,))
        b.device.fill(b.state.results, POISON, 3 * 4 * RESULT.itemsize)
        self.seq = 0

    def step(self, n_results=0, **fields):
        """One step; returns its results."""
        self.seq += 1
        given = Input(self.seq, **fields)
        block = given.block()
        self.b.device.step(ctypes.addressof(block))
        assert self.b.device.wait(self.seq, 10_000_000) and self.b.device.done[0] == self.seq
        raw = bytes(self.b.device.results)
        return np.frombuffer(raw, RESULT).reshape(3, 4)[self.seq % 3][: n_results or len(given.rows)]

    def begin(self, **fields):
        """The first half of a step with held rows; returns the row count."""
        self.seq += 1
        given = Input(self.seq, **fields)
        block = given.block()
        self.b.device.step(ctypes.addressof(block))
        return len(given.rows)

    def finish(self, n_results, masks, seq=0):
        """The second half; returns the results."""
        raw = struct.pack("<Qii", seq or self.seq, len(masks), 0) + struct.pack(f"<{len(masks)}i", *(slot for slot, _ in masks))
        raw += b"".join(struct.pack("<2I", *words) for _, words in masks)
        block = (ctypes.c_uint64 * (len(raw) // 8 + 1)).from_buffer_copy(raw.ljust(8 * (len(raw) // 8 + 1), b"\0"))
        self.b.device.finish(ctypes.addressof(block))
        ctypes.memset(ctypes.addressof(block), 0, ctypes.sizeof(block))  # it has been read
        assert self.b.device.wait(self.seq, 10_000_000) and self.b.device.done[0] == self.seq
        return np.frombuffer(bytes(self.b.device.results), RESULT).reshape(3, 4)[self.seq % 3][:n_results]

    def start(self, slot, prompt, flags=1, length=0, bias=(), **params):
        """A new slot with its prompt and pages, run in one row."""
        fields = {
            "news": [(slot, length, sampling(**({"temperature": 0.0, "prompt_length": len(prompt)} | params)), list(bias))],
            "texts": [(slot, 0, prompt)],
            "pages": [(slot, i, 1 + slot * 4 + i) for i in range(4)],
        }
        return fields | {"rows": [(slot, len(prompt) - length, flags)]}


def test_a_prompt_is_continued_token_by_token(bench):
    m = Machine(bench)
    assert m.step(**m.start(2, [5, 9, 11])).tolist() == [(2, 12, 0, 4, 0.0, 0)]
    assert m.step(rows=[(2, 1, 1)]).tolist() == [(2, 13, 0, 5, 0.0, 0)]
    assert m.step(rows=[(2, 1, 1)])["token"].tolist() == [14]
    assert m.b.get("tokens", 6, at=2 * 33).tolist() == [5, 9, 11, 12, 13, 14]
    assert m.b.get("length", 4).tolist() == [0, 0, 5, 0] and m.b.get("alive", 4).tolist() == [0, 0, 1, 0]


def test_rows_and_tokens_are_laid_out_for_the_ops(bench):
    m = Machine(bench)
    a, c = m.start(0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], flags=0), m.start(3, [20, 21])
    m.step(**{k: a[k] + c[k] for k in a})
    assert m.b.get("row_start", 3).tolist() == [0, 10, 12] and m.b.get("row_slot", 2).tolist() == [0, 3]
    assert m.b.get("row_position", 2).tolist() == [0, 0] and m.b.get("sample_row", 1).tolist() == [1]
    assert m.b.get("token_id", 12).tolist() == [*range(1, 11), 20, 21]
    assert m.b.get("token_position", 12).tolist() == [*range(10), 0, 1]
    assert m.b.get("token_row", 12).tolist() == [0] * 10 + [1] * 2
    assert m.b.get("token_page", 12).tolist() == [1] * 8 + [2] * 2 + [13] * 2


def test_pages_of_windows_have_a_table_of_their_own(bench):
    m = Machine(bench, has_pool=True)
    given = m.start(3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], flags=0)
    m.step(**given | {"pages": [*given["pages"], (3, 0, 5, abi.PK_PAGE_OF_POOL), (3, 1, 2, abi.PK_PAGE_OF_POOL)]})
    assert m.b.get("token_page", 10).tolist() == [13] * 8 + [14] * 2
    assert m.b.download(m.windows, 1)[0, 12:26].tolist() == [5, 2, *m.b.download(m.windows, 1)[0, 14:16].tolist(), *[5] * 8, *[2] * 2]
    with pytest.raises(PackError, match="page write 4 is for table 2"):
        m.step(**given | {"pages": [*given["pages"], (3, 0, 5, 2)]})


def test_times_of_the_last_steps_are_kept_in_order(bench):
    m = Machine(bench)
    assert m.b.device.times() == []
    m.step(**m.start(2, [5, 9, 11]))
    for _ in range(4):
        m.step(rows=[(2, 1, 1)])
    times = m.b.device.times()
    assert len(times) == 5 and times[-2:] == m.b.device.times(2)
    flat = [t for pair in times for t in pair]
    assert flat == sorted(flat) and 0 < flat[-1] - flat[0] < 60e9


def test_prompt_in_pieces_draws_only_at_its_end(bench):
    m = Machine(bench)
    assert m.step(**{**m.start(1, [4, 5, 6, 7, 8]), "rows": [(1, 2, 0)]}).tolist() == [(1, -1, 0, 2, 0.0, 0)]
    assert m.step(rows=[(1, 2, 0)])["length"].tolist() == [4]
    assert m.step(rows=[(1, 1, 1)]).tolist() == [(1, 9, 0, 6, 0.0, 0)]


def test_slot_with_cached_tokens_starts_behind_them(bench):
    m = Machine(bench)
    assert m.step(**m.start(1, [4, 5, 6, 7, 8], length=3)).tolist() == [(1, 9, 0, 6, 0.0, 0)]
    assert m.b.get("row_position", 1).tolist() == [3] and m.b.get("token_id", 2).tolist() == [7, 8]


DRAFT = abi.PK_ROW_SAMPLE | abi.PK_ROW_DRAFT


def test_guessed_tokens_go_through_as_far_as_they_are_what_is_drawn(bench):
    m = Machine(bench)
    m.step(**m.start(2, [5]))
    right = m.step(3, texts=[(2, 2, [7, 8])], rows=[(2, 3, DRAFT)])
    assert right.tolist() == [(2, 7, 0, 3, 0.0, 0), (2, 8, 0, 4, 0.0, 0), (2, 9, 0, 5, 0.0, 0)]
    assert m.b.get("sample_row", 3).tolist() == [0, 0, 0] and m.b.get("sample_at", 3).tolist() == [0, 1, 2]
    half = m.step(4, texts=[(2, 5, [10, 3, 12])], rows=[(2, 4, DRAFT)])
    assert half.tolist() == [(2, 10, 0, 6, 0.0, 0), (2, 11, 0, 7, 0.0, 0), (2, -1, 0, 6, 0.0, 0), (2, -1, 0, 6, 0.0, 0)]
    assert m.b.get("length", 4).tolist()[2] == 6 and m.b.get("tokens", 7, at=2 * 33).tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert m.step(rows=[(2, 1, 1)]).tolist() == [(2, 12, 0, 8, 0.0, 0)]


def test_a_guess_ends_with_its_stop_token_and_rows_before_it_keep_their_places(bench):
    m = Machine(bench)
    a, c = m.start(0, [1]), m.start(3, [20], stop=(23,))
    m.step(**{k: a[k] + c[k] for k in a})
    both = m.step(4, texts=[(3, 2, [22, 23])], rows=[(0, 1, 1), (3, 3, DRAFT)])
    assert both.tolist() == [(0, 3, 0, 3, 0.0, 0), (3, 22, 0, 3, 0.0, 0), (3, 23, abi.PK_ROW_STOP, 4, 0.0, 0), (3, -1, 0, 3, 0.0, 0)]
    assert m.step(2, texts=[(3, 4, [9])], rows=[(3, 2, DRAFT)])["flags"].tolist() == [abi.PK_ROW_DEAD] * 2
    with pytest.raises(PackError, match="comes after a draft row"):
        m.step(2, rows=[(0, 1, DRAFT), (3, 1, 1)])


def test_a_score_row_rates_the_text_as_it_stands(bench):
    m = Machine(bench)
    a, c = m.start(0, [1]), m.start(2, [5, 9, 10, 3], DRAFT | abi.PK_ROW_SCORE, n_logprobs=2, stop=(9,), max_length=3, temperature=1.0, bias=[(9, 50.0)], repetition_penalty=2.0)
    c["rows"] = [(2, 3, DRAFT | abi.PK_ROW_SCORE)]
    found = m.step(4, **{k: a[k] + c[k] for k in a})
    assert found["token"].tolist() == [2, 9, 10, 3] and found["flags"].tolist() == [0] + [abi.PK_ROW_SCORE] * 3
    assert found["length"].tolist() == [2, 2, 3, 4] and found["n_top"].tolist() == [0, 2, 2, 2]
    total = np.log(np.exp(4.0) + (V - 1) * np.exp(-3.0))
    np.testing.assert_allclose(found["logprob"][1:], [-3 - total, 4 - total, -3 - total], atol=1e-5)
    top = np.frombuffer(bytes(m.b.device.top), [("token", "<i4"), ("logprob", "<f4")]).reshape(3, 4, 3)[m.seq % 3]
    assert top["token"][1:, 0].tolist() == [6, 10, 11] and abs(top["logprob"][2, 0] - (4 - total)) < 1e-5
    assert m.b.get("length", 4).tolist()[2] == 3 and m.b.get("alive", 4).tolist()[2] == 1
    assert m.b.get("tokens", 4, at=2 * 33).tolist() == [5, 9, 10, 3]
    assert m.step(rows=[(2, 1, 1)])["flags"].tolist() == [abi.PK_ROW_LENGTH | abi.PK_ROW_STOP]
    with pytest.raises(PackError, match="rates tokens and is no draft row"):
        m.step(rows=[(0, 1, abi.PK_ROW_SCORE | abi.PK_ROW_SAMPLE)])


def test_a_copy_is_made_in_order_with_the_steps(bench):
    m = Machine(bench)
    address = m.b.device.alloc(16, "spare")
    m.step(**m.start(2, [5, 6, 7]))
    m.b.device.copy(address, m.b.state.length, 16)
    m.step(rows=[(2, 1, 1)])
    assert np.frombuffer(m.b.device.read(address, 16), np.int32).tolist() == [0, 0, 3, 0]
    with pytest.raises(PackError, match="copy"):
        m.b.device.copy(0, address, 16)


def test_stop_token_is_reported_and_kills_the_slot(bench):
    m = Machine(bench)
    assert m.step(**m.start(0, [9], stop=(30, 10))).tolist() == [(0, 10, abi.PK_ROW_STOP, 2, 0.0, 0)]
    assert m.step(rows=[(0, 1, 1)]).tolist() == [(0, -1, abi.PK_ROW_DEAD, 1, 0.0, 0)]
    assert m.b.get("length", 1).tolist() == [1] and m.b.get("tokens", 2).tolist() == [9, 10]


def test_max_length_counts_the_new_token(bench):
    m = Machine(bench)
    assert m.step(**m.start(0, [9, 10], max_length=4))["flags"].tolist() == [0]
    assert m.step(rows=[(0, 1, 1)]).tolist() == [(0, 12, abi.PK_ROW_LENGTH, 4, 0.0, 0)]
    assert m.step(rows=[(0, 1, 1)])["flags"].tolist() == [abi.PK_ROW_DEAD]


def test_stop_at_the_last_position_sets_both_flags(bench):
    m = Machine(bench)
    assert m.step(**m.start(0, [9, 10], max_length=3, stop=(11,)))["flags"].tolist() == [abi.PK_ROW_STOP | abi.PK_ROW_LENGTH]


def test_full_context_kills_the_slot_whatever_max_length_says(bench):
    m = Machine(bench)
    m.step(**{**m.start(0, list(range(32))), "rows": [(0, 16, 0)]})
    result = m.step(rows=[(0, 16, 1)])
    assert result.tolist() == [(0, 32, abi.PK_ROW_LENGTH, 33, 0.0, 0)]


def test_dead_rows_write_to_the_scratch_page_and_live_ones_go_on(bench):
    m = Machine(bench)
    a, c = m.start(0, [1, 2], stop=(3,)), m.start(1, [20])
    m.step(**{k: a[k] + c[k] for k in a})
    result = m.step(rows=[(0, 1, 1), (1, 1, 1), (3, 2, 1)])
    assert result["flags"].tolist() == [abi.PK_ROW_DEAD, 0, abi.PK_ROW_DEAD] and result["token"].tolist() == [-1, 22, -1]
    assert m.b.get("token_page", 4).tolist() == [0, 5, 0, 0]


def test_slot_can_be_used_again(bench):
    m = Machine(bench)
    m.step(**m.start(0, [1, 2], stop=(3,)))
    assert m.step(**m.start(0, [7])).tolist() == [(0, 8, 0, 2, 0.0, 0)]


def test_bias_mask_and_nan_of_a_new_slot(bench):
    table = np.full((V, V), -3.0)
    table[np.arange(V), (np.arange(V) + 1) % V] = 4.0
    table[33, 7] = np.nan
    m = Machine(bench, table)
    parts = [m.start(0, [1], bias=((17, 50.0),)), m.start(1, [1], use_mask=1), m.start(2, [33])]
    fields = {k: [x for p in parts for x in p[k]] for k in parts[0]}
    result = m.step(**fields, masks=[(1, [0x0F00, 0])])
    assert result["token"].tolist() == [17, 8, -1] and result["flags"].tolist() == [0, 0, abi.PK_ROW_NAN]
    assert m.b.get("alive", 3).tolist() == [1, 1, 0]


def started(bench, table, use_mask):
    """A machine with four slots, of which 1 and 3 want masks or not, and their first tokens."""
    m = Machine(bench, table)
    parts = [m.start(i, [3 + i, 30 - i], seed=70 + i, temperature=0.8 * (i > 0), top_p=0.9, n_logprobs=2, use_mask=use_mask * (i % 2)) for i in range(4)]
    fields = {k: [x for p in parts for x in p[k]] for k in parts[0]}
    return m, fields


def test_a_step_in_two_halves_gives_bit_for_bit_what_one_gives(bench, rng):
    table = rng.normal(0, 3, (V, V))
    found = []
    for use_mask in (0, 1):
        m, fields = started(bench, table, use_mask)
        seen = []
        held = abi.PK_ROW_SAMPLE | use_mask * abi.PK_ROW_HELD
        for i in range(6):
            # The last token of a prompt, rows of one token, and a step between that is given as a whole.
            fields = fields if i == 0 else {"rows": [(slot, 1, 1) for slot in range(4)]}
            if i == 3:
                fields = {"rows": [(0, 1, 1), (2, 1, 1)]}
            rows = [(slot, n, held if slot % 2 else flags) for slot, n, flags in fields["rows"]]
            everything = [(3, [0xFFFFFFFF, 0xFF]), (1, [0xFFFFFFFF, 0xFF])]
            if use_mask and i != 3:
                n = m.begin(**(fields | {"rows": rows}))
                result = m.finish(n, everything)
            else:
                result = m.step(**fields)
            seen += [result.tobytes(), bytes(m.b.device.top), m.b.get("tokens", 4 * 33).tobytes(), m.b.get("length", 4).tobytes()]
        found.append(seen)
    assert found[0] == found[1]


def test_a_held_row_draws_under_its_mask_and_one_without_stays_as_it_was(bench):
    m, fields = started(bench, None, 1)
    rows = [(slot, n, flags | (slot % 2) * abi.PK_ROW_HELD) for slot, n, flags in fields["rows"]]
    before = m.b.device.done[0]
    n = m.begin(**(fields | {"rows": rows}))
    assert not m.b.device.wait(m.seq, 1000) and m.b.device.done[0] == before
    result = m.finish(n, [(1, [1 << 17, 0])])
    assert result["token"][1] == 17 and result["token"][3] == -1 and result["flags"][3] == abi.PK_ROW_DEAD and (result["token"][[0, 2]] >= 0).all()
    assert m.b.get("length", 4).tolist() == [2, 2, 2, 0] and m.b.get("alive", 4).tolist() == [1, 1, 1, 1]
    n = m.begin(rows=[(1, 1, rows[1][2]), (3, 2, rows[3][2])])
    result = m.finish(n, [(0, [1, 1]), (3, [0, 1 << 4]), (1, [1 << 9, 0])])
    assert result["token"].tolist() == [9, 36] and result["length"].tolist() == [4, 3] and not result["flags"].any()
    n = m.begin(rows=[(1, 1, rows[1][2]), (3, 1, rows[3][2])])
    assert m.finish(n, [])["flags"].tolist() == [abi.PK_ROW_DEAD] * 2, "the masks of the step before are of no use"
    n = m.begin(rows=[(1, 1, rows[1][2]), (3, 1, rows[3][2])])
    assert m.finish(n, [(1, [0, 0]), (3, [2, 0])])["flags"].tolist() == [abi.PK_ROW_NAN, 0], "nothing left by the mask"
    n = m.begin(rows=[(1, 1, rows[1][2]), (3, 1, rows[3][2])])
    assert m.finish(n, [(1, [1, 0]), (3, [2, 0])])["flags"].tolist() == [abi.PK_ROW_DEAD, 0], "a dead slot stays dead"


HELD_DRAFT = DRAFT | abi.PK_ROW_HELD
ANY = [0xFFFFFFFF, 0xFF]


def only(*tokens):
    """The mask of these tokens."""
    bits = sum(1 << t for t in tokens)
    return [bits & 0xFFFFFFFF, bits >> 32]


def test_guesses_of_a_held_row_are_each_drawn_under_a_mask_of_their_own(bench):
    m = Machine(bench)
    parts = [m.start(0, [1], use_mask=1), m.start(3, [20], use_mask=1), m.start(2, [5])]
    m.step(**{k: [x for p in parts for x in p[k]] for k in parts[0]}, masks=[(0, ANY), (3, ANY)])
    # 0 has [1, 2], 3 has [20, 21], 2 has [5, 6]; what a mask leaves where 4.0 is not allowed is the lowest token of equals.
    n = m.begin(texts=[(3, 2, [22, 23])], rows=[(2, 1, 1), (3, 3, HELD_DRAFT)])
    found = m.finish(n + 2, [(3, only(22, 30)), (3, only(9, 23)), (3, only(7, 8))])
    assert found.tolist() == [(2, 7, 0, 3, 0.0, 0), (3, 22, 0, 3, 0.0, 0), (3, 23, 0, 4, 0.0, 0), (3, 7, 0, 5, 0.0, 0)], "each mask at its own place"
    n = m.begin(texts=[(3, 5, [8, 9])], rows=[(3, 3, HELD_DRAFT)])
    found = m.finish(3, [(3, only(8)), (3, only(11)), (3, ANY)])
    assert found["token"].tolist() == [8, 11, -1] and found["length"].tolist() == [6, 7, 6], "a mask that forbids the guess ends it"
    n = m.begin(texts=[(3, 7, [12, 13, 14])], rows=[(3, 4, HELD_DRAFT)])
    found = m.finish(4, [(0, ANY), (3, ANY), (3, only(13, 15)), (2, ANY)])
    assert found["token"].tolist() == [12, 13, -1, -1] and found["flags"].tolist() == [0] * 4, "as many draws as masks"
    assert m.b.get("length", 4).tolist() == [1, 0, 2, 8] and m.b.get("tokens", 9, at=3 * 33).tolist() == [20, 21, 22, 23, 7, 8, 11, 12, 13]
    n = m.begin(texts=[(3, 9, [14])], rows=[(0, 1, HELD_DRAFT), (3, 2, HELD_DRAFT)])
    found = m.finish(3, [(0, only(39))])
    assert found["token"].tolist() == [39, -1, -1] and found["flags"].tolist() == [0, abi.PK_ROW_DEAD, abi.PK_ROW_DEAD], "without a mask it stays as it was"
    n = m.begin(rows=[(3, 1, abi.PK_ROW_SAMPLE | abi.PK_ROW_HELD)])
    assert m.finish(n, [(3, only(16, 14))]).tolist() == [(3, 14, 0, 10, 0.0, 0)]
    n = m.begin(texts=[(3, 10, [15])], rows=[(3, 2, HELD_DRAFT)])
    assert m.finish(2, [(3, only(15)), (3, [0, 0])])["flags"].tolist() == [0, abi.PK_ROW_NAN]
    with pytest.raises(PackError, match="n_masks is 5, it must be 0 to 4"):
        m.begin(rows=[(0, 1, HELD_DRAFT)])
        m.finish(1, [(0, ANY)] * 5)


def test_held_guesses_give_bit_for_bit_what_masked_steps_of_one_token_give(bench, rng):
    """Seeded draws with penalties, stop tokens and log-probabilities, whatever was guessed and whatever is in the step beside them."""
    table, masks = rng.normal(0, 3, (V, V)), [[int(x) for x in rng.integers(1, 1 << 31, 2)] for _ in range(24)]
    params = {"temperature": 0.9, "seed": 5, "top_k": 9, "top_p": 0.95, "repetition_penalty": 1.2, "n_logprobs": 0, "use_mask": 1, "max_length": 20}

    def answer(n_guesses, guess):
        m = Machine(bench, table)
        fields = m.start(1, [3, 4], **params)
        other = m.start(0, [7, 8], temperature=0.7, seed=1)
        m.step(**{k: fields[k] + other[k] for k in fields}, masks=[(1, masks[0])])
        known, told = 3, []
        while known < 20:
            n = min(n_guesses, 19 - known)
            rows = [(0, 1, 1), (1, 1 + n, HELD_DRAFT if n_guesses else HELD_DRAFT & ~abi.PK_ROW_DRAFT)]
            m.begin(texts=[(1, known, guess(known, n))] if n else [], rows=rows if known < 12 else rows[1:])
            results = m.finish((known < 12) + 1 + n, [(1, mask) for mask in masks[known - 2 :][: 1 + n]])
            mine = results[(results["slot"] == 1) & (results["token"] >= 0)]
            told += mine.tolist()
            known += len(mine)
        return told, m.b.get("tokens", 20, at=33).tolist()

    plain, text = answer(0, None)
    assert len(plain) == 17 and plain[-1][2] == abi.PK_ROW_LENGTH
    assert answer(2, lambda known, n: text[known : known + n]) == (plain, text), "all right"
    assert answer(2, lambda known, n: [(t + known % 2) % V for t in text[known : known + n]]) == (plain, text), "every second wrong"
    assert answer(1, lambda known, n: [0] * n) == (plain, text), "all wrong"


def test_halves_of_steps_come_in_order(bench):
    m = Machine(bench)
    m.step(**m.start(0, [1], use_mask=1), masks=[(0, [4, 0])])
    held = abi.PK_ROW_SAMPLE | abi.PK_ROW_HELD
    with pytest.raises(PackError, match="step 1 has not been begun, or is finished"):
        m.finish(1, [])
    m.begin(rows=[(0, 1, held)])
    with pytest.raises(PackError, match="step 2 is to be finished, not 7"):
        m.finish(1, [], seq=7)
    with pytest.raises(PackError, match="mask 0 names slot 4 of 4"):
        m.finish(1, [(4, [1, 1])])
    with pytest.raises(PackError, match="step 3: step 2 is not finished"):
        m.step(rows=[(0, 1, 1)])
    m.seq = 2
    assert m.finish(1, [(0, [4, 0])])["token"].tolist() == [2]


def test_results_lie_in_a_ring_and_top_entries_with_their_row(bench):
    m = Machine(bench)
    a, c = m.start(0, [1]), m.start(1, [5], n_logprobs=2)
    result = m.step(**{k: a[k] + c[k] for k in a})
    assert result["n_top"].tolist() == [0, 2] and result["logprob"][1] < 0
    top = np.frombuffer(bytes(m.b.device.top), [("token", "i4"), ("logprob", "f4")]).reshape(3, 4, 3)
    assert top[1, 1]["token"][:2].tolist() == [6, 0]
    np.testing.assert_allclose(top[1, 1]["logprob"][0], result["logprob"][1])
    before = bytes(m.b.device.results)[RESULT.itemsize * 4 : RESULT.itemsize * 8]
    m.step(rows=[(0, 1, 1)])
    m.step(rows=[(0, 1, 1)])
    assert bytes(m.b.device.results)[RESULT.itemsize * 4 : RESULT.itemsize * 8] == before


BAD = {
    "row 0 names slot 4 of 4": {"rows": [(4, 1, 1)]},
    "row 0 names slot -1 of 4": {"rows": [(-1, 1, 1)]},
    "row 0 has 0 tokens": {"rows": [(0, 0, 1)]},
    "n_tokens is 17, it must be 0 to 16": {"rows": [(0, 17, 1)]},
    "the rows have 1 tokens, n_tokens is 2": {"rows": [(0, 1, 1)], "head": {"n_tokens": 2}},
    "1 tokens are drawn, n_samples is 0": {"rows": [(0, 1, 1)], "head": {"n_samples": 0}},
    "n_rows is 5, it must be 0 to 4": {"rows": [(0, 1, 0)] * 5},
    "row 0 waits for a mask and draws nothing": {"rows": [(0, 1, abi.PK_ROW_HELD)]},
    "row 0 waits for a mask and draws nothing .flags 225": {"rows": [(0, 1, 1 | abi.PK_ROW_HELD | abi.PK_ROW_DRAFT | abi.PK_ROW_SCORE)]},
    "n_payload is -1": {"head": {"n_payload": -1}},
    "new slot 0 names slot 9 of 4": {"news": [(9, 0, sampling(), [])]},
    "new slot 0 has length 33 of at most 32": {"news": [(0, 33, sampling(), [])]},
    "new slot 0 has 5 bias entries of at most 4": {"news": [(0, 0, sampling(n_bias=5), [])]},
    "new slot 0's bias lies at payload 0, which has 0 words": {"news": [(0, 0, sampling(n_bias=1), [])]},
    "new slot 0 biases token 40 of 40": {"news": [(0, 0, sampling(), [(40, 1.0)])]},
    "new slot 0 wants 4 log-probabilities of at most 3": {"news": [(0, 0, sampling(n_logprobs=4), [])]},
    "page write 0 has index 4 of 4": {"pages": [(0, 4, 1)]},
    "page write 0 names page -1": {"pages": [(0, 0, -1)]},
    "text 0 ends at position 34 of 33": {"texts": [(0, 30, [1, 2, 3, 4])]},
    "text 0 ends at position 0 of 33": {"texts": [(0, -1, [1])]},
    "mask 0 ends at payload 2 of 1": {"masks": [(0, [1])]},
    "row 0 ends at position 33 of slot 0": {"news": [(0, 32, sampling(), [])], "rows": [(0, 1, 1)]},
}


@pytest.mark.parametrize("sentence", list(BAD), ids=str)
def test_input_that_would_leave_the_state_is_refused(bench, sentence):
    m = Machine(bench)
    with pytest.raises(PackError, match=sentence):
        m.step(**BAD[sentence])


def test_counters_count_steps_and_nothing_is_allocated_in_them(bench):
    m = Machine(bench)
    m.step(**m.start(0, [1]))
    before = m.b.device.counters()
    for _ in range(5):
        m.step(rows=[(0, 1, 1)])
    after = m.b.device.counters()
    assert after["n_steps"] == before["n_steps"] + 5
    assert after["n_allocations"] == before["n_allocations"] and after["allocated_bytes"] == before["allocated_bytes"]


def test_a_program_with_prepare_can_be_timed_without_input(bench):
    m = Machine(bench)
    m.step(**m.start(0, [1]))
    us = m.b.device.run(8, 4, 3, is_timed=True)
    assert len(us) == 6 and all(t >= 0 for t in us)
    assert m.b.get("length", 4).tolist() == [1, 0, 0, 0] and m.step(rows=[(0, 1, 1)])["token"].tolist() == [3]


def test_wait_gives_up_when_the_time_is_over(bench):
    m = Machine(bench)
    assert not m.b.device.wait(99, 1000)


def test_workspace_that_is_too_small_is_refused_with_both_numbers(bench):
    m = Machine(bench)
    program = Program()
    program.sample(Tensor(4096, S, V, abi.PK_F32))
    n = m.b.device.workspace_bytes(program)
    with pytest.raises(PackError, match=f"the workspace has {n - 1} bytes, this program needs {n}"):
        m.b.device.load(program, [], (4096, n - 1))
