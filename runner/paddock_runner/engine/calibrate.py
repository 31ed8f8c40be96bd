"""Measures what a process of ours takes on a device before it has a model, and how fast memory moves there.

A small made-up model is built as any model is; what is in use beyond its planned lines is the process. Takes a few seconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..blueprint.blueprint import Attention, Blueprint, FeedForward, Layer, Rope
from ..blueprint.names import expected_shapes
from ..errors import PackError
from ..files.view import TensorView
from ..memory.plan import DeviceFacts, PlanRequest, plan
from ..pack.device import Device
from .assemble import Assembly, build_device

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, HIDDEN, LAYERS, VOCABULARY, CTX, BATCH = 1024, 8, 2, 128, 2048, 4, 4096, 2048, 8
MEMORY_BYTES, HOST_BYTES = 1 << 30, 256 << 20
TRIES, LOOKS, LOOK_S, STILL_BYTES = 4, 25, 0.2, 1 << 20
SHARE = 8
"""At most one part in so many of the free memory is moved to and fro."""
ROUNDS = 4
KERNELS_BYTES = 40 << 20
"""What kernels of other models take beyond those of the made-up one: code that is loaded when it is first used, and registers that
spill. Measured on an H200 with the models of bench/fit_matrix.py: up to 30 MiB."""


@dataclass(frozen=True, slots=True)
class Measured:
    """process_bytes: in use beyond the plan's lines of the model, and room for other models' kernels. Rates: bytes per second; memory: read and written."""

    process_bytes: int
    memory_bytes_per_s: float
    host_bytes_per_s: float
    pack: str


def steady(used: Callable[[], int], once: Callable[[], Measured]) -> Measured:
    """A measurement during which no other program took or freed memory of the device. used: as `measure`; once: measures, and is over when
    it returns. Raises: PackError when there is no quiet moment, and what once raises."""
    for _ in range(TRIES):
        before = _settled(used)
        found = once()
        if abs(_settled(used) - before) <= STILL_BYTES:
            return found
    raise PackError("other programs take or free memory of the GPU just now", "measure again when they are quiet")


def _settled(used: Callable[[], int]) -> int:
    """Bytes in use once two looks agree: a driver takes a moment to put away what a process had."""
    last = used()
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        now = used()
        if now == last:
            break
        last = now
    return last


def measure(pack: Path, facts: DeviceFacts, used: Callable[[], int], ordinal: int = 0) -> Measured:
    """Build, look, move, close. used: bytes in use on the device now, as its driver counts them. Raises: PackError."""
    attention = Attention(HEADS, KV_HEADS, HEAD_WIDTH, HEAD_WIDTH**-0.5, Rope(1e4, HEAD_WIDTH))
    blueprint = Blueprint("llama", VOCABULARY, WIDTH, CTX, (Layer(attention, FeedForward(HIDDEN)),) * LAYERS, 1e-6, False)
    before = used()
    with tempfile.TemporaryDirectory() as folder:
        views = _zeros(blueprint, Path(folder) / "zeros")
        found = plan(blueprint, views, PlanRequest(CTX, BATCH, facts))
        device = build_device(Assembly(pack, found.sizes, found.kv_format, ordinal), blueprint, views)
    try:
        device.need_pages(found.sizes.n_pages)
        model_bytes = found.total_bytes - found.group_bytes("process")
        process_bytes = used() - before - model_bytes + KERNELS_BYTES
        size = min(MEMORY_BYTES, facts.free_bytes // SHARE) if facts.free_bytes else MEMORY_BYTES
        memory, host = _rates(device, size // 4096 * 4096)
        return Measured(max(0, process_bytes), memory, host, device.facts.build)
    finally:
        device.close()


def _zeros(blueprint: Blueprint, path: Path) -> dict[str, TensorView]:
    """Weights of nothing but zeros, all at the beginning of one file of holes."""
    sizes = {name: (shape, 2 if len(shape) == 2 else 4) for name, shape in expected_shapes(blueprint).items()}
    found = {}
    for name, (shape, width) in sizes.items():
        n_elements = shape[0] * (shape[1] if len(shape) == 2 else 1)
        found[name] = TensorView(name, shape, "bf16" if width == 2 else "f32", path, 0, width * n_elements)
    with path.open("wb") as file:
        file.truncate(max(view.n_bytes for view in found.values()))
    return found


def _rates(device: Device, size: int) -> tuple[float, float]:
    """(bytes per second within the device's memory, from pinned host memory). Raises: PackError when there is no room to measure."""
    if size < 1 << 20:
        raise PackError("there is too little free memory on the device to measure it", "stop what holds it")
    to, source = device.alloc(size, "calibration"), device.alloc(size, "calibration")
    host_bytes = min(HOST_BYTES, size)
    pinned = device.alloc(host_bytes, "calibration", is_pinned=True)
    return 2 * size / _seconds(device, to, source, size), host_bytes / _seconds(device, to, pinned, host_bytes)


def _seconds(device: Device, to: int, source: int, n_bytes: int) -> float:
    """The shortest of a few copies."""
    device.copy(to, source, n_bytes)
    device.settle()
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        device.copy(to, source, n_bytes)
        device.settle()
        times.append(time.perf_counter() - begun)
    return min(times)
