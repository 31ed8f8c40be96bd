"""Load cells on a modelled H200: the times that issue 4 promises follow from the policy, given what steps cost there. Virtual time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from paddock_runner.engine.policy import Policy

from bench import modelled
from bench.modelled import COSTS, Scene, run_cell, run_guest, run_long


def cell(cost: str, n_prompt: int, n_tokens: int, streams: int, requests: int, policy: Policy | None = None) -> tuple[dict[str, float], Scene]:
    scene = Scene(COSTS[cost], policy=policy)
    run_cell(scene, n_prompt, 2, 1, 1)
    return run_cell(scene, n_prompt, n_tokens, streams, requests), scene


@pytest.mark.parametrize("coming_us", [100, 350, 500])
@pytest.mark.parametrize(("cost", "most_ms"), [("8b.fp8", 60), ("8b.bf16", 90)])
def test_32_prompts_at_once_start_in_the_time_of_their_prefill_and_half_of_them_earlier(cost: str, most_ms: float, coming_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelled, "COMING_US", coming_us)
    found, _ = cell(cost, 128, 128, 32, 96)
    assert found["ttft_p50_ms"] <= most_ms and found["ttft_p99_ms"] <= 1.75 * found["ttft_p50_ms"]
    prefill_ms = COSTS[cost].packed_ms(20 * 128) + COSTS[cost].step_us([(1, 129)] * 20 + [(128, 0)] * 12) / 1000
    assert found["ttft_p99_ms"] <= prefill_ms + 12, "the last starts when all have been read"
    ideal = 32 * 128 / (prefill_ms + 127 * COSTS[cost].step_us([(1, 192)] * 32) / 1000) * 1000
    assert found["out_tok_s"] >= 0.97 * ideal
    assert found["itl_p99_ms"] <= 3 * found["itl_p50_ms"] and found["busy"] >= 0.985


@pytest.mark.parametrize("late_us", [0, 1500, 3500, 4500, 5000, 6500])
@pytest.mark.parametrize("cost", ["8b.fp8", "8b.bf16"])
def test_the_median_does_not_hang_on_how_many_had_come_when_the_first_step_began(cost: str, late_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelled, "COMING_US", 200)
    scene = Scene(COSTS[cost])
    run_cell(scene, 128, 2, 1, 1)
    turn, late = scene.turn, [late_us]

    def late_turn() -> list[int]:
        if scene.engine.n_open and late:
            scene.device.advance(scene.device.now_ns + 1000 * late.pop())
        return turn()

    monkeypatch.setattr(scene, "turn", late_turn)
    found = run_cell(scene, 128, 128, 32, 32)
    assert found["ttft_p50_ms"] <= 0.7 * found["ttft_p99_ms"]


@pytest.mark.parametrize("cost", ["8b.fp8", "8b.bf16"])
def test_the_first_cell_of_a_server_is_like_the_later_ones(cost: str) -> None:
    """Requests come with pauses now and then. What steps take is known from the start, so the first burst is read as the tenth is."""
    for seed in range(4):
        scene = Scene(COSTS[cost], pauses=0.08, seed=seed)
        cells = [run_cell(scene, 128, 128, 32, 96) for _ in range(2)]
        first, later = (found["ttft_p99_ms"] / found["ttft_p50_ms"] for found in cells)
        assert first <= 1.75 and first <= 1.3 * later


def test_waves_stay_together() -> None:
    """Who started together ends together and comes again together: a wave is two long steps, not many short ones."""
    _, scene = cell("8b.fp8", 128, 128, 32, 128)
    assert len([n for _, _, _, n in scene.device.steps if n > 128]) == 8


def test_a_prompt_alone_does_not_wait_for_company_that_does_not_come() -> None:
    found, _ = cell("8b.fp8", 128, 16, 1, 8)
    by_itself = COSTS["8b.fp8"].packed_ms(128) + (2 * modelled.FRONT_US + modelled.TURN_US) / 1000
    assert found["ttft_p99_ms"] <= by_itself + 1.4


def test_a_prompt_that_comes_while_others_decode_waits_for_one_step_at_most() -> None:
    scene = Scene(COSTS["8b.fp8"])
    ids = [scene.send(scene.device.now_ns, 128, 600) for _ in range(32)]
    while not all(len(scene.seen[i].times) > 100 for i in ids):
        scene.turn()
    step_ms = COSTS["8b.fp8"].step_us([(1, 230)] * 32) / 1000
    for k in range(10):
        late = scene.send(scene.device.now_ns + 370_000 * k, 128, 2)
        while not scene.seen[late].times:
            scene.turn()
        assert (scene.seen[late].times[0] - scene.seen[late].sent) / 1e6 <= 2 * step_ms + COSTS["8b.fp8"].step_us([(1, 230)] * 32 + [(128, 0)]) / 1000 - step_ms + 2.5


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("cost", ["8b.fp8", "8b.bf16"])
def test_one_prompt_after_another_starts_soon_and_does_not_make_streams_stutter(cost: str, factor: float) -> None:
    """Whatever prices the engine has learned before, from nobody or from 128 streams of short prompts."""
    for is_fresh in (True, False):
        scene = Scene(COSTS[cost].times(factor))
        if not is_fresh:
            run_cell(scene, 128, 128, 128, 128)
        found = run_cell(scene, 2048, 128, 32, 96)
        assert found["ttft_p50_ms"] <= 400 and found["itl_p99_ms"] <= 2 * found["itl_p50_ms"]


def test_the_device_has_no_gaps_at_128_streams() -> None:
    found, scene = cell("8b.fp8", 128, 64, 128, 256)
    steps = scene.device.steps
    idle = [b - a for (_, a, *_), (b, *_) in pairwise(steps) if b - a > 200_000]
    assert found["busy"] >= 0.99 and len(idle) <= 2


@pytest.mark.parametrize("cost", ["8b.fp8", "8b.bf16"])
def test_prompts_that_fill_a_step_do_not_wait_for_more(cost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients ask again later than a step of decode rows takes: while the first wait for the next, rows would be idle, and all who end behind them would wait as long."""
    monkeypatch.setattr(modelled, "AGAIN_US", 3000)
    _, scene = cell(cost, 128, 128, 128, 512)
    steps = scene.device.steps[len(scene.device.steps) // 3 : -150]
    all_ns = sum(end - begun for begun, end, *_ in steps)
    idle = sum((128 - n_decode - n // 128) * (end - begun) for begun, end, n_decode, n in steps)
    assert idle <= 0.03 * 128 * all_ns


@pytest.mark.parametrize(("cost", "most"), [("8b.fp8", 1.62), ("8b.bf16", 1.45)])
def test_a_long_prompt_beside_streams_takes_little_longer_than_alone_and_most_gaps_stay_as_they_were(cost: str, most: float) -> None:
    """In FP8 a token of a chunk with 129 to 256 rows takes half as long again as one of a full step: 1.45 would take longer gaps (decision 0021)."""
    found = run_long(COSTS[cost], 65000)
    assert found["itl_p50"] <= 1.25 and found["ttft"] <= most and found["itl_p99"] <= 6.5


def test_who_waits_for_a_slot_does_not_make_streams_stutter() -> None:
    """Nothing is read sooner for a prompt that cannot start."""
    scene = Scene(COSTS["8b.bf16"], n_slots=17, ctx=65100)
    ids = [scene.send(scene.device.now_ns, 128, 7000, client=k) for k in range(16)]
    while not all(len(scene.seen[i].times) > 200 for i in ids):
        scene.turn()
    begun = scene.device.now_ns
    long = scene.send(begun, 65000, 4, client=50)
    waiting = scene.send(begun + 500_000_000, 200, 4, client=51)
    while not scene.seen[long].times:
        scene.turn()
    gaps = [(b - a) / 1e6 for i in ids for a, b in pairwise(scene.seen[i].times) if a >= begun]
    assert not scene.seen[waiting].times and median(gaps) <= 1.25 * COSTS["8b.bf16"].step_us([(1, 800)] * 16) / 1000


@pytest.mark.parametrize("cost", ["8b.fp8", "8b.bf16"])
def test_a_long_prompt_that_is_read_aside_makes_gaps_as_long_as_the_rest_of_the_device_is_slower(cost: str) -> None:
    found = run_long(replace(COSTS[cost], parted=(1.35, 1.5)), 65000)
    assert found["itl_p99"] <= 1.75 and found["itl_p50"] <= 1.6 and found["ttft"] <= 1.6


def test_a_prompt_that_comes_while_another_is_read_aside_waits_for_the_step_that_runs_and_its_own() -> None:
    """Steps take longer then, and are launched no earlier before the end of the one before."""
    slower = 1.7
    scene = Scene(replace(COSTS["8b.bf16"], parted=(slower, 1.6)), ctx=65100)
    ids = [scene.send(scene.device.now_ns, 128, 4000) for _ in range(16)]
    while not all(len(scene.seen[i].times) > 60 for i in ids):
        scene.turn()
    long = scene.send(scene.device.now_ns, 65000, 4)
    while scene.engine.aside.n_tokens < 20000:
        scene.turn()
    took = []
    for k in range(20):
        late = scene.send(scene.device.now_ns + 20_000_000 + 370_000 * k, 128, 2)
        while not scene.seen[late].times:
            scene.turn()
        took.append((scene.seen[late].times[0] - scene.seen[late].sent) / 1e6)
    step_ms, own_ms = (COSTS["8b.bf16"].step_us(rows) / 1000 for rows in ([(1, 200)] * 16, [(1, 200)] * 16 + [(128, 0)]))
    assert not scene.seen[long].times and median(took) <= slower * (0.5 * step_ms + own_ms) + 2.5, took


def test_chunks_fill_the_tiles_of_the_device() -> None:
    _, scene = cell("8b.fp8", 2048, 128, 16, 32)
    cut = [n_decode + n for _, _, n_decode, n in scene.device.steps if n_decode and n > 256]
    assert sum(n % 128 == 0 or n % 128 > 96 for n in cut) > 0.6 * len(cut), "page borders lie up to 31 tokens before"


@pytest.mark.parametrize("cost", ["8b.fp8", "8b.bf16"])
def test_a_client_with_one_request_waits_little_longer_than_alone_behind_one_with_64(cost: str) -> None:
    found = run_guest(COSTS[cost], 2048, 32)
    assert found["p50"] <= 1.5 and found["most"] <= 2


@pytest.mark.parametrize("cost", ["8b.fp8", "8b.bf16"])
def test_guests_before_cost_a_guest_nothing(cost: str) -> None:
    """Each has held streams up for a long step; those that have begun since were not there."""
    found = run_guest(COSTS[cost], 2048, 17, before=(512,))
    assert found["p50"] <= 1.5 and found["most"] <= 2


@pytest.mark.parametrize(("cost", "most_ms"), [("8b.fp8", 45), ("8b.bf16", 60)])
def test_a_client_gets_a_slot_of_one_that_has_them_all_and_its_prompt_a_step_of_its_own(cost: str, most_ms: float) -> None:
    found = run_guest(COSTS[cost], 128, 32)
    assert found["most_ms"] <= most_ms, "the rest of the largest step, not the time until an answer ends"
    assert found["p50"] <= 1.5, "nor for steps that were enqueued though all slots were taken"


@pytest.mark.parametrize("cost", ["8b.fp8", "8b.bf16"])
def test_long_contexts_of_those_who_decode_are_priced_and_forgotten(cost: str) -> None:
    """What rows behind long contexts take does not make steps with prompts small, neither then nor when short ones follow."""
    scene = Scene(COSTS[cost])
    long = run_cell(scene, 6000, 256, 16, 32)
    short = run_cell(scene, 2048, 128, 32, 64)
    assert long["ttft_p50_ms"] <= 500 and long["itl_p99_ms"] <= 3 * long["itl_p50_ms"]
    assert short["ttft_p50_ms"] <= 200 and short["itl_p99_ms"] <= 1.5 * short["itl_p50_ms"]
