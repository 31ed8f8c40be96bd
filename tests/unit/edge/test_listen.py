"""The listening socket: what is ready before anybody comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from paddock_runner.edge import listen

SIZES = """
import resource, sys
from paddock_runner.edge.listen import bind
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
limit = int(sys.argv[1]) if most == resource.RLIM_INFINITY else min(int(sys.argv[1]), most)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
bind("127.0.0.1", 0)
size = next(line for line in open("/proc/self/status") if line.startswith("FDSize"))
print(limit, size.split()[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the size of the table")
@pytest.mark.parametrize("limit", [2000, 200])
def test_the_table_of_open_files_need_not_grow_when_clients_come(limit: int) -> None:
    """In a process of several threads the kernel stops who opens the file that no longer fits, for many milliseconds."""
    done = subprocess.run([sys.executable, "-c", SIZES, str(limit)], capture_output=True, text=True, check=True)
    given, size = map(int, done.stdout.split())
    assert size >= given


@pytest.mark.parametrize("limit", [0, 2**30])
def test_room_that_is_not_to_be_had_is_no_fault(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(listen, "MAX_RESERVED", limit)  # no number at all, or more than a process may open
    listen.reserve_descriptors()


def test_a_process_that_may_open_nothing_more_goes_on_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("builtins.open", full)
    listen.reserve_descriptors()
