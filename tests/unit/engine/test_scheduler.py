"""What the scheduler promises, seen from outside: pace of decoding, order of starts, fairness, no starvation.

The fake device takes 2 ms a step, 50 us a decode row and 100 us a prefill token; its clock is the engine's.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from paddock_runner.engine.policy import Policy
from paddock_runner.wire.messages import Refused, RefusedCode

from tests.soak.fake_device import ROW_US, STEP_US, TOKEN_US, alone
from tests.soak.rig import AT_ONCE, SIZES, Answer, Rig, ended_well, turns

WIDE = replace(SIZES, n_slots=16, max_ctx_tokens=2048, n_pages=8193, max_step_tokens=512, max_step_rows=32)


class Watch:
    """Durations of the steps of a rig, and when each answer's first token came (ns)."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.first_ns: dict[int, int] = {}
        rig.on_token = lambda answer: self.first_ns.setdefault(answer.ask.ask_id, rig.device.now_ns)

    def step_us(self, first: int = 0) -> list[int]:
        found = []
        for rows in self.rig.device.rows[first:]:
            n_decode = sum(n == 1 for _, n, _ in rows)
            found.append(STEP_US + ROW_US * n_decode + TOKEN_US * (sum(n for _, n, _ in rows) - n_decode))
        return found

    def ttft_ms(self, answer: Answer, asked_ns: int) -> float:
        return (self.first_ns[answer.ask.ask_id] - asked_ns) / 1e6


def until_started(rig: Rig, answer: Answer) -> None:
    while answer.started is None:
        rig.turn()


def decoding(rig: Rig, n: int, n_tokens: int) -> list[Answer]:
    answers = [rig.ask([i, i + 1, i + 2], n_tokens) for i in range(n)]
    while not all(len(a.tokens) > 20 for a in answers):
        rig.turn()
    return answers


def test_a_prompt_alone_is_prefilled_in_the_largest_steps() -> None:
    rig = Rig(WIDE)
    rig.ask(list(range(900)) + list(range(900)), 2)
    rig.run(check=False)
    assert [t for _, t, _, _ in rig.device.log] == [512, 512, 512, 264, 1]
    rig.close()


def test_decoding_streams_keep_their_pace_while_a_long_prompt_prefills() -> None:
    rig = Rig(WIDE, policy=Policy(min_chunk_tokens=4, burst_ms=20.0, burst_step_ms=0.0))
    watch = Watch(rig)
    streams = decoding(rig, 12, 1500)
    base = STEP_US + 12 * ROW_US
    before = len(rig.device.rows)
    long = rig.ask([(7 * i) % 1000 for i in range(1900)], 2)
    until_started(rig, long)
    while not long.tokens:
        rig.turn()
    steps = watch.step_us(before)
    assert max(steps) <= 4 * base and max(steps[4:]) <= 3.2 * base, "no step is longer than the burst ratio, once its cost is known"
    assert statistics.median(steps) <= 1.3 * base, "the median keeps to the steady ratio"
    assert sum(steps) > 2 * TOKEN_US * 1900 / 3, "and the prompt did go through"
    for answer in (*streams, long):
        rig.abort(answer)
    rig.run(check=False)
    rig.close()


def test_a_prompt_that_is_longer_than_the_burst_credit_does_not_spend_it() -> None:
    rig = Rig(WIDE, policy=Policy(min_chunk_tokens=4, burst_ms=100.0))
    watch = Watch(rig)
    streams = decoding(rig, 12, 1500)
    rig.ask([(3 * i) % 1000 for i in range(100)], 1)
    while rig.engine.scheduler.has_prefill or rig.answers[13].end is None:
        rig.turn()
    before, base = len(rig.device.rows), STEP_US + 12 * ROW_US
    long = rig.ask([(7 * i) % 1000 for i in range(1900)], 2)
    while not long.tokens:
        rig.turn()
    steps = watch.step_us(before)
    assert statistics.median(steps) <= 1.25 * base and statistics.quantiles(steps, n=100)[98] <= 1.5 * base
    for answer in (*streams, long):
        rig.abort(answer)
    rig.run(check=False)
    rig.close()


def test_a_short_prompt_passes_at_once_on_burst_credit() -> None:
    rig = Rig(WIDE)
    streams = decoding(rig, 12, 400)
    before = len(rig.device.rows)
    short = rig.ask(list(range(500, 640)), 2)
    while not short.tokens:
        rig.turn()
    assert len(rig.device.rows) - before <= 4
    for answer in (*streams, short):
        rig.abort(answer)
    rig.run(check=False)
    rig.close()


def test_many_waiting_get_more_time_than_one() -> None:
    def share(n_waiting: int) -> float:
        rig = Rig(WIDE, policy=Policy(min_chunk_tokens=4, burst_ms=0.0, burst_step_ms=0.0))
        watch = Watch(rig)
        streams = decoding(rig, 4, 1000)
        before = len(rig.device.rows)
        prompts = [rig.ask([(13 * k + 7 * i) % 1000 for i in range(600)], 2) for k in range(n_waiting)]
        while not prompts[0].tokens and not any(p.tokens for p in prompts):
            rig.turn()
        steps = watch.step_us(before)
        for answer in (*streams, *prompts):
            rig.abort(answer)
        rig.run(check=False)
        rig.close()
        return statistics.median(steps) / (STEP_US + 4 * ROW_US)

    assert share(1) <= 1.4 < 2.0 < share(8) <= 4.2


def test_the_shortest_prompt_starts_first() -> None:
    rig = Rig(replace(WIDE, max_step_tokens=64))
    answers = [rig.ask([(k * 100 + i) % 1000 for i in range(n)], 2) for k, n in enumerate((600, 300, 60, 150))]
    rig.run(check=False)
    assert rig.order == [3, 4, 2, 1]
    assert all(map(ended_well, answers))
    rig.close()


def test_a_short_prompt_overtakes_a_long_one_that_is_being_prefilled() -> None:
    rig = Rig(replace(WIDE, max_step_tokens=64))
    long = rig.ask([(3 * i) % 1000 for i in range(1800)], 2)
    for _ in range(3):
        rig.turn()
    short = rig.ask([5, 4, 3], 1)
    rig.run(check=False)
    assert long.done.prefill_ns > 10 * short.done.prefill_ns
    assert short.done.queued_ns + short.done.prefill_ns < 30_000_000
    rig.close()


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    rig = Rig(replace(WIDE, max_step_tokens=64), policy=Policy(ageing_tokens_per_ms=8.0))
    long = rig.ask([(3 * i) % 1000 for i in range(1500)], 1)
    n = 0
    while long.end is None:
        rig.ask([n % 1000, (n * 7) % 1000, *range(n % 100, n % 100 + 56)], 1)
        n += 1
        rig.turn()
    assert n < 250
    for answer in rig.answers.values():
        rig.abort(answer)
    rig.run(check=False)
    rig.close()


def test_a_client_with_one_request_is_not_held_up_by_one_with_many() -> None:
    alone_rig = Rig(WIDE)
    watch = Watch(alone_rig)
    asked = alone_rig.device.now_ns
    single = alone_rig.ask([(3 * i) % 1000 for i in range(200)], 2)
    alone_rig.run(check=False)
    by_itself = watch.ttft_ms(single, asked)
    rig = Rig(replace(WIDE, n_slots=32), policy=Policy(max_queue=100))
    watch = Watch(rig)
    many = [rig.ask([(k * 17 + 7 * i) % 1000 for i in range(200)], 2, client=1) for k in range(64)]
    for _ in range(2):
        rig.turn()
    asked = rig.device.now_ns
    guest = rig.ask([(3 * i) % 1000 for i in range(200)], 2, client=2)
    rig.run(check=False)
    later = [a for a in many if a.ask.ask_id in rig.order[rig.order.index(guest.ask.ask_id) + 1 :]]
    assert len(later) > 50, "it goes before nearly all that were there first"
    assert watch.ttft_ms(guest, asked) < 4 * by_itself
    alone_rig.close(), rig.close()


def test_backlogged_clients_get_equal_shares_whatever_their_number_of_requests() -> None:
    rig = Rig(replace(WIDE, n_slots=4), policy=Policy(max_queue=200, oldest_every=1_000_000))
    for k in range(90):
        rig.ask([(k * 31 + i) % 1000 for i in range(40)], 10, client=1)
    for k in range(30):
        rig.ask([(k * 37 + 500 + i) % 1000 for i in range(40)], 10, client=2)
    for _ in range(150):
        rig.turn()
    served = {c: rig.engine.scheduler.queue.clients[c].served_tokens for c in (1, 2)}
    assert min(served.values()) > 300 and abs(served[1] - served[2]) <= 4 * 50, served
    rig.run(check=False)
    rig.close()


def test_a_client_of_thrice_the_weight_is_served_about_thrice_as_much() -> None:
    rig = Rig(replace(WIDE, n_slots=4, max_step_rows=8))
    asks = [rig.ask([i, c, 3, 4, 5], 40, client=c, weight=3 if c == 1 else 1) for i in range(60) for c in (1, 2)]
    while sum(len(a.tokens) for a in asks) < 2000:
        rig.turn()
    served = [sum(len(a.tokens) for a in asks if a.ask.client == c) for c in (1, 2)]
    assert 2.2 < served[0] / served[1] < 4.0, served
    for answer in asks:
        rig.abort(answer)
    rig.run(check=False)
    rig.close()


def test_priority_starts_first() -> None:
    rig = Rig(replace(WIDE, n_slots=1))
    answers = [rig.ask([k, k + 1], 2, priority=k % 3) for k in range(6)]
    rig.run(check=False)
    assert [rig.answers[i].ask.priority for i in rig.order] == [2, 2, 1, 1, 0, 0]
    assert all(a.tokens == alone([k, k + 1], 2, 1000, 2048) for k, a in enumerate(answers))
    rig.close()


def test_small_common_heads_do_not_make_a_burst_wait() -> None:
    rig = Rig(WIDE)
    for k in range(4):
        rig.ask([1, 2, 3, 4, 5, 6, 7, 8, *((k * 50 + i) % 1000 for i in range(100, 140))], 2)
    rig.turn()
    assert len(rig.device.rows[0]) == 4
    rig.run(check=False)
    rig.close()


def test_a_client_without_a_slot_gets_one_of_the_client_that_has_them_all_and_no_answer_changes() -> None:
    for run_ahead in (0, 2):
        rig = Rig(replace(WIDE, n_slots=8), run_ahead=run_ahead)
        many = [rig.ask([k * 17 + i for i in range(40)], 120, client=1) for k in range(12)]
        while not all(len(a.tokens) > 5 for a in many[:8]):
            rig.turn()
        guest = rig.ask(list(range(500, 540)), 5, client=2)
        while not guest.tokens:
            rig.turn()
        assert all(a.end is None for a in many), "nobody had ended"
        rig.run()
        assert sum(a.done.n_preempted for a in many) == 1 and guest.done.n_preempted == 0
        for answer in (*many, guest):
            ask = answer.ask
            assert answer.tokens == alone(list(memoryview(ask.prompt)), ask.max_tokens, WIDE.n_vocab, WIDE.max_ctx_tokens)
        rig.assert_empty()
        rig.close()


def test_a_client_that_has_a_slot_takes_none_from_another() -> None:
    rig = Rig(replace(WIDE, n_slots=8))
    many = [rig.ask([k * 17 + i for i in range(40)], 60, client=1) for k in range(12)]
    first = rig.ask(list(range(500, 540)), 60, client=2)
    while not first.tokens or not all(len(a.tokens) > 5 for a in many[:6]):
        rig.turn()
    second = rig.ask(list(range(600, 640)), 5, client=2)
    rig.run()
    assert sum(a.done.n_preempted for a in (*many, first, second)) <= 1, "one for the first, none for the second"
    rig.close()


def test_who_comes_late_has_no_more_of_a_head_start_than_what_is_given_though_others_answered_for_long_by_themselves() -> None:
    rig = Rig(replace(WIDE, n_slots=8))
    many = [rig.ask([k * 17 + i for i in range(40)], 400, client=1) for k in range(8)]
    while not all(len(a.tokens) > 300 for a in many):
        rig.turn()
    guest = rig.ask(list(range(500, 540)), 5, client=2)
    while guest.started is None:
        rig.turn()
    clients = rig.engine.scheduler.queue.clients
    assert clients[1].served_tokens > 8 * 340
    assert clients[2].served_tokens >= 8 * 340 - rig.engine.policy.head_start_tokens
    one = clients[1].served_tokens
    for _ in range(3):
        rig.turn()
    assert clients[1].served_tokens <= one + 8 * 10, "nothing of it is charged later"
    for answer in rig.answers.values():
        rig.abort(answer)
    rig.run(check=False)
    rig.close()


def test_who_waits_for_anothers_prefix_takes_a_place_in_the_queue() -> None:
    rig = Rig(replace(WIDE, max_step_tokens=64), policy=replace(AT_ONCE, max_queue=10))
    common = [(7 * i) % 1000 for i in range(1500)]
    asks = [rig.ask([*common, k], 2, client=k) for k in range(8)]
    for k in range(8, 40):
        turns(rig, 1)
        asks.append(rig.ask([*common, k], 2, client=k))
        assert rig.engine.scheduler.n_waiting <= 10
    rig.run(check=False)
    refused = [a for a in asks if isinstance(a.end, Refused)]
    assert len(refused) > 10 and all(a.refused.code == RefusedCode.QUEUE_FULL and a.refused.need == 10 for a in refused)
    rig.close()


def test_a_client_without_pages_gets_some_of_the_client_that_has_them_all_and_is_not_the_first_to_lose_them() -> None:
    """Slots are free, pages are not: long contexts of one client fill the device."""
    for run_ahead in (0, 2):
        sizes = replace(WIDE, n_slots=16, n_pages=401)
        rig = Rig(sizes, run_ahead=run_ahead, policy=AT_ONCE)
        many = [rig.ask([(k * 97 + 7 * i) % 1000 for i in range(110)], 300, client=1) for k in range(20)]
        while rig.engine.slots.n_free < 4 or not rig.engine.scheduler.queue.n or not many[0].tokens:
            rig.turn()
        turns(rig, 20)
        assert rig.engine.slots.n_free >= 4 and rig.engine.scheduler.queue.n, "it is pages that are short"
        guest = rig.ask([(3 * i) % 1000 for i in range(100)], 120, client=2)
        ended = sum(a.end is not None for a in many)
        while not guest.tokens:
            rig.turn()
            rig.engine.check()
        assert sum(a.end is not None for a in many) == ended, "nobody had ended"
        rig.run()
        assert guest.done.n_preempted == 0 < sum(a.done.n_preempted for a in many)
        assert all(a.tokens == alone(list(memoryview(a.ask.prompt)), a.ask.max_tokens, sizes.n_vocab, sizes.max_ctx_tokens) for a in (*many, guest))
        rig.assert_empty()
        rig.close()


def test_a_request_of_higher_priority_gets_a_slot_of_its_own_clients_lower_ones_and_not_of_anothers() -> None:
    for run_ahead in (0, 2):
        rig = Rig(replace(WIDE, n_slots=6), run_ahead=run_ahead)
        running = [(2, -1), (2, -1), (1, -1), (1, -1), (1, 0), (1, 0)]
        many = []
        for k, (client, priority) in enumerate(running):
            many.append(rig.ask([k * 17 + i for i in range(40)], 200, client=client, priority=priority))
            until_started(rig, many[-1])
        while not all(len(a.tokens) > 5 for a in many):
            rig.turn()
        urgent = [rig.ask(list(range(500 + 50 * k, 540 + 50 * k)), 5, client=1, priority=1) for k in range(3)]
        while not all(a.tokens for a in urgent):
            rig.turn()
        assert all(a.end is None for a in many), "nobody had ended"
        rig.run()
        preempted = [a for a in (*many, *urgent) if a.done.n_preempted]
        assert {a.ask.client for a in preempted} == {1} and [a.ask.priority for a in preempted][:2] == [-1, -1] and not any(a.done.n_preempted for a in urgent)
        for answer in (*many, *urgent):
            ask = answer.ask
            assert answer.tokens == alone(list(memoryview(ask.prompt)), ask.max_tokens, WIDE.n_vocab, WIDE.max_ctx_tokens)
        rig.assert_empty()
        rig.close()


def test_who_has_made_way_often_is_left_alone_though_there_is_always_a_higher_priority() -> None:
    rig = Rig(replace(WIDE, n_slots=2), policy=replace(AT_ONCE, max_queue=400))
    patient = rig.ask(list(range(40)), 60, client=1, priority=-1)
    until_started(rig, patient)
    n = 0
    while patient.end is None:
        n += 1
        assert n < 3000
        if sum(a.end is None for a in rig.answers.values()) < 4:
            rig.ask([(n * 7 + i) % 1000 for i in range(20)], 30, client=1, priority=0)
        rig.turn()
    assert 1 <= patient.done.n_preempted <= 8
    for answer in rig.answers.values():
        rig.abort(answer)
    rig.run(check=False)
    rig.close()


@pytest.mark.parametrize("n_streams", [0, 6])
@pytest.mark.parametrize("is_first", [False, True], ids=["waiting", "read"])
def test_a_long_prompt_is_not_starved_by_clients_that_are_always_new(n_streams: int, is_first: bool) -> None:
    """Each of them has had less than whoever was there: the long prompt had a slot, and no token of it was read as long as they came."""
    rig = Rig(WIDE)
    for i in range(n_streams):
        rig.ask([i, i + 1, i + 2], 2000, client=5000)
    for _ in range(200 * (n_streams > 0)):
        rig.turn()
    asked: list[Answer] = []

    def come() -> None:
        while sum(a.started is None and a.end is None for a in asked) < 3:
            k = len(asked)
            asked.append(rig.ask([(k * 13 + 7 * i) % 1000 for i in range(400)], 1, client=10_000 + k))

    if not is_first:
        come()
    long = rig.ask([(7 * i) % 1000 for i in range(1900)], 1, client=1)
    if is_first:
        until_started(rig, long)
    while long.end is None and len(asked) < 400:
        come()
        rig.turn()
    assert long.end is not None and len(asked) > 20, len(asked)
    for answer in rig.answers.values():
        rig.abort(answer)
    rig.run(check=False)
    rig.close()
