"""Holdings: what a request gets, shares and gives back."""

from __future__ import annotations

from array import array

import pytest
from paddock_runner.cache.ledger import Ledger
from paddock_runner.cache.pages import PageFault, PagePool

B = 4


def run(first: int, n: int) -> bytes:
    return array("i", range(first, first + n)).tobytes()


def ledger(n_pages: int = 20, n_attached: int | None = None) -> Ledger:
    return Ledger(PagePool(n_pages, n_attached), B, lambda n: n)


def test_a_start_takes_pages_for_its_whole_prompt_or_nothing() -> None:
    book = ledger(10)
    a = book.open(run(0, 18), 0, 0)
    assert a is not None and len(a.pages) == 5 and book.pool.n_free == 4
    assert book.open(run(50, 17), 0, 0) is None
    assert book.open(run(50, 16), 0, 1) is None
    b = book.open(run(50, 16), 0, 0)
    assert b is not None and book.n_available == 0
    book.check([a, b])
    assert book.add_pages(a, 1) == 0
    book.close(a), book.close(b)
    assert book.pool.n_free == 9
    book.check([])


def test_a_known_prefix_is_shared_but_never_the_whole_prompt() -> None:
    book = ledger()
    a = book.open(run(0, 16), 0, 0)
    assert a is not None
    book.settle(a, run(0, 16))
    b = book.open(run(0, 16), 0, 0)
    assert b is not None and b.cached_pages == 3 and b.pages[:3] == a.pages[:3] and b.pages[3] != a.pages[3]
    assert book.cached(run(0, 16), 0) == 12 and book.cached(run(0, 17), 0) == 16 and book.cached(run(0, 17), 1) == 0
    book.check([a, b])
    book.close(a), book.close(b)
    assert book.n_available == 19


def test_two_that_compute_the_same_do_not_hold_it_twice_and_the_longer_answer_is_kept() -> None:
    book = ledger()
    a, b = book.open(run(0, 8), 0, 0), book.open(run(0, 8), 0, 0)
    assert a is not None and b is not None
    book.settle(a, run(0, 8))
    book.settle(b, run(0, 8))
    assert b.node is a.node and b.private == [] and b.doubles == b.pages and a.doubles == []
    book.add_pages(b, 2)
    book.check([a, b])
    book.close(a)
    assert book.tree.n_evictable == 0, "the second stands on the pages of the first"
    book.close(b, run(8, 8))
    book.check([])
    assert book.tree.n_pages == 4 and book.cached(run(0, 17), 0) == 16


def test_out_of_pages_the_last_of_two_that_computed_the_same_keeps_one_copy() -> None:
    book = ledger(8)
    a, b = book.open(run(0, 8), 0, 0), book.open(run(0, 8), 0, 0)
    assert a is not None and b is not None
    book.settle(a, run(0, 8))
    book.settle(b, run(0, 8))
    assert book.add_pages(b, 1) == 1 and book.add_pages(b, 1) == 1 and book.add_pages(b, 1) == 1
    assert book.add_pages(b, 1) == 0, "the first still uses its copy"
    book.close(a)
    assert book.add_pages(b, 1) == 1 and b.doubles == [] and len(b.pages) == 6
    book.check([b])
    book.close(b, run(8, 16))
    book.check([])
    assert book.tree.n_pages == 6 and book.cached(run(0, 25), 0) == 24


def test_room_is_made_from_new_memory_first_and_from_forgetting_then() -> None:
    grown: list[int] = []

    def grow(n: int) -> int:
        grown.append(n)
        return n

    book = Ledger(PagePool(13, 5), B, grow)
    a = book.open(run(0, 16), 0, 0)
    assert a is not None and grown == []
    book.close(a, run(0, 16))
    b = book.open(run(100, 32), 0, 0)
    assert b is not None and grown == [13] and book.tree.n_pages == 4
    c = book.open(run(200, 8), 0, 0)
    assert c is not None and book.tree.n_pages == 2
    assert book.add_pages(c, 4) == 1, "one at a time when there are not plenty"
    book.check([b, c])


def test_pages_are_freed_ahead_of_need() -> None:
    book = ledger(9)
    a = book.open(run(0, 28), 0, 0)
    assert a is not None
    book.close(a, run(0, 28))
    book.free_ahead(1, 4)
    assert book.pool.n_free == 1
    book.free_ahead(2, 4)
    assert book.pool.n_free == 5 and book.tree.n_pages == 3


def test_distrusted_pages_are_not_found_again() -> None:
    book = ledger()
    first = book.open(run(0, 8), 0, 0)
    assert first is not None
    book.close(first, run(0, 8))
    bad = book.open(run(0, 16), 0, 0)
    assert bad is not None and bad.cached_pages == 2
    book.settle(bad, run(8, 8))
    sharer = book.open(run(0, 20), 0, 0)
    assert sharer is not None and sharer.cached_pages == 4
    book.distrust(bad)
    assert book.cached(run(0, 20), 0) == 8
    book.settle(sharer, run(16, 4))
    assert sharer.is_apart
    book.check([bad, sharer])
    book.close(bad), book.close(sharer, run(16, 4))
    book.check([])
    assert book.tree.n_pages == 2


def test_the_check_notices_a_page_in_two_holdings() -> None:
    book = ledger()
    a, b = book.open(run(0, 8), 0, 0), book.open(run(50, 8), 0, 0)
    assert a is not None and b is not None
    b.pages[0] = a.pages[0]
    with pytest.raises(PageFault):
        book.check([a, b])
