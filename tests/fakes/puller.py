"""Pulls in children that can be killed: `python -m tests.fakes.puller URL`, one home folder a line on standard input.

For each line it forks, prints the child's pid, and then how the child ended (negative: by a signal). The imports are paid once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paddock_manager.catalog import names
from paddock_manager.paths import HubSettings, Places
from paddock_manager.store import index  # noqa: F401 - paid before the fork
from paddock_manager.store.download import Limits
from paddock_manager.store.pull import Shop, Wish
from paddock_manager.store.web import Timing


def pull(url: str, home: str, part_bytes: int) -> None:
    """One pull, in the child."""
    shop = Shop(Places(Path(home)), HubSettings(url), Limits(connections=2, part_bytes=part_bytes, backoff_s=0.01), Timing(5.0, 30.0))
    shop.reserve_bytes = 0
    shop.execute(shop.resolve(names.parse("org/repo"), Wish())[0], lambda n: None)


def main() -> None:
    """One child a line."""
    for line in sys.stdin:
        home, _, part_bytes = line.strip().partition(" ")
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                pull(sys.argv[1], home, int(part_bytes))
                code = 0
            finally:
                os._exit(code)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
