"""Storms in which everything comes together: prompts that a part of the device reads, pages on disk with few places in host memory, recurrent states or windows, masks and guesses, clients light and heavy,
cancelled requests and restarts that come back warm. Every answer is that of its ask alone, and nothing is left behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from paddock_runner.cache import tiers as tiers_module
from paddock_runner.engine.tiering import TierConfig
from paddock_runner.memory.state import window_pages

from tests.soak.test_soak import SIZES, Storm

WINDOW = 7
LEAST = window_pages(WINDOW, SIZES.n_slots, SIZES.slot_pages, SIZES.page_tokens, SIZES.max_step_tokens)
KINDS = {"plain": {}, "recurrent": {"n_snapshots": 12}, "windows": {"window": WINDOW, "n_window_pages": LEAST + 4}}
HOST_PLACES = (0, 6, 200)


@pytest.fixture(autouse=True)
def reads_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, reading pays."""
    monkeypatch.setattr(tiers_module, "perf_counter_ns", lambda: 0)


def storm(seed: int, run_ahead: int, kind: str, folder: Path, n_asks: int, n_lives: int = 2, least_pages: int = 0) -> dict[str, int]:
    """Runners one after the other over the same disk; what was seen in all of them. least_pages: as in Storm."""
    rng, seen = random.Random(seed), dict[str, int]()
    for life in range(n_lives):
        scene = Storm(n_lives * seed + life, run_ahead, rng.choice((30, 60, 160)), rng.choice((1, 2)), part_tokens=rng.choice((0, 4, 10)), **KINDS[kind])
        rig, device = scene.rig, scene.rig.device
        scene.least_pages = least_pages
        scene.families = [[(97 * f + 13 * i + seed) % 480 for i in range(90)] for f in range(4)]
        rig.engine.drafter.is_on = kind == "plain" and rng.random() < 0.5
        rig.runner.use_tiers(device, TierConfig(rng.choice(HOST_PLACES) * device.page_bytes, 1 << 22, folder, ("together",)))
        try:
            scene.run(n_asks)
            found = scene.judge()
        finally:
            rig.close()
        keeper = rig.runner.keeper
        found |= {"read": keeper.tiers.n_read, "restored": keeper.tiers.n_in, "aside": rig.engine.aside.n_tokens} if keeper is not None else {}
        seen = {name: seen.get(name, 0) + n for name, n in found.items()}
    return seen


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_everything_together(run_ahead: int, kind: str, tmp_path: Path) -> None:
    storm(40 + run_ahead, run_ahead, kind, tmp_path, 80)


@pytest.mark.parametrize("kind", list(KINDS))
def test_everything_together_while_others_take_memory_and_leave_it(kind: str, tmp_path: Path) -> None:
    seen = storm(90, 2, kind, tmp_path, 80, least_pages=4)
    assert seen["length"] > seen["memory"], seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_many_such_storms(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    storm(5000 + seed, rng.randrange(4), rng.choice(list(KINDS)), tmp_path, 200, 3)
