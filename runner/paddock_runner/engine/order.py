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
    host_cache_bytes: int = 0
    disk_cache_bytes: int = 0
    cache_folder: str = ""


def spawn(channel: Channel) -> subprocess.Popen[bytes]:
    """Starts the engine's process, which imports what it needs and then waits for its order."""
    return subprocess.Popen([sys.executable, "-m", MODULE], stdin=subprocess.PIPE, pass_fds=channel.fds)


def send(process: subprocess.Popen[bytes], order: Order) -> None:
    """Tells the engine's process what to do."""
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(order))
    except BrokenPipeError:
        pass
