"""How missing experts are shared between PCIe and the host's threads, by what each takes."""

from __future__ import annotations

import pytest
from paddock_runner.pack.fetched import Cold


def cold(copy_us: float, compute_us: float, ask_us: float) -> Cold:
    return Cold(14, 48, 0, copy_us, compute_us, 0.0, ask_us, "AVX-512")


@pytest.mark.parametrize("rates, shares", [((100, 60, 10), [0, 1, 1, 2, 3, 3, 4, 4, 5]), ((100, 1000, 10), [0, 0, 0, 0, 0, 0, 0, 0, 0]), ((100, 10, 500), [0, 0, 0, 0, 0, 0, 1, 2, 3])])
def test_the_share_is_the_one_that_is_done_first(rates, shares):
    host = cold(*rates)
    assert [host.share(n) for n in range(9)] == shares
    for n in range(1, 30):
        took = [max(host.ask_us + k * host.expert_us if k else 0, (n - k) * host.copy_us) for k in range(n + 1)]
        assert took[host.share(n)] == min(took)


def test_experts_are_told_apart_from_copies_in_the_log(caplog):
    from paddock_runner.engine.experts import tell_cold

    with caplog.at_level("INFO", "paddock"):
        tell_cold(cold(92.5, 60.0, 9.0))
        tell_cold(Cold(0, 0, 0, 0.0, 0.0, 0.0, 0.0, ""))
    assert "experts.cold threads=14 isa=AVX-512 layers=48 copy_us=92.5 compute_us=60 ask_us=9 of_4_missing=2 of_8_missing=5" in caplog.text
    assert 'computed_by="the device"' in caplog.text
