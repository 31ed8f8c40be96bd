"""Measures GPUs through their runner's pack, so that plans rest on this machine and not on a table: `paddock doctor --gpu`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paddock_runner.memory import calibration
from paddock_runner.memory.calibration import Calibration

from paddock_manager import paths
from paddock_manager.fit import packs
from paddock_manager.fit.gpus import Gpu, gpus
from paddock_manager.paths import Places

DRIFT_BYTES = 32 << 20
"""Two measurements that differ by more are not the same figure."""
TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one check, of a GPU or another. state: ok, warn, wrong."""

    check: str
    state: str
    says: str
    fix: str = ""


def outcomes(places: Places, runner: Sequence[str]) -> Iterator[Finding]:
    """Measure every GPU here and keep what was found. runner: the words that start paddock-runner."""
    found, why = gpus()
    if not found:
        yield Finding("calibration", "ok", f"there is no GPU to measure: {why}")
    installed = packs.packs() if found else []
    for gpu in found:
        name = f"calibration {gpu.index}"
        trouble, fix = packs.trouble(gpu, installed)
        yield Finding(name, "warn", f"not measured: {trouble}{_limits(gpu)}", fix) if trouble else _measured(places, runner, gpu, name)


def _measured(places: Places, runner: Sequence[str], gpu: Gpu, name: str) -> Finding:
    """One GPU by its pack."""
    before = calibration.read(places.home, gpu.name, gpu.driver)
    words = [*runner, "calibrate", "--device", "cuda", "--gpu", gpu.uuid, "--home", str(places.home), "--json"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=paths.child_environment()
        )
        found = Calibration(**json.loads(done.stdout)) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, TypeError) as error:
        return Finding(name, "wrong", f"the runner gave no measurement: {error}", "paddock-runner calibrate --json")
    if found is None:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("paddock-runner: error: ")
        return Finding(name, "wrong", f"the runner cannot measure it: {said}", "paddock-runner calibrate --json")
    mib, rates = found.process_bytes >> 20, _rates(found.memory_bytes_per_s, found.host_bytes_per_s)
    says = f"{gpu.name}: a process takes {mib} MiB before it has a model; {rates}; plans use it from now on"
    if before is not None and abs(before.process_bytes - found.process_bytes) > DRIFT_BYTES:
        return Finding(name, "warn", f"{says} ({before.process_bytes >> 20} MiB was kept until now, and is replaced)")
    return Finding(name, "ok", says)


def _rates(memory: float, host: float) -> str:
    return f"memory moves {memory / 1e9:.0f} GB/s, weights come from the host at up to {host / 1e9:.1f} GB/s"


def _limits(gpu: Gpu) -> str:
    """What the driver says of its memory and its link, where nothing can be measured."""
    from paddock_manager.fit.nvml import Nvml, NvmlTrouble

    try:
        with Nvml() as nvml:
            memory, link = nvml.limits(gpu.index)
    except (NvmlTrouble, FileNotFoundError):
        return ""
    return f" (by its driver: memory {memory / 1e9:.0f} GB/s, link to the host {link / 1e9:.1f} GB/s)"
