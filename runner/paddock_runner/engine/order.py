"""What the engine's process is told, and how.

It is told twice, a line of JSON on its standard input each time: first which device to open, as soon as that is known, then what
to load. An end of its input before the second line means that there will be nothing to do.
"""

from __future__ import annotations

import subprocess

import msgspec

from ..memory.state import StateSizes


class Opening(msgspec.Struct, frozen=True):
    """The device that the engine will run on. gpu: its UUID, "" for the CPU. parent: the process that it must not outlive. max_isa, is_invariant: as in pk_open_config."""

    pack: str
    gpu: str
    threads: int
    log_level: str
    parent: int
    max_isa: int = 0
    is_invariant: bool = False


class Order(msgspec.Struct, frozen=True):
    """What the engine is to load and serve."""

    model: str
    channel: str
    sizes: StateSizes
    kv_format: str
    max_queue: int
    task: str = "auto"
    host_cache_bytes: int = 0
    disk_cache_bytes: int = 0
    cache_folder: str = ""
    idle_release_s: float = 0.0
    guesses: str = "auto"
    long_delay: float = 1.4
    cold_experts: str = "auto"


def send(process: subprocess.Popen[bytes], words: Opening | Order) -> None:
    """Tells the engine's process something; after the order, nothing more."""
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(words) + b"\n")
        process.stdin.flush()
        if isinstance(words, Order):
            process.stdin.close()
    except BrokenPipeError:
        pass
