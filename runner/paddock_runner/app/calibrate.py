"""What a process takes on this machine's GPU, measured and kept for its plans."""

from __future__ import annotations

import functools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from .. import hardware
from ..config import Config
from ..engine.calibrate import Measured, measure, steady
from ..errors import PackError, PaddockError, UsageError
from ..memory import calibration
from ..memory.calibration import Calibration
from ..pack.ordinal import cuda_ordinal
from .opening import Place, choose_place


def calibrate(config: Config) -> Calibration:
    """Measures the GPU that the config names and keeps what was found for this machine's plans. Raises: PackError, UsageError."""
    place = choose_place(config)
    if place.facts.kind != "cuda":
        raise UsageError(f"only a GPU is measured, this is {place.label}", "--device cuda --gpu N chooses one")
    gpu = hardware.gpu(config.gpu, visible=config.visible_gpus)
    x = steady(functools.partial(used_bytes, config.gpu, config.visible_gpus), functools.partial(measured_apart, place, config))
    found = Calibration(
        gpu.name, gpu.driver, x.process_bytes, round(x.memory_bytes_per_s), round(x.host_bytes_per_s), x.pack, round(time.time())
    )
    if not found.is_sane:
        raise PackError(
            f"{gpu.name}: a process without a model seems to take {found.process_bytes} bytes, which cannot be",
            "measure again when no other program takes or frees memory of the GPU",
        )
    calibration.write(config.home_folder, found)
    return found


def used_bytes(gpu: str, visible: str) -> int:
    """In use on a GPU now, by all programs. Raises: PackError."""
    memory = hardware.gpu(gpu, visible=visible).memory
    return memory.total_bytes - memory.free_bytes


def measured_apart(place: Place, config: Config) -> Measured:
    """The measurement in a process of its own: what it took is free again when it is over. Raises: PackError."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            found = pool.submit(_measure, place, config.gpu, config.visible_gpus).result()
        except BrokenProcessPool:
            raise PackError(
                f"measuring {place.label} ended without a word", "paddock doctor looks at driver and packs"
            ) from None
    if isinstance(found, tuple):
        raise PackError(*found)
    return found


def _measure(place: Place, gpu: str, visible: str) -> Measured | tuple[str, str]:
    """In that process. An error as its message and hint."""
    try:
        return measure(place.pack, place.facts, functools.partial(used_bytes, gpu, visible), cuda_ordinal(place.gpu))
    except PaddockError as error:
        return error.message, error.hint
