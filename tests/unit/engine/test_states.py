"""Prefixes of models with recurrent layers: where states are saved, who starts from them, and what happens when there are few."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paddock_runner.cache.pages import PageFault, PagePool
from paddock_runner.cache.prefix import PrefixTree
from paddock_runner.cache.states import StatePool
from paddock_runner.engine.policy import Policy
from paddock_runner.wire.messages import Reason

from tests.soak.fake_device import alone
from tests.soak.rig import SIZES, Answer, Rig

BIG = replace(SIZES, n_slots=8, max_ctx_tokens=256, n_pages=513, max_step_tokens=64, max_step_rows=16, recurrent_bytes=64, n_snapshots=24)
POLICY = Policy(share_tokens=8)


def right(answer: Answer) -> bool:
    ask = answer.ask
    return answer.tokens == alone(list(memoryview(ask.prompt)), ask.max_tokens, BIG.n_vocab, BIG.max_ctx_tokens, ask.seed, ask.stop)


@pytest.fixture(params=[0, 2])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(BIG, run_ahead=request.param, policy=POLICY)


def test_the_next_turn_goes_on_from_the_last_full_page_of_the_answer(rig: Rig) -> None:
    first = rig.ask(list(range(100)), 21)
    rig.run()
    second = rig.ask([*range(100), *first.tokens, 7, 8, 9], 5)
    rig.run()
    assert second.done.cached_tokens == 120 and right(second)
    rig.assert_empty()
    rig.close()


def test_an_answer_that_ends_in_steps_already_enqueued_leaves_a_state_that_is_right(rig: Rig) -> None:
    for n in range(1, 12):
        prompt = [999 - n, *range(2, 22)]
        expected = alone(prompt, 40, 1000, 256)
        stop = next(i for i in range(n, 40) if expected[i] not in expected[:i])
        first = rig.ask(prompt, 40, stop=(expected[stop],))
        rig.run()
        assert first.done.reason == Reason.STOP
        second = rig.ask([*prompt, *first.tokens, 5], 5)
        rig.run()
        assert right(second) and second.done.cached_tokens >= len(prompt) + len(first.tokens) - 8, "also when all places are taken"
    assert not rig.engine.ledger.states.n_free  # type: ignore[union-attr]
    rig.close()


def test_the_end_of_a_prompt_is_kept_for_those_who_answer_it_otherwise(rig: Rig) -> None:
    rig.ask(list(range(50)), 20)
    rig.run()
    other = rig.ask([*range(50), 900, 901], 4)
    rig.run()
    assert other.done.cached_tokens == 48 and right(other)
    rig.close()


def test_a_place_where_prompts_part_is_kept_from_the_second_time_on(rig: Rig) -> None:
    cached = []
    for i in range(3):
        answer = rig.ask([*range(40), *range(300 + 50 * i, 340 + 50 * i)], 3)
        rig.run()
        assert right(answer)
        cached.append(answer.done.cached_tokens)
    assert cached == [0, 0, 40]
    rig.close()


def test_a_burst_with_one_prefix_computes_it_once(rig: Rig) -> None:
    answers = [rig.ask([*range(120), 500 + i, 501 + i], 3) for i in range(8)]
    rig.run()
    assert all(map(right, answers))
    assert [a.done.cached_tokens for a in answers].count(120) == 7
    rig.close()


def test_one_that_parts_earlier_waits_for_the_state_where_it_parts(rig: Rig) -> None:
    answers = [rig.ask([*range(160), 1], 3), rig.ask([*range(80), *range(400, 440)], 3)]
    rig.run()
    assert all(map(right, answers)) and sorted(a.done.cached_tokens for a in answers) == [0, 80]
    rig.close()


def test_when_the_computer_of_a_shared_prefix_is_aborted_the_others_go_on(rig: Rig) -> None:
    first, second = rig.ask([*range(200), 1], 3), rig.ask([*range(200), 2], 3)
    rig.turn(), rig.turn()
    rig.abort(first)
    rig.run()
    assert right(second)
    rig.assert_empty()
    rig.close()


def test_the_states_used_longest_ago_are_forgotten_first() -> None:
    rig = Rig(replace(BIG, n_snapshots=3), policy=POLICY)
    prompts = [[999 - i, *range(40), 1] for i in range(3)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        rig.ask(prompt, 1)
        rig.run()
    again = [rig.ask(prompt, 1) for prompt in (prompts[0], prompts[2])]
    rig.run()
    assert [a.done.cached_tokens for a in again] == [40, 40] and rig.engine.ledger.states is not None
    assert rig.engine.ledger.states.n_free == 0
    rig.assert_empty()
    rig.close()


def test_without_room_for_states_nothing_is_shared_and_answers_are_right() -> None:
    rig = Rig(replace(BIG, n_snapshots=0))
    answers = [rig.ask([*range(60), i], 9) for i in range(4)]
    rig.run()
    assert all(map(right, answers)) and not any(a.done.cached_tokens for a in answers)
    rig.close()


def test_the_state_report_counts_places() -> None:
    rig = Rig(BIG, policy=POLICY)
    rig.ask(list(range(50)), 20)
    rig.run()
    rig.fronts[0].query()
    rig.turn()
    facts = rig.states[0].facts["states"]
    assert facts["all"] == 24 and facts["free"] + facts["prefix"] == 24 and facts["saved"] >= 2
    rig.close()


def test_a_place_with_two_owners_is_noticed() -> None:
    pool, pages = StatePool(2), PagePool(9)
    tree = PrefixTree(4, pages, pool)
    node, _ = tree.match(b"", 0, 0)
    leaf, _ = tree.extend(node, bytes(16), pages.take(1))
    place = pool.take()
    pool.attach(leaf, place)
    pool.check([])
    with pytest.raises(PageFault, match="once each"):
        pool.check([place])
