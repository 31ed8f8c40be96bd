"""What this machine has: threads and memory for the CPU pack, NVIDIA GPUs through NVML. Never opens a CUDA context."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import PackError

KIB = 1024
OLDEST_DRIVER = 580
"""Packs are built with CUDA 13, which wants this driver or a newer one. Source: CUDA 13.0 release notes, table 3."""

CORES_PER_PROCESSOR = {(8, 0): 64, (7, 0): 64, (7, 5): 64}
"""FP32 cores of a multiprocessor where it is not 128. Source: CUDA C++ Programming Guide, table of arithmetic throughput."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory, and what can be taken without swapping (within the control group's limit)."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU. which: what it was asked for by. uuid: as nvidia-smi -L lists it. capability: (9, 0) for sm_90."""

    which: str
    uuid: str
    name: str
    capability: tuple[int, int]
    n_processors: int
    memory: Memory
    driver: str = ""


def n_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def memory(root: Path = Path("/")) -> Memory:
    """This machine's memory."""
    facts: dict[str, int] = {}
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                facts[name] = int(words[0]) * KIB
    except OSError:
        return Memory(0, 0)
    total, free = facts.get("MemTotal", 0), facts.get("MemAvailable", 0)
    limit, used = _control_group(root)
    if limit and limit < total:
        total, free = limit, min(free, max(0, limit - used))
    return Memory(total, free)


def _control_group(root: Path) -> tuple[int, int]:
    """(limit, bytes that cannot be reclaimed) of the control group, (0, 0) where there is none."""
    for folder, limit_name, used_name, cache in (
        (root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_name).read_text().strip()
            used = int((folder / used_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        return (int(limit), max(0, used - int(stat.get(cache, 0)))) if limit.isdigit() else (0, 0)
    return 0, 0


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA driver is loaded here."""
    return (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists()


def seen(which: str, visible: str) -> int | str:
    """The driver's number or UUID of the GPU that `which` names: a number as CUDA counts, or a UUID. visible: CUDA_VISIBLE_DEVICES, "" where it is not set.

    Raises: PackError when there is no such GPU. Source: CUDA C++ Programming Guide, CUDA environment variables.
    """
    if not which.isdigit():
        if not which.startswith(("GPU-", "MIG-")):
            raise PackError(f"--gpu {which} is no number and no UUID", "nvidia-smi -L lists numbers and UUIDs (GPU-...)")
        return which
    index = int(which)
    words = [word.strip() for word in visible.split(",")] if visible.strip() else []
    if not words:
        return index
    shown = words[: words.index("-1")] if "-1" in words else words
    if index >= len(shown):
        raise PackError(
            f"GPU {index} cannot be used: CUDA_VISIBLE_DEVICES={visible} shows {len(shown)}",
            "count from 0 among those, or unset the variable",
        )
    return int(shown[index]) if shown[index].isdigit() else shown[index]


def gpu(which: str, library: str = "libnvidia-ml.so.1", visible: str = "") -> Gpu:
    """A GPU's facts, by its number or UUID. visible: CUDA_VISIBLE_DEVICES, among which CUDA counts. Raises: PackError with the driver's own reason.

    Source: NVML API reference (nvmlDeviceGetHandleByIndex_v2, nvmlDeviceGetMemoryInfo, nvmlDeviceGetNumGpuCores).
    """
    at = seen(which, visible)
    import ctypes  # `paddock fit` on a machine without a GPU is spared it

    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        raise PackError(
            "the NVIDIA driver's library libnvidia-ml.so.1 is missing", "--device cpu serves on the CPU"
        ) from None
    nvml.nvmlErrorString.restype = ctypes.c_char_p

    def call(name: str, *arguments: object) -> None:
        function = getattr(nvml, name, None)
        code = function(*arguments) if function is not None else 1
        if code:
            why = (
                nvml.nvmlErrorString(code).decode(errors="replace") if function is not None else "the driver is too old"
            )
            raise PackError(f"GPU {which} cannot be used: {name}: {why}", "--device cpu serves on the CPU")

    call("nvmlInit_v2")
    try:
        device, name, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
        major, minor, cores = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint()
        sizes, driver = (ctypes.c_ulonglong * 3)(), ctypes.create_string_buffer(96)
        call("nvmlSystemGetDriverVersion", driver, ctypes.c_uint(96))
        if isinstance(at, int):
            call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(at), ctypes.byref(device))
        else:
            call("nvmlDeviceGetHandleByUUID", at.encode(), ctypes.byref(device))
        call("nvmlDeviceGetName", device, name, 96)
        call("nvmlDeviceGetUUID", device, uuid, 96)
        call("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
        call("nvmlDeviceGetNumGpuCores", device, ctypes.byref(cores))
        call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(sizes))
    finally:
        nvml.nvmlShutdown()
    capability = (major.value, minor.value)
    n_processors = cores.value // CORES_PER_PROCESSOR.get(capability, 128)
    return Gpu(
        which,
        uuid.value.decode(errors="replace"),
        name.value.decode(errors="replace"),
        capability,
        n_processors,
        Memory(sizes[0], sizes[1]),
        driver.value.decode(),
    )


def is_old(driver: str) -> bool:
    """Whether a driver ("570.86.15") is older than the packs want. One that has no number is taken to be new."""
    number = driver.partition(".")[0]
    return number.isdigit() and int(number) < OLDEST_DRIVER


def pack_arch(capability: tuple[int, int]) -> str:
    """The architecture of the pack made for a compute capability ("sm_90a"); empty where none is made."""
    major, minor = capability
    exact = {(8, 6): "sm_86", (8, 9): "sm_89"}
    return exact.get((major, minor)) or {8: "sm_80", 9: "sm_90a", 10: "sm_100f", 12: "sm_120f"}.get(major, "")


def pack_names(capability: tuple[int, int]) -> list[str]:
    """CUDA packs that run on a compute capability, exact first: an architecture-specific one, then the family's."""
    major, minor = capability
    exact = f"cuda_sm{major}{minor}"
    return [f"{exact}a", exact, f"cuda_sm{major}0f", *([f"cuda_sm{major}0"] if minor else [])]
