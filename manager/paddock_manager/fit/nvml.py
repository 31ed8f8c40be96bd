"""The few read-only calls of NVIDIA's management library that fit and doctor make. Never opens a CUDA context.

Source: NVML API reference; structures of nvmlDeviceGetMemoryInfo and nvmlDeviceGetComputeRunningProcesses_v3.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from paddock_runner import hardware

from paddock_manager.fit.gpus import Gpu, Holder

MEMORY_CLOCK = 2
"""NVML_CLOCK_MEM."""
LANE_BYTES_PER_S = 0.985e9
"""Of PCI Express 3.0; each generation doubles it. Source: PCI Express base specification."""


class NvmlTrouble(Exception):
    """NVML is there and refuses. The message is NVML's own."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu", ctypes.c_uint),
        ("compute", ctypes.c_uint),
    ]


class Nvml:
    """The few read-only calls of libnvidia-ml that we make.

    Source: NVML API reference; structures of nvmlDeviceGetMemoryInfo and nvmlDeviceGetComputeRunningProcesses_v3.
    """

    def __init__(self, library: str = "libnvidia-ml.so.1"):
        try:
            self._lib = ctypes.CDLL(library)
        except OSError:
            raise FileNotFoundError(library) from None
        self._lib.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.nvmlShutdown()

    def _call(self, name: str, *args: Any) -> None:
        function = getattr(self._lib, name, None)
        if function is None:
            raise NvmlTrouble(f"the driver is too old: it has no {name}")
        code = function(*args)
        if code:
            raise NvmlTrouble(f"{name}: {self._lib.nvmlErrorString(code).decode('utf-8', 'replace')}")

    def _text(self, name: str, *args: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._call(name, *args, buffer, 96)
        return buffer.value.decode("utf-8", "replace")

    def _number(self, name: str, *args: Any) -> int:
        value = ctypes.c_uint(0)
        self._call(name, *args, ctypes.byref(value))
        return value.value

    def gpus(self) -> list[Gpu]:
        """All devices, in PCI bus order. Raises: NvmlTrouble."""
        driver = self._text("nvmlSystemGetDriverVersion")
        return [self._gpu(i, driver) for i in range(self._number("nvmlDeviceGetCount_v2"))]

    def limits(self, index: int) -> tuple[float, float]:
        """(bytes per second of the device's memory by its clock and bus, of its link by generation and width). Raises: NvmlTrouble."""
        device, mhz = ctypes.c_void_p(), ctypes.c_uint()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        self._call("nvmlDeviceGetMaxClockInfo", device, ctypes.c_int(MEMORY_CLOCK), ctypes.byref(mhz))
        bits = self._number("nvmlDeviceGetMemoryBusWidth", device)
        generation, lanes = (self._number(f"nvmlDeviceGetMaxPcieLink{x}", device) for x in ("Generation", "Width"))
        return 2e6 * mhz.value * bits / 8, LANE_BYTES_PER_S * 2.0 ** (generation - 3) * lanes

    def _gpu(self, index: int, driver: str) -> Gpu:
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        self._call("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
        try:
            cores = self._number("nvmlDeviceGetNumGpuCores", device)
        except NvmlTrouble:
            cores = 0
        return Gpu(
            index,
            self._text("nvmlDeviceGetUUID", device),
            self._text("nvmlDeviceGetName", device),
            f"sm_{major.value}{minor.value}",
            cores // hardware.CORES_PER_PROCESSOR.get((major.value, minor.value), 128),
            memory.total,
            memory.free,
            driver,
            self._holders(device),
        )

    def _holders(self, device: ctypes.c_void_p) -> tuple[Holder, ...]:
        """Processes with memory on the device; empty where the driver does not tell."""
        count = ctypes.c_uint(64)
        found = (_Process * 64)()
        try:
            self._call("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), found)
        except NvmlTrouble:
            return ()
        unknown = (1 << 64) - 1
        rows = [Holder(p.pid, _process_name(p.pid), 0 if p.used == unknown else p.used) for p in found[: count.value]]
        return tuple(sorted(rows, key=lambda h: -h.used_bytes))


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"
