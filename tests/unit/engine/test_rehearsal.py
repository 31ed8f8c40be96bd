"""What a device's steps take is known before the first request, on whatever device, and nothing is left of how that was found out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.rehearsal import LIMIT_NS, rehearse

from tests.soak import fake_device
from tests.soak.fake_device import ROW_US, STEP_US, TOKEN_US, FakeDevice
from tests.soak.rig import SIZES, Rig, right

LARGE = replace(SIZES, n_slots=24, max_ctx_tokens=512, n_pages=4001, max_step_tokens=2560, max_step_rows=24, n_results=6)


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_steps_are_priced_before_anybody_asks(run_ahead: int) -> None:
    device = FakeDevice(LARGE, run_ahead, 1)
    cost = rehearse(LARGE, device, Policy(), device.clock)
    for n in (1, 8, 20):
        assert cost.decode_us(n) == pytest.approx(STEP_US + n * ROW_US, rel=0.15)
    assert cost.quiet_us(1) == pytest.approx(STEP_US + ROW_US, rel=0.05)
    for n in (128, 1024):
        assert cost.chunk_us(n, 0) == pytest.approx(n * TOKEN_US, rel=0.1)


def test_contexts_are_believed_to_be_read_as_quickly_as_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "kv_page_bytes", 4096)
    device = FakeDevice(LARGE, 2, 1)
    cost = rehearse(LARGE, device, Policy(), device.clock, row_bytes=1_000_000)
    us = (STEP_US + ROW_US) * 4096 / LARGE.page_tokens / 1_000_000
    assert cost.decode_us(16, 16 * 1000) - cost.decode_us(16) == pytest.approx(16 * 1000 * us, rel=0.05) and cost.knows_contexts
    assert not rehearse(LARGE, device, Policy(), device.clock).knows_contexts


def test_nothing_is_left_of_it() -> None:
    device = FakeDevice(LARGE, 2, 1)
    cost = rehearse(LARGE, device, Policy(), device.clock)
    assert not device.pending
    rig = Rig(LARGE, device=device, policy=Policy())
    assert rig.engine.launched_seq == device.done[0] > 0 and cost is not rig.engine.scheduler.cost
    asked = [rig.ask([i, 2, 3], 20) for i in range(4)]
    rig.run()
    rig.assert_empty()
    assert all(right(answer, LARGE) for answer in asked)
    rig.close()


@pytest.mark.parametrize("changes", [{}, {"n_slots": 1}, {"n_pages": 9}, {"max_ctx_tokens": 512}, {"max_ctx_tokens": 512, "n_pages": 600, "max_step_tokens": 256}, {"recurrent_bytes": 64, "n_snapshots": 4, "max_ctx_tokens": 512, "n_pages": 600}])
def test_what_does_not_fit_is_left_out(changes: dict[str, int]) -> None:
    sizes = replace(SIZES, **changes)
    device = FakeDevice(sizes, 2, 3)
    rehearse(sizes, device, Policy(), device.clock)
    assert not device.pending


def test_a_slow_device_is_not_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_device, "STEP_US", 100_000)
    device = FakeDevice(LARGE, 2, 1)
    begun = device.clock()
    rehearse(LARGE, device, Policy(), device.clock)
    assert device.clock() - begun < 2 * LIMIT_NS
