"""Pages below the device: what the tree forgets comes back from host memory and disk, also after a restart, and is never wrong."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from paddock_runner.cache import tiers as tiers_module
from paddock_runner.cache.store import PageStore
from paddock_runner.cache.tiers import READERS
from paddock_runner.engine.fetches import MAX_FETCH_NS
from paddock_runner.engine.tiering import TierConfig
from paddock_runner.errors import PackError
from paddock_runner.memory.state import StateSizes, window_pages
from paddock_runner.wire.messages import ErrorCode

from tests.soak.fake_device import FakeDevice, alone
from tests.soak.rig import SIZES, Answer, Rig
from tests.soak.test_soak import Storm

SMALL = replace(SIZES, n_slots=4, max_ctx_tokens=256, n_pages=80, max_step_tokens=64, max_step_rows=16)
MOST_TOKENS = 1024
HOST = 1 << 20


@pytest.fixture(autouse=True)
def reads_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, reading pays."""
    monkeypatch.setattr(tiers_module, "perf_counter_ns", lambda: 0)


def rig_on(folder: Path, disk: bool, run_ahead: int = 0, host: int = HOST, sizes: StateSizes = SMALL) -> Rig:
    rig = Rig(sizes, run_ahead=run_ahead)
    rig.runner.use_tiers(rig.device, TierConfig(host, (1 << 24) * disk, folder, ("model",)))
    return rig


def right(answer: Answer) -> bool:
    ask = answer.ask
    return answer.tokens == alone(list(memoryview(ask.prompt)), ask.max_tokens, SMALL.n_vocab, MOST_TOKENS, ask.seed, ask.stop)


def finish(rig: Rig) -> None:
    """Turns until all have ended, while the file thread works beside."""
    while not all(a.end for a in rig.answers.values()):
        if not rig.turn():
            time.sleep(0.0005)  # the device's clock is a made-up one, the file thread's is not
            rig.engine.device.now_ns += 1_000_000
        rig.engine.check()


def ask(rig: Rig, first: int, n: int = 200, n_tokens: int = 3) -> Answer:
    answer = rig.ask([(first + i) % 1000 for i in range(n)], n_tokens)
    finish(rig)
    assert right(answer)
    return answer


def settle(rig: Rig) -> None:
    """What can be written is written."""
    assert rig.runner.keeper is not None
    while rig.runner.keeper.idle() or rig.runner.keeper.tiers.has_unwritten:
        rig.runner.keeper.tiers.poll()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_forgotten_pages_come_back_from_host_memory(tmp_path: Path, run_ahead: int) -> None:
    rig = rig_on(tmp_path, False, run_ahead)
    ask(rig, 0)
    ask(rig, 300)
    again = ask(rig, 0)
    assert again.done.cached_tokens >= 196 and rig.engine.counters.prefill_tokens <= 200 + 200 + 8
    tiers = rig.runner.keeper.tiers  # type: ignore[union-attr]
    assert tiers.report()["restored"] > 10 and not list(tmp_path.iterdir())
    rig.assert_empty()
    rig.close()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_restart_comes_back_warm_from_disk(tmp_path: Path, run_ahead: int) -> None:
    rig = rig_on(tmp_path, True, run_ahead)
    ask(rig, 0)
    rig.close()
    warm = rig_on(tmp_path, True, run_ahead)
    again = ask(warm, 0)
    assert again.done.cached_tokens >= 196 and warm.engine.counters.prefill_tokens <= 8
    assert warm.runner.keeper.tiers.report()["read"] >= 49  # type: ignore[union-attr]
    warm.close()


def test_a_killed_runner_has_kept_what_it_wrote_while_it_was_idle(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, True)
    ask(rig, 0)
    settle(rig)
    rig.runner.keeper.tiers._store.close()  # type: ignore[union-attr]
    warm = rig_on(tmp_path, True)
    assert ask(warm, 0).done.cached_tokens >= 196
    warm.close()


def test_before_any_prompt_was_read_nobody_knows_that_reading_it_is_quicker_than_the_disk(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, True)
    ask(rig, 0)
    ask(rig, 1)
    rig.close()
    warm = rig_on(tmp_path, True)
    tiers = warm.runner.keeper.tiers  # type: ignore[union-attr]
    tiers.rate["disk"] = 50 * warm.device.page_bytes  # a second for each prompt, which takes less to compute
    assert ask(warm, 0).done.cached_tokens >= 196
    ask(warm, 2)
    tiers.rate["disk"] = 50 * warm.device.page_bytes
    assert ask(warm, 1).done.cached_tokens == 0, "now it is known"
    warm.close()


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, True)
    ask(rig, 0)
    rig.close()
    other = Rig(SMALL)
    other.runner.use_tiers(other.device, TierConfig(HOST, 1 << 24, tmp_path, ("another model",)))
    assert ask(other, 0).done.cached_tokens == 0
    other.close()


def test_damaged_pages_are_computed_again(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, True)
    ask(rig, 0)
    rig.close()
    (path,) = tmp_path.glob("*/*.kv")
    data = bytearray(path.read_bytes())
    for at in range(64 + 5, len(data), 64 + 32):
        data[at] ^= 1
    path.write_bytes(data)
    again = rig_on(tmp_path, True)
    assert ask(again, 0).done.cached_tokens == 0
    again.close()


def test_pages_that_are_dearer_to_read_than_to_compute_are_not_waited_for(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, True)
    ask(rig, 0)
    rig.close()
    slow = rig_on(tmp_path, True)
    slow.runner.keeper.tiers.rate["disk"] = 1.0  # type: ignore[union-attr]
    assert ask(slow, 0).done.cached_tokens == 0
    slow.close()


def test_other_requests_run_while_pages_come_from_disk(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, True)
    ask(rig, 0)
    rig.close()
    warm = rig_on(tmp_path, True)
    one, two = warm.ask([i % 1000 for i in range(200)], 3), warm.ask([5, 6, 7], 20)
    finish(warm)
    assert right(one) and right(two) and one.done.cached_tokens >= 196
    warm.close()


@pytest.mark.parametrize(("run_ahead", "disk", "n_host"), [(0, False, 40), (2, False, 12), (0, True, 64), (2, True, 64)])
def test_a_storm_short_of_pages_answers_right_with_tiers(tmp_path: Path, run_ahead: int, disk: bool, n_host: int) -> None:
    scene = Storm(400 + run_ahead, run_ahead, 40, 1)
    device: FakeDevice = scene.rig.device
    scene.rig.runner.use_tiers(device, TierConfig(n_host * device.page_bytes, (1 << 16) * disk, tmp_path, ("m",)))
    scene.run(120)
    seen = scene.judge()
    assert seen["cached"] > 0 and scene.rig.runner.keeper.tiers.report()["restored"] > 0  # type: ignore[union-attr]
    scene.rig.close()


def test_a_model_whose_pages_are_of_no_use_alone_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(replace(SMALL, recurrent_bytes=64, n_snapshots=0))
    rig.runner.use_tiers(rig.device, TierConfig(HOST, 1 << 24, tmp_path, ("model",)))
    assert rig.runner.keeper is None and not list(tmp_path.iterdir()) and "have no effect for this model" in caplog.text
    rig.close()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_pages_come_back_a_few_with_each_step_while_others_decode(tmp_path: Path, run_ahead: int) -> None:
    rig = rig_on(tmp_path, False, run_ahead, sizes=replace(SMALL, n_pages=200))
    ask(rig, 0, 240, 2)
    rig.engine.ledger.tree.evict(80)
    tiers = rig.runner.keeper.tiers  # type: ignore[union-attr]
    page_us = 3000.0
    tiers.rate["host"] = rig.device.page_bytes / page_us * 1e6
    tiers.see = tiers.watch = lambda *seen: None  # type: ignore[assignment, method-assign]
    stream = rig.ask([700, 701, 702], 150)
    while len(stream.tokens) < 20:
        rig.turn()
    again = rig.ask([i % 1000 for i in range(240)], 2)
    steps, n_before = [], tiers.n_in
    while again.end is None:
        rig.turn()
        rig.engine.check()
        steps.append(tiers.n_in - n_before)
        n_before = tiers.n_in
    assert right(again) and again.done.cached_tokens >= 236
    assert sum(steps) == 59 and max(steps) <= 17, "never more than a long step takes"
    finish(rig)
    assert right(stream)
    rig.assert_empty()
    rig.close()


def test_where_copies_run_beside_the_steps_a_request_runs_when_its_last_page_has_come(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, False, 2, sizes=replace(SMALL, n_pages=200))
    ask(rig, 0, 240, 2)
    rig.engine.ledger.tree.evict(80)
    stream = rig.ask([700, 701, 702], 150)
    while len(stream.tokens) < 20:
        rig.turn()
    device, made = rig.device, rig.device.copied
    device.copied = lambda: (device.n_given, min(device.n_made, limit))
    limit = 0  # the link is slow
    again = rig.ask([i % 1000 for i in range(240)], 2)
    while len(stream.tokens) < 90:
        rig.turn()
    assert device.n_given > 20 and not again.tokens and rig.engine.counters.prefill_tokens < 260
    device.copied = made
    finish(rig)
    assert right(again) and right(stream) and again.done.cached_tokens >= 236
    rig.assert_empty()
    rig.close()


def test_pages_that_are_coming_are_not_pushed_out_and_an_abort_lets_them_go(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, False, host=64 * FakeDevice(SMALL).page_bytes, sizes=replace(SMALL, n_pages=200))
    ask(rig, 0, 240, 2)
    rig.engine.ledger.tree.evict(80)
    tiers = rig.runner.keeper.tiers  # type: ignore[union-attr]
    tiers.rate["host"] = 1.0
    stream = rig.ask([700, 701, 702], 100)
    while len(stream.tokens) < 5:
        rig.turn()
    coming = rig.ask([i % 1000 for i in range(240)], 2)
    while coming.started is None:
        rig.turn()
    assert tiers._pins
    rig.abort(coming)
    finish(rig)
    assert not tiers._pins and right(stream)
    rig.assert_empty()
    rig.close()


HYBRID = replace(SMALL, recurrent_bytes=64, n_snapshots=10)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_states_come_back_with_their_pages_from_host_memory(tmp_path: Path, run_ahead: int) -> None:
    rig = rig_on(tmp_path, False, run_ahead, sizes=HYBRID)
    ask(rig, 0, 202)
    ask(rig, 300, 202)
    again = ask(rig, 0, 202)
    assert again.done.cached_tokens >= 196 and rig.engine.counters.prefill_tokens <= 200 + 200 + 8
    assert rig.runner.keeper.others.report()["restored"] == 1  # type: ignore[union-attr]
    rig.assert_empty()
    rig.close()


def test_states_that_were_pushed_out_alone_come_back_to_pages_that_stayed(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, False, sizes=replace(HYBRID, n_pages=400, n_snapshots=2))
    for k in range(4):
        ask(rig, 200 * k, 122)
    tiers = rig.runner.keeper.tiers  # type: ignore[union-attr]
    assert rig.engine.ledger.tree.n_evicted == 0
    again = ask(rig, 0, 122)
    assert again.done.cached_tokens >= 116 and tiers.n_in == 0
    rig.assert_empty()
    rig.close()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_restart_comes_back_warm_from_disk_with_states(tmp_path: Path, run_ahead: int) -> None:
    rig = rig_on(tmp_path, True, run_ahead, sizes=HYBRID)
    ask(rig, 0, 202)
    rig.close()
    warm = rig_on(tmp_path, True, run_ahead, sizes=HYBRID)
    again = ask(warm, 0, 202)
    assert again.done.cached_tokens >= 196 and warm.engine.counters.prefill_tokens <= 8
    assert warm.runner.keeper.others.report()["read"] == 1  # type: ignore[union-attr]
    warm.close()


def test_files_are_read_by_several_threads_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_on(tmp_path, True)
    ask(rig, 0)
    rig.close()
    together, read = threading.Barrier(READERS), PageStore.read

    def read_together(store: PageStore, key: bytes, into: memoryview) -> bool:
        together.wait(30)
        return read(store, key, into)

    monkeypatch.setattr(PageStore, "read", read_together)
    warm = rig_on(tmp_path, True)
    again = ask(warm, 0, 4 * READERS * SMALL.page_tokens + 1)
    assert again.done.cached_tokens == 4 * READERS * SMALL.page_tokens
    warm.close()


WINDOWED = replace(SMALL, window_tokens=10, n_window_pages=window_pages(10, 4, SMALL.slot_pages, SMALL.page_tokens, SMALL.max_step_tokens) + 8)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_what_windows_see_comes_back_with_the_pages_from_host_memory(tmp_path: Path, run_ahead: int) -> None:
    rig = rig_on(tmp_path, False, run_ahead, sizes=WINDOWED)
    for first in (0, 300, 600):
        ask(rig, first)
    again = ask(rig, 0)
    assert again.done.cached_tokens == 196
    assert rig.runner.keeper.others.report()["restored"] >= 1  # type: ignore[union-attr]
    assert rig.runner.keeper.tiers.report()["restored"] > 10  # type: ignore[union-attr]
    rig.assert_empty()
    rig.close()


def test_windows_that_were_pushed_out_alone_come_back_to_pages_that_stayed(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, False, sizes=replace(WINDOWED, n_pages=300))
    for first in (0, 300, 600, 900):
        ask(rig, first, 100)
    pool = rig.engine.ledger.windows
    assert pool is not None
    pool.let_go(pool.take(pool.n_free + pool.n_kept), False)
    assert ask(rig, 0, 100).done.cached_tokens == 96
    tiers, others = rig.runner.keeper.tiers, rig.runner.keeper.others  # type: ignore[union-attr]
    assert tiers.n_in == 0 and others.n_in == pool.n_back  # type: ignore[union-attr]
    rig.assert_empty()
    rig.close()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_restart_comes_back_warm_from_disk_with_windows(tmp_path: Path, run_ahead: int) -> None:
    rig = rig_on(tmp_path, True, run_ahead, sizes=WINDOWED)
    ask(rig, 0)
    rig.close()
    warm = rig_on(tmp_path, True, run_ahead, sizes=WINDOWED)
    again = ask(warm, 0)
    assert again.done.cached_tokens == 196 and warm.engine.counters.prefill_tokens <= 8
    assert warm.runner.keeper.others.report()["read"] == 3  # type: ignore[union-attr]
    warm.close()


def test_a_prompt_whose_windows_come_last_goes_on_when_they_have_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the time for reading is over, which is two seconds."""
    rig = rig_on(tmp_path, True, sizes=WINDOWED)
    ask(rig, 0)
    rig.close()
    warm = rig_on(tmp_path, True, sizes=WINDOWED)
    others = warm.runner.keeper.others  # type: ignore[union-attr]
    assert others is not None and others._store is not None
    read = others._store.read
    monkeypatch.setattr(others._store, "read", lambda key, into: time.sleep(0.1) or read(key, into))
    begun_ns = warm.device.now_ns
    assert ask(warm, 0).done.cached_tokens == 196
    assert warm.device.now_ns - begun_ns < MAX_FETCH_NS // 2
    warm.close()


@pytest.mark.parametrize(("run_ahead", "disk", "n_host"), [(0, False, 60), (2, True, 30), (3, False, 300)])
def test_a_storm_on_a_model_with_windows_answers_right_with_tiers(tmp_path: Path, run_ahead: int, disk: bool, n_host: int) -> None:
    scene = Storm(500 + run_ahead, run_ahead, 40, 1, window=7, n_window_pages=window_pages(7, 6, 24, 4, 40) + 4)
    scene.rig.runner.use_tiers(scene.rig.device, TierConfig(n_host * scene.rig.device.page_bytes, (1 << 22) * disk, tmp_path, ("storm",)))
    scene.run(120)
    seen = scene.judge()
    assert seen["cached"] > 0 and scene.rig.runner.keeper.others.report()["restored"] > 0  # type: ignore[union-attr]
    scene.rig.close()


LARGE = {"plain": {}, "recurrent": {"recurrent_bytes": 64, "n_snapshots": 10}, "windows": {"window_tokens": 10, "n_window_pages": 0}}


def large(kind: str) -> StateSizes:
    """A context of more pages than host memory has places for files to be read into."""
    sizes = replace(SMALL, max_ctx_tokens=MOST_TOKENS, n_pages=640, **LARGE[kind])
    return sizes if kind != "windows" else replace(sizes, n_window_pages=window_pages(10, 4, sizes.slot_pages, sizes.page_tokens, sizes.max_step_tokens) + 8)


@pytest.mark.parametrize("kind", list(LARGE))
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_prompt_with_more_pages_than_host_memory_has_places_comes_from_disk_page_by_page_once(tmp_path: Path, run_ahead: int, kind: str) -> None:
    rig = rig_on(tmp_path, True, run_ahead, host=0, sizes=large(kind))
    ask(rig, 0, 1002)
    rig.close()
    warm = rig_on(tmp_path, True, run_ahead, host=0, sizes=large(kind))
    streams = [warm.ask([k, k + 1, k + 2], 900) for k in range(2)]
    while not all(len(a.tokens) > 3 for a in streams):
        warm.turn()
    again = warm.ask([i % 1000 for i in range(1002)], 3)
    tiers = warm.runner.keeper.tiers  # type: ignore[union-attr]
    while again.end is None:
        warm.turn()
        warm.engine.check()
        while tiers.n_reading > sum(kind == "read" for kind, *_ in list(tiers._done)):
            time.sleep(0.0001)  # the streams' clock is a made-up one, the file threads' is not
    assert warm.device.n_host_pages == 64 and again.done.cached_tokens == 1000 and right(again)
    assert tiers.report()["read"] == 250, "each once"
    for answer in streams:
        warm.abort(answer)
    warm.run()
    warm.assert_empty()
    warm.close()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_who_leaves_while_pages_come_from_disk_lets_go_of_them_and_the_rest_is_not_read(tmp_path: Path, run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_on(tmp_path, True, run_ahead)
    ask(rig, 0)
    rig.close()
    warm = rig_on(tmp_path, True, run_ahead)
    tiers = warm.runner.keeper.tiers  # type: ignore[union-attr]
    go, read = threading.Event(), PageStore.read
    monkeypatch.setattr(PageStore, "read", lambda store, key, into: go.wait(30) and read(store, key, into))
    waiting = warm.ask([i % 1000 for i in range(200)], 3)
    warm.turn()
    assert waiting.started is None and len(tiers._pins) == 49
    warm.abort(waiting)
    warm.turn()
    assert waiting.end is not None and not tiers._pins
    go.set()
    while tiers.n_reading:
        warm.turn()
        time.sleep(0.0005)
    assert tiers.n_read <= READERS, "those that were being read"
    warm.assert_empty()
    assert ask(warm, 0).done.cached_tokens == 196, "and another finds them"
    warm.close()


def test_two_that_wait_for_the_same_pages_read_them_once_and_one_may_leave(tmp_path: Path) -> None:
    rig = rig_on(tmp_path, True)
    ask(rig, 0)
    rig.close()
    warm = rig_on(tmp_path, True)
    asked = [warm.ask([*(i % 1000 for i in range(200)), 7, k], 3, client=k) for k in range(3)]
    warm.turn()
    warm.abort(asked[1])
    finish(warm)
    assert all(a.done.cached_tokens >= 196 for a in asked[::2]) and warm.runner.keeper.tiers.report()["read"] == 50  # type: ignore[union-attr]
    assert not warm.runner.keeper.tiers._pins  # type: ignore[union-attr]
    warm.close()


@pytest.mark.parametrize("fault", ["hangs", "is lost"])
def test_a_device_that_fails_is_not_waited_for_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    rig = rig_on(tmp_path, True, run_ahead=2)
    ask(rig, 0)
    ask(rig, 300)
    assert rig.runner.keeper is not None
    rig.runner.keeper.idle()
    waiting = rig.ask([9] * 200, 50)
    while not rig.engine.in_flight:
        rig.turn()

    def wait(seq: int, timeout_us: int) -> bool:
        rig.device.now_ns += 10**9
        if fault == "is lost":
            raise PackError("wait: an illegal memory access was encountered")
        return False

    def settle() -> None:
        raise AssertionError("it would be waited for without end")

    monkeypatch.setattr(FakeDevice, "can_run", property(lambda device: False))
    monkeypatch.setattr(rig.device, "wait", wait)
    monkeypatch.setattr(rig.device, "settle", settle)
    with pytest.raises(PackError, match="has not finished" if fault == "hangs" else "illegal"):
        rig.runner.run()
    rig.listen(rig.fronts[0])
    assert waiting.done.error == ErrorCode.DEVICE
    rig.close()
    rig_on(tmp_path, True).close()  # the disk is free again


def test_a_disk_that_hangs_is_given_up_though_nothing_else_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_on(tmp_path, True)
    ask(rig, 0)
    rig.close()
    warm = rig_on(tmp_path, True)
    go, read = threading.Event(), PageStore.read
    monkeypatch.setattr(PageStore, "read", lambda store, key, into: go.wait(30) and read(store, key, into))
    waiting = warm.ask([i % 1000 for i in range(200)], 3)
    warm.turn()
    assert waiting.started is None and warm.runner._timeout_ms(warm.engine.ports) == 20, "a sleep ends, and it is looked again"
    warm.device.now_ns += 2 * MAX_FETCH_NS
    while waiting.end is None:
        warm.turn()
    assert right(waiting) and waiting.done.cached_tokens == 0
    go.set()
    warm.close()
