"""Which models make room for another."""

from __future__ import annotations

from pathlib import Path

import pytest
from paddock_manager.fleet.spawn import Launch
from paddock_manager.fleet.state import Server
from paddock_manager.web.pool import Entry, _victim

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
