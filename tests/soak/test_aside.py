"""Long prompts that a part of the device reads beside the steps: answers are those of each request alone, nothing is lost, and nobody else waits for them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from paddock_runner.engine.cost import CostModel
from paddock_runner.engine.queue import WaitQueue
from paddock_runner.engine.sharing import MAX_WOKEN
from paddock_runner.engine.tiering import TierConfig
from paddock_runner.wire.messages import RefusedCode

from tests.soak.rig import AT_ONCE, SIZES, Rig, ended_well, every_run_ahead, right, turns

__all__ = ["every_run_ahead"]

LONG = replace(SIZES, max_ctx_tokens=256, n_pages=257)
SOON = replace(AT_ONCE, burst_ms=2.0)
"""What takes longer than two milliseconds is read aside."""


def prompt(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(n)]


def beside_streams(rig: Rig, rng: random.Random, n_streams: int = 2) -> list:
    """Streams that decode."""
    streams = [rig.ask(prompt(rng, 5), max_tokens=200) for _ in range(n_streams)]
    for _ in range(500):
        if all(len(a.tokens) > 3 for a in streams):
            return streams
        rig.turn()
    raise AssertionError("they do not decode")


def until(rig: Rig, holds, max_turns: int = 5000) -> None:
    for _ in range(max_turns):
        if holds():
            return
        rig.turn()
        rig.engine.check()
    raise AssertionError("it does not happen")


def test_a_long_prompt_beside_streams_is_read_aside_and_answers_as_alone(run_ahead: int) -> None:
    rig, rng = Rig(LONG, run_ahead, SOON, part_tokens=16), random.Random(1)
    streams = beside_streams(rig, rng)
    long = rig.ask(prompt(rng, 150), max_tokens=6)
    until(rig, lambda: rig.engine.aside.in_flight)
    n_before = [len(a.tokens) for a in streams]
    assert rig.device.gives_way
    until(rig, lambda: long.tokens)
    assert all(len(a.tokens) > n for a, n in zip(streams, n_before, strict=True)), "streams went on"
    assert rig.engine.aside.n_tokens == 149
    rig.run()
    assert all(right(a, LONG) and ended_well(a) for a in (long, *streams))
    assert not rig.device.gives_way
    rig.assert_empty()
    rig.close()


def test_steps_beside_it_hold_decode_rows_alone(run_ahead: int) -> None:
    rig, rng = Rig(LONG, run_ahead, SOON, part_tokens=16), random.Random(2)
    beside_streams(rig, rng)
    first = len(rig.device.rows)
    long = rig.ask(prompt(rng, 100), max_tokens=2)
    until(rig, lambda: long.end)
    with_prefill = [rows for rows in rig.device.rows[first:] if any(n > 1 for _, n, _ in rows)]
    assert not with_prefill, "a chunk of the prompt held up the streams"
    rig.run()
    rig.close()


def test_other_prompts_come_in_steps_that_need_not_wait_for_the_part(run_ahead: int) -> None:
    rig, rng = Rig(replace(LONG, beside_tokens=12), run_ahead, replace(SOON, burst_ms=8.0), part_tokens=16), random.Random(10)
    beside_streams(rig, rng)
    long = rig.ask(prompt(rng, 240), max_tokens=2)
    until(rig, lambda: rig.engine.aside.in_flight)
    first = len(rig.device.rows)
    short = rig.ask(prompt(rng, 40), max_tokens=2)
    until(rig, lambda: short.tokens)
    assert rig.engine.aside.in_flight and not long.tokens
    steps = [sum(n for _, n, _ in rows) for rows in rig.device.rows[first:]]
    assert max(steps) <= 12
    rig.run()
    assert right(short, LONG) and right(long, LONG)
    rig.close()


def test_without_streams_nothing_is_read_aside(run_ahead: int) -> None:
    rig, rng = Rig(LONG, run_ahead, SOON, part_tokens=16), random.Random(3)
    long = rig.ask(prompt(rng, 150), max_tokens=4)
    rig.run()
    assert right(long, LONG) and rig.engine.aside.n_tokens == 0
    rig.close()


def test_a_short_prompt_is_not_read_aside(run_ahead: int) -> None:
    rig, rng = Rig(LONG, run_ahead, replace(AT_ONCE, burst_ms=1e6), part_tokens=16), random.Random(4)
    beside_streams(rig, rng)
    other = rig.ask(prompt(rng, 150), max_tokens=4)
    rig.run()
    assert right(other, LONG) and rig.engine.aside.n_tokens == 0
    rig.close()


def test_its_last_token_does_not_go_aside_where_that_alone_takes_long(run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model on few processors: a token takes longer than streams put up with at once."""
    monkeypatch.setattr(CostModel, "chunk_us", lambda self, n, position: 5000.0 * n)
    rig, rng = Rig(LONG, run_ahead, SOON, part_tokens=16), random.Random(11)
    streams = beside_streams(rig, rng)
    long = rig.ask(prompt(rng, 40), max_tokens=2)
    until(rig, lambda: long.tokens)
    assert rig.engine.aside.n_tokens == 39 and not any(a.end for a in streams)
    rig.run()
    assert all(right(a, LONG) and ended_well(a) for a in (long, *streams))
    rig.assert_empty()
    rig.close()


def test_it_comes_back_when_the_streams_have_ended(run_ahead: int) -> None:
    rig, rng = Rig(LONG, run_ahead, SOON, part_tokens=8), random.Random(5)
    streams = beside_streams(rig, rng)
    long = rig.ask(prompt(rng, 240), max_tokens=4)
    until(rig, lambda: rig.engine.aside.in_flight)
    for stream in streams:
        rig.abort(stream)
    until(rig, lambda: long.end)
    assert 0 < rig.engine.aside.n_tokens < 239
    assert right(long, LONG)
    rig.run()
    rig.assert_empty()
    rig.close()


def test_aborted_while_it_is_read_its_pages_stay_until_the_step_is_done(run_ahead: int) -> None:
    rig, rng = Rig(LONG, run_ahead, SOON, part_tokens=32), random.Random(6)
    streams = beside_streams(rig, rng)
    long = rig.ask(prompt(rng, 200), max_tokens=4)
    until(rig, lambda: rig.engine.aside.in_flight)
    request = rig.engine.aside.in_flight[0].request
    rig.part.facts = replace(rig.part.facts, run_ahead=1)
    rig.abort(long)
    until(rig, lambda: long.end)
    assert request.holding is not None or not rig.engine.aside.holds(request)
    rig.run()
    assert request.holding is None and all(right(a, LONG) for a in streams)
    rig.assert_empty()
    rig.close()


def test_what_it_shares_is_computed_once(run_ahead: int) -> None:
    rig, rng = Rig(LONG, run_ahead, SOON, part_tokens=16), random.Random(7)
    beside_streams(rig, rng)
    same = prompt(rng, 160)
    first, second = rig.ask(same, max_tokens=3), rig.ask([*same[:150], *prompt(rng, 4)], max_tokens=3)
    rig.run(check=True)
    assert right(first, LONG) and right(second, LONG)
    assert sorted(a.started.cached_tokens for a in (first, second)) == [0, 148], "the other waited, though the first was read aside"
    rig.close()


def test_a_part_that_fails_ends_every_request_once(run_ahead: int) -> None:
    from paddock_runner.errors import PackError

    rig, rng = Rig(LONG, run_ahead, SOON, part_tokens=16), random.Random(8)
    streams = beside_streams(rig, rng)
    rig.part.fails_at = 2
    long = rig.ask(prompt(rng, 200), max_tokens=4)
    with pytest.raises(PackError):
        for _ in range(5000):
            rig.turn()
    rig.engine.fail()
    for front in rig.fronts:
        rig.listen(front)
    assert all(a.end is not None for a in (long, *streams))
    rig.close()


KINDS = {
    "plain": {},
    "windows": {"window_tokens": 24, "n_window_pages": 130},
    "recurrent": {"recurrent_bytes": 16, "n_snapshots": 12},
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("seed", range(8))
def test_storm(run_ahead: int, seed: int, kind: str, tmp_path: Path) -> None:
    """Random prompts, aborts, shared beginnings, few pages, and in half of them host memory for what is forgotten: every answer is that of its prompt alone."""
    rng = random.Random(100 * run_ahead + seed)
    sizes = replace(LONG, n_pages=rng.choice([90, 130, 257]), n_slots=rng.choice([2, 4, 6]), **KINDS[kind])
    rig = Rig(sizes, run_ahead, replace(SOON, burst_ms=rng.choice([0.5, 2.0, 5.0])), seed, part_tokens=rng.choice([4, 8, 24]))
    if seed % 2:
        rig.runner.use_tiers(rig.device, TierConfig(60 * rig.device.page_bytes, 0, tmp_path, ("storm",)))
    common, asked = prompt(rng, 120), []
    for _ in range(rng.randrange(20, 40)):
        n = rng.choice([3, 10, 40, 130, 200])
        begin = common[: rng.randrange(0, min(n, 120))] if rng.random() < 0.4 else []
        asked.append(rig.ask([*begin, *prompt(rng, n - len(begin))], max_tokens=rng.randrange(1, 50), client=rng.randrange(3)))
        turns(rig, rng.randrange(0, 12))
        rig.engine.check()
        if rng.random() < 0.15:
            rig.abort(rng.choice(asked))
    rig.run()
    for answer in asked:
        assert right(answer, sizes) or not ended_well(answer)
    rig.assert_empty()
    rig.close()


def test_long_prompts_do_not_take_all_slots_while_they_wait_for_the_part(run_ahead: int) -> None:
    """One is read, another is ready: the rest waits without a slot, and a short prompt that comes later overtakes them."""
    rig, rng = Rig(replace(LONG, n_slots=8, n_pages=600), run_ahead, SOON, part_tokens=8), random.Random(9)
    streams = beside_streams(rig, rng)
    longs = [rig.ask(prompt(rng, 220), max_tokens=2, client=1) for _ in range(7)]
    until(rig, lambda: rig.engine.aside.in_flight)
    for client in (1, 2):
        short = rig.ask(prompt(rng, 4), max_tokens=2, client=client)
        until(rig, lambda short=short: short.end)
    assert sum(a.started is not None for a in longs) <= 3 and all(a.end is None for a in longs)
    rig.run()
    assert all(right(a, LONG) and ended_well(a) for a in (*longs, *streams))
    rig.assert_empty()
    rig.close()


def test_of_many_prompts_that_wait_for_the_part_only_the_next_few_are_looked_at(run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of long prompts costs the streams no more, however long it is; and none of them is forgotten."""
    rig, rng = Rig(replace(LONG, n_slots=8, n_pages=600), run_ahead, SOON, part_tokens=64), random.Random(13)
    streams = beside_streams(rig, rng)
    looked_at = list[object]()
    put_back = WaitQueue.put_back
    monkeypatch.setattr(WaitQueue, "put_back", lambda self, request, cached: looked_at.append(request) or put_back(self, request, cached))
    longs = [rig.ask(prompt(rng, 120), max_tokens=2, client=k % 2) for k in range(60)]
    until(rig, lambda: sum(a.end is not None for a in longs) >= 6)
    assert not any(a.end for a in streams) and len(looked_at) <= 8 * MAX_WOKEN
    rig.abort(streams[0]), rig.abort(longs[50])
    rig.run(check=False)
    assert all(right(a, LONG) and ended_well(a) for k, a in enumerate(longs) if k != 50)
    rig.assert_empty()
    rig.close()


def test_a_short_prompt_does_not_wait_for_what_the_part_has_not_begun(run_ahead: int) -> None:
    """It begins as a long prompt does, before whose turn another long one is read: it is quicker by itself."""
    rig, rng = Rig(replace(LONG, n_slots=8, n_pages=600), run_ahead, replace(SOON, burst_ms=8.0), part_tokens=8), random.Random(12)
    streams = beside_streams(rig, rng)
    longs = [rig.ask(prompt(rng, n), max_tokens=2, client=1) for n in (200, 220)]
    until(rig, lambda: len(rig.engine.scheduler.aside) == 2 and rig.engine.aside.in_flight)
    begun = rig.engine.aside.in_flight[0].request.n_tokens
    last = next(a for a in longs if len(a.ask.prompt) != begun)
    short = rig.ask([*memoryview(last.ask.prompt)][:80], max_tokens=2, client=3)
    until(rig, lambda: short.end)
    assert all(a.end is None for a in longs) and not any(a.end for a in streams)
    rig.run()
    assert all(right(a, LONG) and ended_well(a) for a in (short, *longs, *streams))
    rig.assert_empty()
    rig.close()


def test_a_deadline_passes_for_who_waits_for_the_part_or_for_anothers_prefix(run_ahead: int) -> None:
    rig, rng = Rig(replace(LONG, n_slots=8, n_pages=600), run_ahead, SOON, part_tokens=8), random.Random(10)
    streams = beside_streams(rig, rng)
    longs = [rig.ask(prompt(rng, 220), max_tokens=2, client=1) for _ in range(2)]
    until(rig, lambda: len(rig.engine.scheduler.aside) == 2)
    soon = rig.device.now_ns + 20_000_000
    same = [*memoryview(longs[0].ask.prompt)][:200]
    late = [rig.ask(prompt(rng, 220), max_tokens=2, client=1, deadline_ns=soon), rig.ask([*same, 1, 2, 3], max_tokens=2, client=2, deadline_ns=soon)]
    until(rig, lambda: len(rig.engine.scheduler.held) == 2)
    until(rig, lambda: all(a.end for a in late))
    assert all(a.refused.code == RefusedCode.DEADLINE for a in late) and all(a.end is None for a in longs)
    rig.run()
    assert all(right(a, LONG) and ended_well(a) for a in (*longs, *streams))
    rig.assert_empty()
    rig.close()
