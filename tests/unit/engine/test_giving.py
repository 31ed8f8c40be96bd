"""An idle runner gives memory back: what the cache knows stays, what holds nothing goes, and comes again when it is needed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from paddock_runner.cache.pages import PageFault, PagePool
from paddock_runner.engine.policy import Policy
from paddock_runner.wire.messages import ErrorCode

from tests.soak.fake_device import FakeDevice, alone
from tests.soak.rig import SIZES, Answer, Rig

LARGE = replace(SIZES, n_slots=4, max_ctx_tokens=256, n_pages=300, max_step_tokens=64, max_step_rows=16)
POLICY = Policy(lead_ms=0.0, gather_ms=0.0, idle_release_s=10.0)


def right(answer: Answer) -> bool:
    ask = answer.ask
    return answer.tokens == alone(list(memoryview(ask.prompt)), ask.max_tokens, LARGE.n_vocab, LARGE.max_ctx_tokens, ask.seed, ask.stop)


def rest(rig: Rig) -> int:
    """Turns of an idle runner until it sleeps for good; how many."""
    for n in range(100):
        ms = rig.runner.giver.turn()
        rig.engine.check()
        if ms is None:
            return n
        rig.device.now_ns += 1_000_000 * ms
    raise AssertionError("it never sleeps")


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_memory_goes_back_when_idle_and_nothing_that_is_cached_is_forgotten(run_ahead: int) -> None:
    rig = Rig(LARGE, run_ahead=run_ahead, policy=POLICY, device=FakeDevice(LARGE, run_ahead, n_attached=8))
    texts = [[(100 * k + i) % 1000 for i in range(200)] for k in range(4)]
    for text in texts:
        rig.ask(text, 20)
    rig.run()
    full = rig.engine.ledger.pool.n_attached
    tree = rig.engine.ledger.tree
    tree.evict(60)
    n_cached = tree.n_pages
    assert rest(rig) > 1
    pool = rig.engine.ledger.pool
    assert pool.n_attached < full - 40 and tree.n_pages == n_cached
    assert pool.n_attached <= 1 + n_cached + rig.engine.low_pages + 4 and rig.device.n_attached == pool.n_attached
    again = [rig.ask(text, 8) for text in texts]
    rig.run()
    assert all(map(right, again)) and sum(a.done.cached_tokens for a in again) > 300
    assert rig.engine.ledger.pool.n_attached > pool.n_usable // 4
    rig.assert_empty()
    rig.close()


def test_memory_stays_while_there_are_requests_and_for_a_while_after() -> None:
    rig = Rig(LARGE, policy=POLICY)
    rig.ask([1, 2, 3], 30)
    rig.turn()
    assert rig.runner.giver.turn() is None
    rig.run()
    assert rig.runner.giver.turn() == 10_001 and rig.engine.ledger.pool.n_attached == 300
    rig.close()


def test_nothing_goes_back_where_that_is_switched_off() -> None:
    rig = Rig(LARGE, policy=replace(POLICY, idle_release_s=0.0))
    rig.ask([1, 2, 3], 3)
    rig.run()
    assert rig.runner.giver.turn() is None and rig.engine.ledger.pool.n_attached == 300
    rig.close()


def test_a_page_in_use_does_not_lose_its_memory() -> None:
    pool = PagePool(20)
    pages = pool.take(10)
    with pytest.raises(PageFault, match="in use"):
        pool.shrink(5)
    pool.give(pages[5:])
    pool.shrink(7)
    assert pool.n_attached == 7 and pool.n_free == 1 and pool.take(1) == [6]
    pool.grow(20)
    assert pool.n_free == 13


def short(rig: Rig, n_pages: int) -> None:
    """Rests until memory was given back, and somebody takes all but n_pages of it."""
    rig.engine.ledger.tree.evict(LARGE.n_pages)
    rest(rig)
    rig.device.most_pages = max(n_pages, rig.device.n_attached)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_memory_that_others_took_is_done_without_and_had_again_when_it_is_free(run_ahead: int) -> None:
    rig = Rig(LARGE, run_ahead=run_ahead, policy=POLICY, device=FakeDevice(LARGE, run_ahead, n_attached=8))
    texts = [[(100 * k + i) % 1000 for i in range(180)] for k in range(6)]
    asked = [rig.ask(text, 40) for text in texts]
    rig.run()
    short(rig, 120)  # two of them, not four
    again = [rig.ask(text, 40) for text in texts]
    rig.run()
    pool = rig.engine.ledger.pool
    assert all(map(right, asked + again)) and pool.n_attached == 120
    rig.device.most_pages = LARGE.n_pages
    later = [rig.ask(text, 40) for text in texts]
    rig.run()
    assert all(map(right, later)) and pool.n_attached > 200
    rig.assert_empty()
    rig.close()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_request_that_alone_needs_more_than_others_left_is_told_and_those_behind_it_go_on(run_ahead: int) -> None:
    rig = Rig(LARGE, run_ahead=run_ahead, policy=POLICY, device=FakeDevice(LARGE, run_ahead, n_attached=8))
    rig.ask([1, 2, 3], 3)
    rig.run()
    short(rig, 30)
    long_prompt, long_answer, fits = rig.ask(list(range(200)), 4), rig.ask([5, 6, 7], 200), rig.ask([7, 8, 9], 20)
    rig.run()
    assert [a.done.error for a in (long_prompt, long_answer, fits)] == [ErrorCode.MEMORY, ErrorCode.MEMORY, ErrorCode.NONE]
    assert "--idle-release-s" in str(long_prompt.done.to_error()) and right(fits)
    assert long_answer.tokens == alone([5, 6, 7], 200, LARGE.n_vocab, LARGE.max_ctx_tokens)[: len(long_answer.tokens)] and len(long_answer.tokens) > 100
    rig.device.most_pages = LARGE.n_pages
    again = rig.ask(list(range(200)), 4)
    rig.run()
    assert right(again)
    rig.assert_empty()
    rig.close()


@pytest.mark.parametrize("seed", range(12))
def test_memory_that_comes_and_goes_changes_no_answer(seed: int) -> None:
    chance = random.Random(seed)
    run_ahead = chance.choice([0, 1, 2])
    rig = Rig(LARGE, run_ahead=run_ahead, policy=replace(POLICY, idle_release_s=0.001), device=FakeDevice(LARGE, run_ahead, seed, n_attached=8))
    answers = []
    for _ in range(8):
        for _ in range(chance.randrange(1, 8)):
            text = [(37 * chance.randrange(3) + i) % 1000 for i in range(chance.randrange(1, 200))]
            answers.append(rig.ask(text, chance.randrange(1, 50)))
        for _ in range(chance.randrange(100)):
            rig.device.most_pages = max(chance.randrange(70, 300), rig.device.n_attached)
            rig.turn()
            rig.engine.check()
        if chance.random() < 0.5:
            rig.run()
            rest(rig)
    rig.run()
    assert all(map(right, answers))
    rig.assert_empty()
    rig.close()
