"""Which models make room for another, and how those go that nobody uses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from paddock_manager.fleet import spawn, state
from paddock_manager.fleet.spawn import Launch
from paddock_manager.fleet.state import Server
from paddock_manager.paths import Places
from paddock_manager.web.pool import Entry, Pool, _victim

LIVE = Server("x", "", "", 1, 0.0, "127.0.0.1", 1, "cpu", 1, 1, "", 0.0)


@pytest.mark.parametrize(
    ("sizes", "lacking", "first"),
    [
        ([1, 5], 4, 5), ([1, 5], 1, 1), ([2, 2, 2], 3, 2), ([1, 1, 5], 6, 1), ([3, 1, 5], 8, 3), ([1, 1], 5, 1), ([], 1, None),
    ],
)  # fmt: skip
def test_least_recently_used_goes_unless_those_who_must_go_anyway_give_room_enough(sizes: list[int], lacking: int, first: int | None) -> None:
    idle = [Entry(Launch(str(i), "", Path()), size, server=LIVE) for i, size in enumerate(sizes)]
    found = _victim(idle, lacking)
    assert (found.need_bytes if found else None) == first


def test_idle_models_all_go_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "forget", full)
    monkeypatch.setattr(spawn, "_end", lambda *_: True)
    entries = [Entry(Launch(str(i), "", Path()), 1, server=LIVE) for i in range(3)]
    pool = Pool(Places(tmp_path), entries, 9, 0.001, 1.0)
    asyncio.run(pool.stop_idle())
    assert {e.state for e in entries} == {"on demand"}
    for entry in entries:
        entry.server = LIVE
    monkeypatch.setattr(spawn, "stop", full)
    asyncio.run(pool.stop_idle())
    assert {e.state for e in entries} == {"on demand"}


def test_idle_models_go_on_ending_when_who_asked_for_it_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [Entry(Launch(str(i), "", Path()), 1, server=LIVE) for i in range(3)]

    async def cancelled() -> None:
        pool = Pool(Places(tmp_path), entries, 9, 0.001, 1.0)
        work = asyncio.ensure_future(pool.stop_idle())
        while not all(e.is_changing for e in entries):
            await asyncio.sleep(0)
        work.cancel()
        while any(e.is_changing for e in entries):
            await asyncio.sleep(0.001)

    monkeypatch.setattr(spawn, "stop", lambda *_: True)
    asyncio.run(asyncio.wait_for(cancelled(), 5))
