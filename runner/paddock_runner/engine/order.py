"""How the engine's process is started and what it is told: light to import, for the process that starts it."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from ..memory.state import StateSizes
from ..wire.channel import Channel

MODULE = "paddock_runner.engine.child"


class Order(msgspec.Struct, frozen=True):
    """What the engine is to do, as JSON on its standard input. parent: the process that it must not outlive."""

    model: str
    pack: str
    channel: str
    sizes: StateSizes
    kv_format: str
    gpu: int
    threads: int
    max_queue: int
    log_level: str
    parent: int
    task: str = "auto"


def start(order: Order, channel: Channel) -> subprocess.Popen[bytes]:
    """Starts the engine's process."""
    process = subprocess.Popen([sys.executable, "-m", MODULE], stdin=subprocess.PIPE, pass_fds=channel.fds)
    assert process.stdin is not None
    with process.stdin as pipe:
        try:
            pipe.write(msgspec.json.encode(order))
        except BrokenPipeError:
            pass
    return process
