"""What a process takes on this machine's GPU, measured and kept for its plans."""

from __future__ import annotations

import time

from .. import hardware
from ..config import Config
from ..engine.calibrate import measure
from ..errors import PackError, UsageError
from ..memory import calibration
from ..memory.calibration import Calibration
from .opening import choose_place


def calibrate(config: Config) -> Calibration:
    """Measures the GPU that the config names and keeps what was found for this machine's plans. Raises: PackError, UsageError."""
    place = choose_place(config)
    if place.facts.kind != "cuda":
        raise UsageError(f"only a GPU is measured, this is {place.label}", "--device cuda --gpu N chooses one")
    gpu = hardware.gpu(config.gpu)

    def used() -> int:
        memory = hardware.gpu(config.gpu).memory
        return memory.total_bytes - memory.free_bytes

    x = measure(place.pack, place.facts, used, config.gpu)
    found = Calibration(
        gpu.name, gpu.driver, x.process_bytes, round(x.memory_bytes_per_s), round(x.host_bytes_per_s), x.pack, round(time.time())
    )
    if not found.is_sane:
        raise PackError(
            f"{gpu.name}: a process without a model seems to take {found.process_bytes} bytes, which cannot be",
            "does another program take or free memory of the GPU just now? measure again",
        )
    calibration.write(config.home_folder, found)
    return found
