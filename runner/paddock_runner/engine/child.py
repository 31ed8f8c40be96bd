"""The engine as a process of its own: what it does first, how it ends. Dies with its parent, leaves nothing behind.

The device is opened with as few imports as that takes, and while it opens, a thread imports what the order needs.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from .. import log
from ..errors import PaddockError
from ..pack.device import Device
from ..pack.library import load_pack
from ..pack.ordinal import cuda_ordinal
from .order import Opening, Order

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""
REST = "paddock_runner.engine.ordered"


def main() -> int:
    """Loads what standard input orders and serves it. One sentence on standard error when that fails; never a traceback.

    What failed is not closed: a device that hangs would be waited for, and gives everything back when the process ends.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a whole session gets them: what becomes of us is the parent's business
        signal.signal(number, signal.SIG_IGN)
    importing = Thread(target=_import_rest, daemon=True)
    importing.start()
    words = sys.stdin.buffer.readline()
    if not words:
        return 0  # the parent found out that it cannot serve
    opening = msgspec.json.decode(words, type=Opening)
    die_with(opening.parent)
    log.start(opening.log_level)
    try:
        return _serve(opening, importing)
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


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, and ends now if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _serve(opening: Opening, importing: Thread) -> int:
    stages = log.Stages(opening.parent, "engine")
    stages.end("told")
    device: Device | PaddockError = _open(opening)
    stages.end("open")
    words = sys.stdin.buffer.readline()
    if not words:
        return 0  # it is the parent that says why
    if isinstance(device, PaddockError):
        raise device
    order = msgspec.json.decode(words, type=Order)
    stages.end("ordered")
    stages.speak()
    importing.join()
    rest: Any = importlib.import_module(REST)
    stages.end("imports")
    rest.serve(order, device, stages)
    device.close()
    return 0


def _open(opening: Opening) -> Device | PaddockError:
    """The device, or why it cannot be opened: said only once it is known that it will be needed."""
    try:
        pack = load_pack(Path(opening.pack))
        return Device(pack, cuda_ordinal(opening.gpu) if opening.gpu else 0, opening.threads, opening.max_isa, opening.is_invariant)
    except PaddockError as error:
        return error


def _import_rest() -> None:
    try:
        importlib.import_module(REST)
    except Exception:  # it is imported again where it is used, and fails there
        return


if __name__ == "__main__":
    code = main()
    if code:
        sys.stderr.flush()
        os._exit(code)  # nor waited for by what libraries do at the end
