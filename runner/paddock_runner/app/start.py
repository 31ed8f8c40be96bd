"""How a runner starts: the engine's process first, then what it is to open and to load, then everything else while it loads.

Imports what this takes and no more: what the front needs is imported once the engine has its order.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from contextlib import closing

from .. import log
from ..config import Config
from ..engine.spawn import spawn
from ..errors import UnknownModel
from ..wire.channel import Channel

KILL_AFTER_S = 10.0


def serve(config: Config) -> int:
    """Serves a model until told to stop; returns the exit code. Raises: PaddockError before it is ready."""
    gc.disable()  # until what was loaded is set apart
    log.start(config.log_level)
    if not config.model_path.exists():
        raise UnknownModel(f"{config.model_path}: there is no such file or folder", "check --model", name=str(config.model_path))
    channel = Channel.create()
    process = spawn(channel)
    stages = log.Stages(os.getpid(), "front")
    stages.end("python")
    try:
        from .order import give

        with closing(give(config, channel, process, stages)) as given:
            from .runner import run

            stages.end("imports")
            return run(given, config, stages)
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """The engine's process ends: by itself in a moment, else by force. One that never got its order has nothing to finish."""
    if process.stdin is not None and not process.stdin.closed:
        process.kill()
        process.stdin.close()
    for number in (None, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        try:
            process.wait(KILL_AFTER_S)
            return
        except subprocess.TimeoutExpired:
            continue
