"""What devices there are and what is free on them: /proc for the CPU, NVML for NVIDIA GPUs. Never opens a CUDA context."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paddock_runner import hardware

from paddock_manager import paths


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds device memory."""

    pid: int
    name: str
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU as NVML sees it. free_bytes: what a new process could take now."""

    index: int
    uuid: str
    name: str
    arch: str
    n_processors: int
    memory_bytes: int
    free_bytes: int
    driver: str
    holders: tuple[Holder, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Host:
    """This machine's CPU side. free_bytes: what can be taken without swapping, within the cgroup's limit."""

    n_threads: int
    memory_bytes: int
    free_bytes: int
    name: str = ""


def host(root: Path = Path("/")) -> Host:
    """Threads that we may use, and memory."""
    found = hardware.memory(root)
    return Host(hardware.n_threads(), found.total_bytes, found.free_bytes, _cpu_name(root / "proc/cpuinfo"))


def _cpu_name(path: Path) -> str:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def gpus() -> tuple[list[Gpu], str]:
    """(devices that CUDA sees, in its order; why there are none). The reason is "" when there are some."""
    if not hardware.has_gpu():
        return [], "no NVIDIA driver is loaded"
    from paddock_manager.fit.nvml import Nvml, NvmlTrouble

    try:
        with Nvml() as nvml:
            found = nvml.gpus()
    except FileNotFoundError:
        return [], "no NVIDIA driver is installed"
    except NvmlTrouble as error:
        return [], str(error)
    if not found:
        return [], "the driver sees no GPU"
    shown = _shown(found, paths.visible_gpus())
    return shown, "" if shown else f"CUDA_VISIBLE_DEVICES={paths.visible_gpus()} shows none of {len(found)}"


def _shown(found: list[Gpu], visible: str) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES shows, in its order; like CUDA, none behind one that is not there. Parts of a GPU (MIG) are not told apart."""
    if not visible or "MIG-" in visible:
        return found
    shown: list[Gpu] = []
    for word in (w.strip() for w in visible.split(",")):
        hit = [g for g in found if word == str(g.index) or (word.startswith("GPU-") and g.uuid.startswith(word))]
        if len(hit) != 1:
            break
        shown += hit
    return shown
