"""The whole engine on a device that checks what it is told: order, sharing, ends in every phase, run-ahead, preemption."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from paddock_runner.engine.loop import Engine
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.report import device_us
from paddock_runner.errors import PackError, UsageError
from paddock_runner.wire.messages import ROW_SCORE, ErrorCode, Miss, Reason, RefusedCode

from tests.soak.fake_device import FakeDevice, alone
from tests.soak.rig import SIZES, Rig, ended_well, every_run_ahead, right, turns

BIG = replace(SIZES, n_slots=8, max_ctx_tokens=256, n_pages=513, max_step_tokens=256, max_step_rows=16)


run_ahead = every_run_ahead


def test_more_requests_than_slots_are_all_answered_right(run_ahead: int) -> None:
    rig = Rig(run_ahead=run_ahead)
    answers = [rig.ask([i, 2, 3, 4, 5, 6][: 2 + i % 5], 3 + i % 7, seed=i) for i in range(15)]
    rig.run()
    assert all(map(right, answers)) and all(map(ended_well, answers))
    assert [a.done.output_tokens for a in answers] == [len(a.tokens) for a in answers]
    rig.assert_empty()
    rig.close()


def test_an_answer_without_a_limit_fills_the_context_exactly(run_ahead: int) -> None:
    rig = Rig(run_ahead=run_ahead)
    answer = rig.ask([1, 2, 3], 0)
    rig.run()
    assert len(answer.tokens) == 61 and right(answer) and answer.done.reason == Reason.LENGTH
    rig.close()


def test_a_stop_token_ends_the_answer_and_is_its_last(run_ahead: int) -> None:
    rig = Rig(run_ahead=run_ahead)
    expected = alone([1, 2, 3], 20, 1000, 64)
    answer = rig.ask([1, 2, 3], 20, stop=(expected[4],))
    patient = rig.ask([1, 2, 3], 20, stop=(expected[4],), min_tokens=12)
    rig.run()
    assert answer.tokens == expected[:5] and answer.done.reason == Reason.STOP and answer.flags[-1] == 2
    assert right(patient) and len(patient.tokens) >= 12
    rig.close()


def test_rows_of_a_finished_request_are_dead_for_at_most_the_run_ahead(run_ahead: int) -> None:
    rig = Rig(run_ahead=run_ahead)
    expected = alone([1, 2, 3], 20, 1000, 64)
    rig.ask([1, 2, 3], 20, stop=(expected[4],))
    rig.run()
    assert sum(dead for _, _, _, dead in rig.device.log) <= run_ahead
    limited = Rig(run_ahead=run_ahead)
    limited.ask([1, 2, 3], 5)
    limited.run()
    assert sum(dead for _, _, _, dead in limited.device.log) == 0, "a length is known beforehand"
    rig.close(), limited.close()


def test_with_run_ahead_the_next_step_is_enqueued_before_the_last_is_read() -> None:
    rig = Rig(run_ahead=1)
    rig.device.rng.random = lambda: 1.0  # type: ignore[method-assign]
    rig.ask([1, 2, 3], 20)
    rig.runner.turn(), rig.runner.turn()
    assert len(rig.engine.in_flight) == 2 and len(rig.device.pending) == 2 and rig.engine.is_full
    rig.run()
    rig.close()


def test_run_ahead_is_deep_only_while_nothing_changes() -> None:
    rig = Rig(run_ahead=3)
    rig.device.rng.random = lambda: 1.0  # type: ignore[method-assign]
    answer = rig.ask([1, 2, 3], 40)
    for _ in range(6):
        rig.runner.turn()
    assert len(rig.engine.in_flight) == 4
    rig.ask([1, 2, 3], 4, use_mask=True)
    rig.device.wait(rig.engine.launched_seq, 0)
    for _ in range(6):
        rig.runner.turn()
    assert len(rig.engine.in_flight) == 2
    rig.abort(answer), rig.abort(rig.answers[2])
    rig.run()
    rig.close()


def test_the_second_turn_prefills_only_what_is_new(run_ahead: int) -> None:
    rig = Rig(BIG, run_ahead=run_ahead)
    first = rig.ask(list(range(100)), 21)
    rig.run()
    before = rig.engine.counters.prefill_tokens
    second = rig.ask([*range(100), *first.tokens, 7, 8, 9], 5)
    rig.run()
    assert second.started is not None and second.started.cached_tokens == 120
    assert rig.engine.counters.prefill_tokens - before == 4 and right(second, BIG)
    rig.close()


def test_another_salt_shares_nothing() -> None:
    rig = Rig(BIG)
    rig.ask(list(range(50)), 2, salt=1)
    rig.run()
    second = rig.ask(list(range(50)), 2, salt=2)
    rig.run()
    assert second.done.cached_tokens == 0
    rig.close()


def test_a_burst_with_one_prefix_computes_it_once_in_one_step(run_ahead: int) -> None:
    rig = Rig(BIG, run_ahead=run_ahead)
    answers = [rig.ask([*range(120), 500 + i], 3) for i in range(8)]
    rig.run()
    assert all(right(a, BIG) for a in answers)
    assert rig.engine.counters.prefill_tokens == 121 + 7
    assert rig.device.log[0][1:3] == (128, 8), "all eight start in the first step"
    rig.close()


def test_who_shares_a_long_uncomputed_prefix_waits_for_the_first_to_compute_it(run_ahead: int) -> None:
    rig = Rig(replace(BIG, max_step_tokens=64), run_ahead=run_ahead)
    first, second, other = rig.ask([*range(200), 1], 3), rig.ask([*range(200), 2], 3), rig.ask([900, 901], 3)
    rig.run()
    assert right(first, BIG) and right(second, BIG) and right(other, BIG)
    assert first.done.cached_tokens == 0 and second.done.cached_tokens == 200
    assert rig.engine.counters.prefill_tokens == 201 + 1 + 2
    rig.close()


def test_when_the_first_of_a_shared_prefix_is_aborted_the_second_goes_on_alone() -> None:
    rig = Rig(replace(BIG, max_step_tokens=64))
    first, second = rig.ask([*range(200), 1], 3), rig.ask([*range(200), 2], 3)
    turns(rig, 2)
    rig.abort(first)
    rig.run()
    assert first.done.reason == Reason.ABORT and right(second, BIG) and second.done.cached_tokens >= 64
    rig.close()


def test_an_abort_ends_a_request_in_every_phase_within_one_step(run_ahead: int) -> None:
    rig = Rig(replace(SIZES, n_slots=2), run_ahead=run_ahead)
    decoding, prefilling, waiting = rig.ask([1, 2], 50), rig.ask(list(range(60)), 2), rig.ask(list(range(200, 262)), 2)
    turns(rig, 1)
    assert decoding.end is prefilling.end is waiting.end is None
    for answer in (decoding, prefilling, waiting):
        rig.abort(answer)
    turns(rig, 1)
    for answer in (decoding, prefilling, waiting):
        assert answer.done.reason == Reason.ABORT and answer.done.output_tokens == len(answer.tokens)
    assert waiting.started is None
    rig.run()
    rig.assert_empty()
    rig.close()


def test_a_slot_is_not_given_away_while_a_step_in_flight_has_a_row_of_it() -> None:
    rig = Rig(replace(SIZES, n_slots=1), run_ahead=1)
    rig.device.rng.random = lambda: 1.0  # type: ignore[method-assign]
    first, second = rig.ask([1, 2], 30), rig.ask([3, 4], 3)
    rig.runner.turn(), rig.runner.turn()
    rig.abort(first)
    rig.runner.turn()
    assert len(rig.engine.in_flight) == 2 and rig.engine.slots.n_free == 0 and len(rig.engine.retiring) == 1
    rig.run()
    assert right(second)
    rig.close()


def test_a_nan_ends_its_request_alone_and_leaves_nothing_in_the_cache(run_ahead: int) -> None:
    device = FakeDevice(BIG, run_ahead, nan_token=999)
    rig = Rig(BIG, device=device)
    rig.ask(list(range(40)), 2)
    rig.run()
    bad, good = rig.ask([*range(40), *range(600, 640), 999], 5), rig.ask([1, 2, 3], 9)
    rig.run()
    assert (bad.done.reason, bad.done.error, bad.tokens) == (Reason.ERROR, ErrorCode.NAN, [])
    assert right(good, BIG) and ended_well(good)
    again = rig.ask([*range(40), *range(600, 650)], 5)
    rig.run()
    assert again.done.cached_tokens == 40 and right(again, BIG)
    rig.assert_empty()
    rig.close()


def test_out_of_pages_the_newest_makes_way_never_the_oldest(run_ahead: int) -> None:
    rig = Rig(replace(SIZES, n_pages=20), run_ahead=run_ahead)
    answers = [rig.ask([100 * i + k for k in range(8)], 50) for i in range(4)]
    rig.run()
    assert all(map(right, answers)) and all(map(ended_well, answers))
    assert answers[0].done.n_preempted == 0 and sum(a.done.n_preempted for a in answers) > 0
    assert rig.engine.counters.preempted == sum(a.done.n_preempted for a in answers)
    assert min(answers, key=lambda a: a.done.decode_ns + a.done.prefill_ns) is answers[0]
    rig.assert_empty()
    rig.close()


def test_a_prefill_that_cannot_finish_is_not_started() -> None:
    rig = Rig(replace(SIZES, n_pages=20), policy=Policy(max_queue=9))
    first, second = rig.ask(list(range(30)), 20), rig.ask(list(range(500, 550)), 2)
    turns(rig, 5)
    assert first.started is not None and second.started is None and rig.engine.ledger.pool.n_free > 5
    rig.run()
    assert right(second) and first.done.n_preempted == 0
    rig.close()


def test_the_prompts_tokens_are_rated_in_order_and_the_answer_is_the_same(run_ahead: int) -> None:
    rig = Rig(run_ahead=run_ahead)
    prompt = list(range(100, 130))
    cached, plain = rig.ask(prompt, 5), rig.ask([7, 8, 9], 12)
    rig.run()
    scored, other, single = rig.ask(prompt, 5, is_scored=True, n_logprobs=2, salt=5), rig.ask([7, 8, 9], 12), rig.ask([3], 4, is_scored=True)
    rig.run()
    assert scored.tokens[:29] == prompt[1:] and scored.flags[:29] == [ROW_SCORE] * 29 and scored.tokens[29:] == cached.tokens
    assert all(top[0][0] == token for top, token in zip(scored.tops, scored.tokens, strict=True))
    assert other.tokens == plain.tokens and len(single.tokens) == 4 and ROW_SCORE not in single.flags
    assert rig.engine.counters.output_tokens == 5 + 12 + 5 + 12 + 4
    rig.assert_empty()
    rig.close()


def test_top_logprobs_reach_only_who_asked() -> None:
    rig = Rig()
    plain, two = rig.ask([1, 2], 4), rig.ask([3, 4], 4, n_logprobs=2)
    rig.run()
    assert all(top == () for top in plain.tops)
    assert [[t for t, _ in top] for top in two.tops] == [[t, (t + 1) % 1000] for t in two.tokens]
    rig.close()


def test_refusals_carry_their_numbers() -> None:
    rig = Rig(replace(SIZES, n_slots=1, n_pages=11), policy=Policy(max_queue=2))
    long, wide, running = rig.ask(list(range(60)), 10), rig.ask(list(range(20)), 30), rig.ask([1], 30)
    turns(rig, 2)
    waiting = [rig.ask([1], 3, client=1) for _ in range(3)]
    late = rig.ask([1], 3, client=2, deadline_ns=1)
    rig.run()
    assert (long.refused.code, long.refused.need, long.refused.have) == (RefusedCode.CONTEXT, 60, 64)
    assert (wide.refused.code, wide.refused.need, wide.refused.have) == (RefusedCode.PAGES, 13, 10)
    full = [a for a in waiting if a.end is not None and not ended_well(a)]
    assert full and full[0].refused.code == RefusedCode.QUEUE_FULL and full[0].refused.retry_after_ms >= 100
    assert late.refused.code == RefusedCode.DEADLINE
    assert right(running)
    assert rig.engine.counters.prompt_tokens == 1 + sum(map(ended_well, waiting)), "what was refused was never read"
    rig.assert_empty()
    rig.close()


def test_the_same_ask_id_twice_is_refused() -> None:
    rig = Rig()
    rig.ask([1, 2], 9)
    rig._next_id = 0
    first = rig.answers[1]
    again = rig.ask([1, 2], 9)
    turns(rig, 1)
    assert again.refused.code == RefusedCode.BAD_ASK and first is not again
    rig.close()


def test_a_front_that_dies_loses_its_requests_and_nobody_elses(run_ahead: int) -> None:
    rig = Rig(run_ahead=run_ahead, n_fronts=2)
    rig.ask([1, 2], 50, front=0)
    kept = rig.ask([3, 4], 20, front=1)
    turns(rig, 2)
    rig.fronts[0].close()
    rig.answers.pop(1)
    rig.device.now_ns += 200_000_000
    rig.run()
    assert right(kept) and rig.engine.ports[0].is_dead and not rig.engine.requests[0]
    rig.assert_empty()
    rig.close()


def test_a_failed_device_ends_every_request_and_says_so(run_ahead: int) -> None:
    rig = Rig(run_ahead=run_ahead)
    rig.device.fails_at = 5
    answers = [rig.ask([1, 2], 50) for _ in range(6)]
    with pytest.raises(PackError):
        rig.runner.run()
    rig.listen(rig.fronts[0])
    assert all(a.done.reason == Reason.ERROR and a.done.error == ErrorCode.DEVICE for a in answers)
    rig.close()


def test_a_hanging_device_is_noticed() -> None:
    rig = Rig(run_ahead=1)
    rig.device.rng.random = lambda: 1.0  # type: ignore[method-assign]

    def wait(seq: int, timeout_us: int) -> bool:
        rig.device.now_ns += 50 * timeout_us * 1000  # time passes quickly here
        return False

    rig.device.wait = wait  # type: ignore[method-assign]
    answer = rig.ask([1, 2], 50)
    with pytest.raises(PackError, match="has not finished for 120 s"):
        rig.runner.run()
    rig.listen(rig.fronts[0])
    assert answer.done.error == ErrorCode.DEVICE
    rig.close()


def test_more_run_ahead_than_result_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="result blocks"):
        Engine(SIZES, FakeDevice(SIZES, run_ahead=5), [])


def test_the_state_tells_slots_pages_and_counters() -> None:
    rig = Rig(run_ahead=1)
    rig.ask(list(range(10)), 20)
    turns(rig, 4)
    rig.fronts[0].query()
    turns(rig, 1)
    facts = rig.states[0].facts
    assert facts["slots"]["all"] == 4 and facts["slots"]["decode"] == 1 and facts["running"][0]["prompt_tokens"] == 10
    assert facts["pages"]["all"] == 64 and facts["counters"]["requests"] == 1 and facts["counters"]["prefill_tokens"] == 10
    rig.run()
    rig.fronts[0].query()
    turns(rig, 1)
    facts = rig.states[1].facts
    assert facts["counters"]["ended"]["length"] == 1 and facts["counters"]["output_tokens"] == 20 and facts["running"] == []
    rig.close()


def test_tokens_come_out_before_the_next_step_is_launched_on_a_synchronous_pack() -> None:
    rig = Rig()
    answer = rig.ask(array("i", [1, 2]).tolist(), 5)
    rig.turn()
    assert answer.tokens == []
    steps = rig.engine.launched_seq
    seen: list[int] = []
    launch = rig.engine.launch

    def watched() -> bool:
        rig.listen(rig.fronts[0])
        seen.append(len(answer.tokens))
        return launch()

    rig.engine.launch = watched  # type: ignore[method-assign]
    rig.turn()
    assert seen == [1] and rig.engine.launched_seq == steps + 1
    rig.run()
    rig.close()


def test_gaps_between_steps_leave_out_the_time_in_which_nobody_wanted_anything() -> None:
    assert device_us([]) == {"steps": 0}
    times = [(0, 1000), (3000, 5000), (90_000_000, 90_003_000), (90_003_500, 90_004_500)]
    assert device_us(times) == {"steps": 4, "step_p50": 2.0, "step_p99": 3.0, "gap_p50": 2.0, "gap_p99": 2.0}


def test_a_start_tells_why_not_more_was_cached() -> None:
    rig = Rig(BIG)
    prompts = [list(range(50)), list(range(50)), [*range(30), *range(900, 920)], [*range(2), 990, 991, 992], [700, 701, 702, 703, 704]]
    found = []
    for prompt in prompts:
        answer = rig.ask(prompt, 1)
        rig.run()
        assert answer.started is not None
        found.append((answer.started.miss, answer.started.known_tokens, answer.started.cached_tokens))
    assert found == [(Miss.NEW, 0, 0), (Miss.NONE, 48, 48), (Miss.DIFFERS, 30, 28), (Miss.DIFFERS, 2, 0), (Miss.NEW, 0, 0)]
    rig.close()
    recurrent = Rig(replace(BIG, recurrent_bytes=64, n_snapshots=1), policy=Policy(share_tokens=8))
    for prompt in ([*range(60), 1], [999, *range(60), 1]):
        recurrent.ask(prompt, 1)
        recurrent.run()
    again = recurrent.ask([*range(60), 2], 1)
    recurrent.run()
    assert again.started is not None and (again.started.miss, again.started.known_tokens, again.done.cached_tokens) == (Miss.STATE, 60, 0)
    recurrent.close()
