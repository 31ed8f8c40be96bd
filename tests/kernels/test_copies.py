"""Copies between pages and host memory are as if in order with the steps, though they may run beside them."""

from __future__ import annotations

import numpy as np
import pytest
from test_shared_steps import Attending, V

PAGE_BYTES = 1 << 20
BUSY = range(20, 80)
"""Pages that are copied first, so that the others have to wait for the link."""


@pytest.fixture
def model(bench, rng):
    m = Attending(bench, rng, PAGE_BYTES)
    m.b.device.alloc_host_pages(80)
    return m


def keep_busy(device, outward):
    for page in BUSY:
        if outward:
            device.page_out(page, page)
        else:
            device.page_in(page, page)


def host(device, places):
    return [bytes(device.host_page(place)) for place in places]


def test_a_page_that_is_taken_over_was_copied_before(model, rng):
    device = model.b.device
    prompt, other = (rng.integers(0, V, 40).tolist() for _ in range(2))
    model.start(0, prompt, [1, 2, 3])
    before = [device.read(device.kv_address + page * PAGE_BYTES, PAGE_BYTES) for page in (1, 2, 3)]
    for _ in range(3):
        keep_busy(device, True)
        for page in (1, 2, 3):
            device.page_out(page, page)
        model.start(1, other, [1, 2, 3])
        device.settle()
        assert host(device, (1, 2, 3)) == before
        for page in (1, 2, 3):
            device.page_in(page, page)
        device.settle()


@pytest.mark.parametrize("is_told_before", [False, True])
def test_a_row_waits_for_the_pages_that_come_for_it_and_others_do_not(model, rng, is_told_before):
    device = model.b.device
    prompt, other = (rng.integers(0, V, 40).tolist() for _ in range(2))
    first = model.start(0, prompt, [1, 2, 3])
    second = model.step(rows=[(0, 1, 1)])
    model.start(1, other, [4, 5, 6])
    for page in (1, 2):
        device.page_out(page, page)
    for turn in range(3):
        fields = {"news": [(2, 32, model.greedy(len(prompt)), [])], "texts": [(2, 0, prompt)], "pages": [(2, i, page) for i, page in enumerate((7, 8, 9))]}
        if is_told_before:
            model.step(**fields, rows=[(1, 1, 1)])
        keep_busy(device, False)
        for page in (1, 2):
            device.page_in(page, page + 6)
        model.step(rows=[(1, 1, 1)])
        told = {} if is_told_before else fields
        assert model.step(**told, rows=[(2, 8, 1)]) == first, turn
        assert model.step(rows=[(2, 1, 1)]) == second
        device.fill(device.kv_address + 7 * PAGE_BYTES, 0, 2 * PAGE_BYTES)


def test_copies_are_counted_and_what_is_done_can_be_read(model):
    device = model.b.device
    given, made = device.copied()
    assert given == made
    content = np.random.default_rng(1).integers(0, 100, PAGE_BYTES, np.uint8).tobytes()
    device.write(device.kv_address + 5 * PAGE_BYTES, content)
    keep_busy(device, True)
    device.page_out(5, 5)
    while device.copied()[1] < given + len(BUSY) + 1:
        pass
    assert host(device, [5]) == [content] and device.copied()[0] == given + len(BUSY) + 1
