"""The engine as a process of its own: what it does first, how it ends. Dies with its parent, leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import msgspec

from .. import log
from ..blueprint.names import tensors_by_name
from ..blueprint.read import read_blueprint
from ..cache.tiers import file_facts
from ..errors import PaddockError
from ..files.checkpoint import open_checkpoint
from ..wire.channel import Channel
from .assemble import Assembly, build_device
from .order import Order
from .policy import Policy
from .process import EngineConfig, engine_main
from .tiering import TierConfig

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def main() -> int:
    """Loads what standard input orders and serves it. One sentence on standard error when that fails; never a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    words = sys.stdin.buffer.read()
    if not words:
        return 0  # the parent found out that it cannot serve
    order = msgspec.json.decode(words, type=Order)
    die_with(order.parent)
    log.start(order.log_level)
    try:
        _serve(order)
    except PaddockError as error:
        sys.stderr.write(f"paddock-runner: error: {error}\n")
        return error.exit_code
    except MemoryError:
        sys.stderr.write("paddock-runner: error: there is not enough memory for this model\n")
        return 9
    except Exception as fault:  # the process's edge: a fault becomes one sentence, its traceback a debug line
        log.debug("fault", trace=repr(fault))
        sys.stderr.write(f"paddock-runner: error: the engine failed: {type(fault).__name__}: {fault}\n")
        return 1
    return 0


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, and ends now if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _serve(order: Order) -> None:
    channel = Channel.parse(order.channel)
    checkpoint = open_checkpoint(order.model)
    blueprint = read_blueprint(checkpoint, order.task)
    assembly = Assembly(Path(order.pack), order.sizes, order.kv_format, order.gpu, order.threads)
    device = build_device(assembly, blueprint, tensors_by_name(checkpoint, blueprint))
    try:
        tiers = None
        if order.host_cache_bytes or order.disk_cache_bytes:
            facts = tuple(file_facts(path) for path in sorted(checkpoint.paths))
            tiers = TierConfig(order.host_cache_bytes, order.disk_cache_bytes, Path(order.cache_folder), facts)
        policy = Policy(max_queue=order.max_queue, whole_prompts=blueprint.needs_whole_prompts)
        engine_main(
            EngineConfig(order.sizes, policy, device.read_vectors if blueprint.pooling else None, tiers),
            device,
            [channel],
        )
    finally:
        device.close()


if __name__ == "__main__":
    sys.exit(main())
