"""The input block says what pack.h wants, only differences, and the calendar calls when a slot needs something."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import replace

import pytest
from paddock_runner.cache.ledger import Holding
from paddock_runner.cache.prefix import Node
from paddock_runner.engine.request import Phase, Request
from paddock_runner.engine.sampling import place
from paddock_runner.engine.slots import SlotTable
from paddock_runner.errors import UsageError
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.wire.messages import Ask, AskView

SIZES = StateSizes(n_slots=4, max_ctx_tokens=32, page_tokens=4, n_pages=40, n_vocab=70, max_step_tokens=16, max_step_rows=8, max_bias=4, max_top=2)


class Block:
    """The input block, read back through the generated structures."""

    def __init__(self, address: int) -> None:
        self.head = abi.pk_step_head.from_address(address)
        at = address + ctypes.sizeof(abi.pk_step_head)
        parts = []
        for layout, n in (
            (abi.pk_new_slot, self.head.n_new), (abi.pk_row, self.head.n_rows), (abi.pk_page_write, self.head.n_pages),
            (abi.pk_text, self.head.n_texts), (abi.pk_mask_write, self.head.n_masks), (ctypes.c_int32, self.head.n_payload),
        ):  # fmt: skip
            parts.append((layout * n).from_address(at)[:])
            at += ctypes.sizeof(layout) * n
        self.new, rows, pages, texts, masks, self.payload = parts
        self.rows = [(r.slot, r.n_tokens, r.flags) for r in rows]
        self.pages = [(p.slot, p.index, p.page) for p in pages]
        self.texts = [(t.slot, t.position, t.n, t.offset) for t in texts]
        self.masks = [(m.slot, m.offset) for m in masks]


def started(slots: SlotTable, prompt: list[int], pages: list[int], cached_pages: int = 0, max_tokens: int = 20, **fields: object) -> Request:
    view = AskView(memoryview(Ask(1, array("i", prompt), max_tokens=max_tokens, **fields).encode()))  # type: ignore[arg-type]
    placed = place(view, SIZES)
    assert isinstance(placed, tuple)
    request = Request(view, 0, 0, placed[1], placed[0])
    request.holding = Holding(Node(None, b"", [], 0), pages)
    request.done_tokens = cached_pages * SIZES.page_tokens
    slots.take(request)
    slots.start(request)
    return request


def decoding(slots: SlotTable, n_prompt: int, pages: list[int], max_tokens: int = 20) -> Request:
    request = started(slots, list(range(n_prompt)), pages, max_tokens=max_tokens)
    slots.compose(slots.seq + 1, [(request, n_prompt, True)], ())
    slots.join(request, n_prompt)
    return request


def test_a_new_slot_brings_parameters_table_text_and_bias() -> None:
    slots = SlotTable(SIZES)
    first = started(slots, [5, 6, 7, 8, 9, 10], [3, 4], cached_pages=1, bias=((9, 1.5), (8, -2.0)), seed=77)
    second = started(slots, [1, 2], [9])
    assert slots.compose(1, [(first, 2, True), (second, 1, False)], ()) == (3, 2, 1)
    block = Block(slots.address)
    assert (block.head.seq, block.head.n_tokens, block.head.n_samples) == (1, 3, 1)
    assert [(n.slot, n.length, n.bias_offset, n.sampling.seed, n.sampling.n_bias) for n in block.new] == [(0, 4, 0, 77, 2), (1, 0, 6, 0, 0)]
    assert block.rows == [(0, 2, abi.PK_ROW_SAMPLE), (1, 1, 0)]
    assert block.pages == [(0, 0, 3), (0, 1, 4), (1, 0, 9)]
    assert block.texts == [(0, 4, 2, 4), (1, 0, 2, 6)], "what is cached need not be told"
    assert block.payload[4:6] == [9, 10] and block.payload[6:] == [1, 2]
    bias = (abi.pk_bias * 2).from_buffer_copy(array("i", block.payload[:4]))
    assert [(b.token, b.value) for b in bias] == [(9, 1.5), (8, -2.0)]


def test_a_repetition_penalty_gets_the_cached_tokens_too() -> None:
    slots = SlotTable(SIZES)
    request = started(slots, [5, 6, 7, 8, 9, 10], [3, 4], cached_pages=1, repetition_penalty=1.1)
    slots.compose(1, [(request, 2, True)], ())
    block = Block(slots.address)
    assert block.texts == [(0, 0, 6, 0)] and block.payload == [5, 6, 7, 8, 9, 10]


def test_when_nothing_changes_only_the_number_does() -> None:
    slots = SlotTable(SIZES)
    for pages in ([1, 2], [3, 4]):
        decoding(slots, 5, pages)
    slots.compose(3, (), ())
    size = ctypes.sizeof(abi.pk_step_head) + 2 * ctypes.sizeof(abi.pk_row)
    before = ctypes.string_at(slots.address, size)
    assert slots.compose(4, (), ()) == (2, 2, 2)
    after = ctypes.string_at(slots.address, size)
    assert after[8:] == before[8:] and Block(slots.address).head.seq == 4
    assert Block(slots.address).rows == [(0, 1, 1), (1, 1, 1)]


def test_rows_come_and_go_in_any_order() -> None:
    slots = SlotTable(SIZES)
    a, b, c = (decoding(slots, 3, [p, p + 1, p + 2, p + 3, p + 4, p + 5]) for p in (1, 11, 21))
    slots.compose(4, (), ())
    slots.leave(a.slot)
    slots.leave(a.slot)
    slots.compose(5, (), ())
    assert Block(slots.address).rows == [(2, 1, 1), (1, 1, 1)]
    slots.leave(c.slot)
    d = decoding(slots, 3, [30, 31, 32, 33, 34, 35])
    slots.compose(7, (), ())
    assert Block(slots.address).rows == [(1, 1, 1), (d.slot, 1, 1)]
    slots.leave(b.slot), slots.leave(d.slot)
    slots.join(c, 9)
    slots.compose(8, (), ())
    assert Block(slots.address).rows == [(c.slot, 1, 1)]
    assert slots.launched(c.slot) == 10


def test_context_is_the_sum_of_what_standing_rows_have_before_them() -> None:
    slots = SlotTable(SIZES)
    a, b = (decoding(slots, 3, [p, p + 1, p + 2, p + 3, p + 4, p + 5]) for p in (1, 11))
    begun = slots.seq

    def step(number: int, is_apart: bool = False) -> None:
        slots.compose(begun + number, (), (), is_apart=is_apart)
        assert slots.context == sum(slots.launched(slot) for slot in slots.decode)

    before = slots.context
    step(1)
    assert slots.context == before + 2
    step(2, is_apart=True)
    assert slots.context == before + 2
    slots.mark(a, slots.launched(a.slot))
    step(3)
    slots.leave(a.slot), slots.leave(a.slot)
    step(4)
    slots.join(a, 9)
    step(5)
    slots.leave(a.slot), slots.leave(b.slot)
    assert slots.context == 0 and not slots.decode


def test_the_calendar_calls_at_the_end_of_the_pages_and_of_the_length() -> None:
    slots = SlotTable(SIZES)
    request = decoding(slots, 3, [1, 2], max_tokens=9)
    calls = []
    for seq in range(2, 20):
        for slot in slots.due():
            calls.append((seq, slots.launched(slot)))
            if slots.launched(slot) + 1 >= request.max_length:
                slots.leave(slot)
            else:
                assert request.holding is not None
                request.holding.pages.append(30)
                slots.write_pages(request, 1)
                slots.mark(request, slots.launched(slot))
        slots.compose(seq, (), ())
        if calls and calls[-1][0] == seq and slots.decode:
            assert Block(slots.address).pages == [(0, 2, 30)]
    assert calls == [(7, 8), (10, 11)]
    assert slots.launched(0) == 11 and slots.decode == []


def test_single_rows_count_for_themselves_and_wait_for_their_mask() -> None:
    slots = SlotTable(SIZES)
    standing = decoding(slots, 3, [1, 2, 3, 4])
    masked = started(slots, [1, 2, 3], [5], use_mask=True)
    slots.compose(2, [(masked, 3, True)], ())
    slots.join(masked, 3, has_row=False)
    slots.compose(3, (), ())
    assert slots.launched(masked.slot) == 3 and slots.launched(standing.slot) == 5 and not slots.is_spent(masked.slot)
    assert slots.compose(4, (), [(masked.slot, 1)]) == (2, 2, 2)
    slots.count_row(masked.slot)
    block = Block(slots.address)
    assert block.rows == [(0, 1, 1), (1, 1, 1 | abi.PK_ROW_HELD)] and not block.masks and not block.payload
    assert slots.launched(masked.slot) == 4 and slots.is_spent(masked.slot)
    slots.count_row(masked.slot, -1)
    assert slots.launched(masked.slot) == 3 and not slots.is_spent(masked.slot)
    slots.compose(5, (), ())
    assert Block(slots.address).rows == [(0, 1, 1)] and not Block(slots.address).masks


def test_staged_page_writes_of_a_slot_that_is_given_up_are_withdrawn() -> None:
    slots = SlotTable(SIZES)
    a, b = decoding(slots, 3, [1]), decoding(slots, 3, [2])
    for request in (a, b):
        assert request.holding is not None
        request.holding.pages.append(7 + request.slot)
        slots.write_pages(request, 1)
    slots.leave(a.slot)
    slots.give(a.slot)
    slots.compose(3, (), ())
    assert Block(slots.address).pages == [(1, 1, 8)]


def test_tokens_of_an_answer_are_put_together_from_prompt_and_history() -> None:
    slots = SlotTable(SIZES)
    request = decoding(slots, 3, [1, 2, 3])
    slots.history[request.slot, 4:8] = (50, 51, 52, 53)
    ids = array("i", slots.tokens_of(request, 1, 7)).tolist()
    assert ids == [1, 2, 50, 51, 52, 53]
    assert array("i", slots.tokens_of(request, 4, 6)).tolist() == [51, 52]
    assert array("i", slots.tokens_of(request, 0, 2)).tolist() == [0, 1]


def test_a_start_that_does_not_fit_the_block_waits_for_the_next_step() -> None:
    slots = SlotTable(replace(SIZES, n_slots=8, max_step_tokens=8))
    n = 0
    request = started(slots, list(range(31)), list(range(1, 9)), max_tokens=1)
    while slots.has_room(request, 8):
        started(slots, list(range(31)), list(range(1, 9)), max_tokens=1)
        n += 1
    assert 1 <= n < 7
    slots.compose(1, [(request, 8, False)], ())
    assert slots.has_room(request, 8)


def test_slots_without_rows_for_all_of_them_are_refused() -> None:
    with pytest.raises(UsageError, match="4 slots"):
        SlotTable(replace(SIZES, max_step_rows=3))


def test_slots_are_handed_out_and_taken_back() -> None:
    slots = SlotTable(SIZES)
    requests = [started(slots, [1], [i + 1], n_logprobs=2) for i in range(4)]
    assert slots.n_free == 0 and slots.n_top == 4 and [r.slot for r in requests] == [0, 1, 2, 3]
    assert requests[0].phase == Phase.WAITING
    for request in requests:
        slots.give(request.slot)
    assert slots.n_free == 4 and slots.n_top == 0 and slots.request_of == [None] * 4


def test_a_step_without_standing_rows_moves_what_is_due_and_leaves_lengths() -> None:
    slots = SlotTable(SIZES)
    one = decoding(slots, 3, [1, 2])
    two = decoding(slots, 4, [3, 4, 5])
    guest = started(slots, [7, 8], [6])
    before = [slots.launched(r.slot) for r in (one, two)]
    assert slots.compose(slots.seq + 1, [(guest, 2, True)], (), is_apart=True) == (2, 1, 1)
    slots.join(guest, 2)
    assert Block(slots.address).rows == [(guest.slot, 2, abi.PK_ROW_SAMPLE)]
    assert [slots.launched(r.slot) for r in (one, two)] == before
    found = []
    for _ in range(8):
        found.append([(slot, slots.launched(slot)) for slot in slots.due()])
        slots.compose(slots.seq + 1, (), ())
        assert sorted(Block(slots.address).rows) == [(r.slot, 1, abi.PK_ROW_SAMPLE) for r in (one, two, guest)]
    assert found[2] == [(guest.slot, 4)] and found[4] == [(one.slot, 8)], "their pages are full then"
