"""When steps are launched, and what a burst may cost those who decode."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from paddock_runner.engine.cost import CostModel
from paddock_runner.engine.pace import Pace
from paddock_runner.engine.policy import Policy

from tests.soak.fake_device import ROW_US, STEP_US, TOKEN_US
from tests.soak.rig import SIZES, Rig

WIDE = replace(SIZES, n_slots=16, max_ctx_tokens=2048, n_pages=8193, max_step_tokens=512, max_step_rows=32)
PATIENT = Policy(lead_ms=0.5, gather_ms=12.0, quiet_ms=0.6)


def steady_rig(policy: Policy, n: int = 4) -> Rig:
    """Streams that decode on a device that runs nothing by chance, its cost learned."""
    rig = Rig(WIDE, run_ahead=2, policy=policy)
    rig.device.rng.random = lambda: 1.0  # type: ignore[method-assign]
    answers = [rig.ask([i, i + 1, i + 2], 500) for i in range(n)]
    while not all(len(a.tokens) > 40 for a in answers):
        rig.turn()
    return rig


def test_while_someone_may_come_the_next_step_is_launched_shortly_before_the_last_ends() -> None:
    rig = steady_rig(PATIENT)
    engine = rig.engine
    while len(engine.in_flight) != 1 or not engine.hold_until_ns:
        rig.turn()
    expected = engine.in_flight[0].launched_ns + 1000 * (STEP_US + 4 * ROW_US) - 500_000
    assert abs(engine.hold_until_ns - expected) < 400_000
    rig.close()


def test_steps_of_rows_alone_are_expected_to_take_what_such_steps_took_not_what_the_fit_says() -> None:
    rig = steady_rig(PATIENT)
    engine = rig.engine
    engine.scheduler.cost.terms = [3.0 * STEP_US, 0.0, 5000.0, 0.0, 0.0]
    begun = engine.launched_seq
    while engine.launched_seq < begun + 3 or len(engine.in_flight) != 1 or not engine.hold_until_ns:
        rig.turn()
    assert abs(engine.in_flight[0].price_us - STEP_US - 4 * ROW_US) < 0.1 * STEP_US
    rig.close()


def test_behind_a_step_with_prefill_the_next_is_launched_earlier_by_what_the_fit_may_be_off() -> None:
    rig = steady_rig(PATIENT)
    engine = rig.engine
    rig.ask(list(range(400)), 4)
    while not any(step.n_prefill for step in engine.in_flight) or not engine.hold_until_ns:
        rig.turn()
    (step,) = engine.in_flight
    lead_ns = max(step.launched_ns, engine.last_done_ns) + 1000 * step.price_us - engine.hold_until_ns
    assert abs(lead_ns - 1e6 * PATIENT.lead_ms - 150 * step.price_us) < 2000
    rig.close()


def test_behind_a_step_that_takes_longer_than_priced_one_step_is_enqueued_not_two_unless_it_hangs() -> None:
    rig = steady_rig(PATIENT)
    engine = rig.engine
    for _ in range(100):  # nobody waits, so nothing runs
        rig.runner.turn()
        rig.device.now_ns += 100_000
        if len(engine.in_flight) == 2:
            break
    begun = engine.launched_seq
    for _ in range(100):
        rig.runner.turn()
        rig.device.now_ns += 300_000
    assert engine.launched_seq == begun, "thirty milliseconds for two"
    rig.device.now_ns += 1_100_000_000
    rig.runner.turn()
    assert engine.launched_seq == begun + 1 and engine.is_full, "whoever waits now, waits with a limit"
    rig.close()


def test_without_a_free_slot_steps_are_enqueued_ahead() -> None:
    rig = steady_rig(PATIENT, n=16)
    for _ in range(4):
        rig.runner.turn()
    assert len(rig.engine.in_flight) == 3 and not rig.engine.hold_until_ns
    rig.close()


def test_a_burst_on_an_idle_device_is_one_step() -> None:
    rig = Rig(WIDE, run_ahead=2, policy=PATIENT)
    for k in range(8):
        rig.ask([100 * k + i for i in range(40)], 4)
        rig.runner.turn()
        rig.device.now_ns += 300_000
    assert not rig.device.last_seq, "while they come, nothing is launched"
    rig.run(check=False)
    assert rig.device.rows[0] and len(rig.device.rows[0]) == 8
    rig.close()


def test_those_who_were_answered_together_are_waited_for_longer() -> None:
    rig = Rig(WIDE, run_ahead=2, policy=PATIENT)
    for round_ in range(2):
        for k in range(8):
            rig.ask([1000 * round_ + 100 * k + i for i in range(60)], 4)
            rig.runner.turn()
            rig.device.now_ns += 300_000 if not round_ or k != 3 else 1_200_000  # in between twice as long as prompts wait for strangers
        if not round_:
            rig.run(check=False)
    first = rig.device.last_seq
    rig.run(check=False)
    assert rig.engine.scheduler.begun_tokens == 8 * 60, f"all in one step after {first}"
    rig.close()


def test_a_prompt_alone_on_an_idle_device_waits_for_a_moment_only() -> None:
    rig = Rig(WIDE, run_ahead=2, policy=PATIENT)
    rig.ask([1, 2, 3], 4)
    begun = rig.device.now_ns
    while not rig.device.last_seq:
        rig.turn()
    assert rig.device.now_ns - begun < 1_500_000 + 1000 * (STEP_US + 3 * TOKEN_US)
    rig.close()


def test_a_device_without_run_ahead_waits_for_nobody() -> None:
    rig = Rig(WIDE, run_ahead=0, policy=PATIENT)
    rig.ask([1, 2, 3], 4)
    rig.runner.turn()
    assert rig.device.last_seq == 1
    rig.close()


@pytest.fixture
def pace() -> Pace:
    return Pace(Policy(), CostModel((2000.0, 1000.0, 5000.0, 0.0)))


def test_one_gap_in_a_hundred_may_be_long(pace: Pace) -> None:
    assert pace.may_stall(40, 32) and not pace.may_stall(40, 32), "64 to begin with"
    pace.n_gaps += 40 * 100
    assert pace.may_stall(40, 32) and not pace.may_stall(40, 32)
    granted = 0
    for _ in range(100):
        pace.n_gaps += 40 * 10
        granted += pace.may_stall(40, 32)
    assert granted <= 10, "a thousand steps, at most one in a hundred of them"


def test_a_light_client_goes_into_debt_which_bursts_pay_and_new_streams_do_not(pace: Pace) -> None:
    assert pace.may_stall(40, 40, True) and pace.may_stall(40, 40, True) and pace.may_stall(40, 40, True), "64 to begin with, and 64 that it owes"
    assert not pace.may_stall(40, 40, True)
    pace.n_gaps += 40 * 100
    assert not pace.may_stall(1, 32) and pace.may_stall(40, 40, True)
    pace.budget_us(0, 0, True, 0)
    assert not pace.may_stall(1, 32), "none owe, and none have credit"
    pace.n_gaps += 40 * 100
    assert pace.may_stall(32, 32)


def test_few_prompts_do_not_hold_up_many_streams(pace: Pace) -> None:
    assert not pace.may_stall(20, 1)
    assert pace.may_stall(20, 10)


def test_more_than_half_of_a_burst_has_begun_after_its_first_step_or_else_after_the_second(pace: Pace) -> None:
    assert pace.part(2560, 0) == 2560
    assert pace.part(21 * 128, 0) == 21 * 128, "as many as fit"
    assert pace.part(16 * 128, 16 * 128) == 16 * 128 and pace.part(19 * 128, 13 * 128) == math.ceil(4096 / 1.8) - 13 * 128
    assert pace.part(44 * 128, 35 * 128) == math.ceil(79 * 128 / 1.8) - 35 * 128 and pace.part(38 * 128, 50 * 128) == 38 * 128
    assert pace.part(30 * 128, 22 * 128) == math.ceil(52 * 128 / 1.8) - 22 * 128


def test_prompts_that_come_after_a_step_without_prefill_are_a_burst_of_their_own() -> None:
    rig = steady_rig(PATIENT)
    scheduler = rig.engine.scheduler
    for n in (64, 80):
        answer = rig.ask(list(range(10 * n, 11 * n)), 40)
        while not answer.tokens:
            rig.turn()
        assert scheduler.begun_tokens == n
        while len(answer.tokens) < 5:
            rig.turn()
    rig.close()
    rig = Rig(WIDE, run_ahead=2, policy=PATIENT)
    for n in (64, 80):
        rig.ask(list(range(10 * n, 11 * n)), 1)
        rig.run(check=False)
        assert rig.engine.scheduler.begun_tokens == n, "also after answers of one token"
    rig.close()


def test_nobody_decodes_all_the_time_there_is(pace: Pace) -> None:
    assert pace.budget_us(0, 1, False, 100) == math.inf


def test_a_cost_model_that_has_seen_steps_for_nothing_still_gives_a_budget() -> None:
    cost = CostModel()
    cost.terms = [0.0, 0.0, 10_000.0, 0.0, 0.0]
    assert Pace(Policy(), cost, 128).budget_us(16, 1, False, 100_000) >= 0


def test_chunks_fill_tiles_of_products_and_deep_in_a_context_those_of_attention() -> None:
    pace = Pace(Policy(), CostModel(), 128)
    assert pace.whole_tiles(500, 16, 1000) == 512 - 16, "the step's tokens, decode rows included"
    assert pace.whole_tiles(100, 16, 1000) == 100, "not a whole one"
    assert pace.whole_tiles(250, 16, 32_768) == 224 and pace.whole_tiles(20, 16, 32_768) == 20
    assert Pace(Policy(), CostModel(), 1).whole_tiles(250, 3, 32_768) == 250, "a CPU has none"
    assert pace.least_tokens(1000) == 128 and pace.least_tokens(32_768) == 32
    assert Policy().on("cuda:sm_90a") == Policy()
    assert Pace(Policy().on("cuda:sm_89"), CostModel(), 128).least_tokens(32_768) == 384, "attention of fewer takes no less there"


def test_rounds_count_with_decode_steps_as_they_were_measured_not_as_the_fit_has_them() -> None:
    cost = CostModel()
    for _ in range(40):
        cost.see(16, 0, 0.0, 5800.0)
    cost.terms = [9000.0, 0.0, 5000.0, 500.0, 0.0]
    assert cost.quiet_us(16) == pytest.approx(5800.0) and cost.quiet_us(18) == pytest.approx(5800.0)
    cost.see(16, 0, 0.0, 25_800.0)
    assert cost.quiet_us(16) == pytest.approx(7800.0), "something else held it up"
    for _ in range(12):
        cost.see(16, 0, 0.0, 5800.0)
    assert cost.quiet_us(16) == pytest.approx(5800.0, rel=1e-3)
    assert cost.quiet_us(64) == cost.decode_us(64) and CostModel().quiet_us(16) == CostModel().decode_us(16)
    pace = Pace(Policy(), cost, 128)
    assert pace.budget_us(16, 1, False, 65_000, 32_768) == pytest.approx((1 + Policy().rest_steps) * 5800 / (Policy().long_delay - 1), rel=1e-3)


def test_an_answer_of_full_length_gives_its_slot_when_its_last_step_is_read_and_no_more_than_one_step_without_it_has_been_launched() -> None:
    rig = Rig(replace(WIDE, n_slots=4), run_ahead=2, policy=PATIENT)
    rig.device.rng.random = lambda: 1.0  # type: ignore[method-assign]
    short = [rig.ask([i, i + 1, i + 2], 60) for i in range(2)]
    others = [rig.ask([i, i + 1, i + 2], 500) for i in range(7, 9)]
    engine = rig.engine
    while not all(a.end for a in short):
        rig.turn()
    assert [step.n_decode for step in engine.in_flight] == [2] and engine.slots.n_free == 2 and not engine.retiring
    comes, begun = rig.ask([50, 51], 3), engine.launched_seq
    while comes.started is None:
        rig.turn()
    assert engine.launched_seq == begun + 1 and engine.in_flight[-1].n_prefill == 2
    rig.run()
    assert all(len(a.tokens) == 500 for a in others) and engine.n_ending == 0
    rig.assert_empty()
    rig.close()
