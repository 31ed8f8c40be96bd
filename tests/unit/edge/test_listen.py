"""The listening socket: what is ready before anybody comes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paddock_runner.edge import listen

SIZES = """
import resource, sys
from paddock_runner.edge.listen import bind
if int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
def size():
    return int(next(line for line in open("/proc/self/status") if line.startswith("FDSize")).split()[1])
bind("127.0.0.1", 0)
print(size())
"""


@pytest.mark.parametrize(("limit", "least"), [(0, 1000), (200, 200)])
def test_the_table_of_open_files_need_not_grow_when_clients_come(limit: int, least: int) -> None:
    """In a process of several threads the kernel stops who opens the file that no longer fits, for many milliseconds."""
    done = subprocess.run([sys.executable, "-c", SIZES, str(limit)], capture_output=True, text=True, check=True, close_fds=True)
    assert int(done.stdout) >= least


def test_a_process_that_may_open_nothing_more_is_told_by_what_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "MAX_RESERVED", 1)  # the number that is asked for may be taken: that is no fault
    listen.reserve_descriptors()
