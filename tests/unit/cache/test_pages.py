"""Pages are neither lost nor handed out twice, and the check of that is itself checked."""

from __future__ import annotations

import pytest
from paddock_runner.cache.pages import SCRATCH_PAGE, PageFault, PagePool


def test_every_page_but_the_scratch_page_is_handed_out_once() -> None:
    pool = PagePool(9)
    pages = [*pool.take(3), *pool.take(0), *pool.take(5)]
    assert sorted(pages) == list(range(1, 9)) and SCRATCH_PAGE not in pages
    assert pages[:3] == [1, 2, 3]
    assert pool.n_free == 0 and pool.n_usable == 8
    with pytest.raises(PageFault):
        pool.take(1)
    pool.give(pages)
    assert pool.n_free == 8
    pool.check([])


def test_a_page_given_back_twice_is_noticed_and_nothing_changes() -> None:
    pool = PagePool(5)
    pages = pool.take(3)
    pool.give(pages[:1])
    with pytest.raises(PageFault):
        pool.give([pages[1], pages[0]])
    pool.check([pages[1:]])
    with pytest.raises(PageFault):
        pool.give([SCRATCH_PAGE])


def test_pages_join_as_memory_is_attached() -> None:
    pool = PagePool(9, n_attached=3)
    assert (pool.n_free, pool.n_unattached) == (2, 6)
    pool.grow(6)
    pool.grow(4)
    assert pool.take(5) == [1, 2, 3, 4, 5]
    pool.grow(100)
    assert pool.take(3) == [6, 7, 8] and pool.n_unattached == 0


def test_the_check_notices_lost_shared_and_wrongly_marked_pages() -> None:
    pool = PagePool(6)
    pages = pool.take(3)
    pool.check([pages])
    with pytest.raises(PageFault, match="lost"):
        pool.check([pages[:2]])
    with pytest.raises(PageFault, match="twice"):
        pool.check([pages, pages[:1]])
    with pytest.raises(PageFault, match="twice"):
        PagePool(6).check([[1]])
    pool._is_out[pages[0]] = 0
    with pytest.raises(PageFault, match="marked"):
        pool.check([pages])
