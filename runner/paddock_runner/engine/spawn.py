"""The engine's process, begun: the first thing that a runner does, so this imports next to nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..wire.channel import Channel

MODULE = "paddock_runner.engine.child"


def spawn(channel: Channel) -> subprocess.Popen[bytes]:
    """Starts the engine's process, which imports what it needs and then waits to be told (see order.py)."""
    return subprocess.Popen([sys.executable, "-m", MODULE], stdin=subprocess.PIPE, pass_fds=channel.fds)
