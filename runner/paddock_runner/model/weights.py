"""Checkpoint tensors to device memory: each matrix is read once, repacked once, and never held twice.

Knows nothing of families; names are ours (blueprint/names.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from ..blueprint.blueprint import Blueprint
from ..errors import FileError
from ..files.view import TensorView
from ..formats import table
from ..formats.reference import dequantize
from ..pack import abi
from ..pack.device import Device
from ..pack.tensor import Tensor

ALIGN_BYTES = 256
Progress = Callable[[int, int], None]


class Staging:
    """One buffer that grows to the largest tensor; tensors are read into it with pread, so that page cache is not counted as ours."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._buffer = mmap.mmap(-1, 1 << 20)

    def read(self, view: TensorView) -> memoryview:
        """The tensor's bytes; valid until the next read. Raises: FileError when the file is shorter than its header says."""
        if len(self._buffer) < view.n_bytes:
            self._buffer.close()
            self._buffer = mmap.mmap(-1, view.n_bytes)
        if view.path not in self._files:
            self._files[view.path] = os.open(view.path, os.O_RDONLY)
        target, done = memoryview(self._buffer)[: view.n_bytes], 0
        while done < view.n_bytes:
            n = os.preadv(self._files[view.path], [target[done:]], view.offset + done)
            if n == 0:
                raise FileError(
                    f"{view.path}: truncated: tensor {view.name} needs bytes up to {view.offset + view.n_bytes}, the file ends at {view.offset + done}",
                    "download it again, or run paddock verify",
                )
            done += n
        return target

    def close(self) -> None:
        """Closes files and gives the buffer back."""
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        self._buffer.close()


def is_matrix(name: str, view: TensorView) -> bool:
    """True for what a matrix product or a lookup reads; the rest (norms, biases, sinks) is small f32."""
    return len(view.shape) == 2 and name.endswith(".weight")


def source_of(view: TensorView, address: int = 0) -> abi.pk_source:
    """The pk_source of a GGUF or plain tensor."""
    source = abi.pk_source()
    source.data, source.n_bytes = address, view.n_bytes
    source.rows, source.cols = view.shape
    source.format = table.by_name(view.format).id
    source.global_scale = 1.0
    return source


def load_weights(
    device: Device, blueprint: Blueprint, views: Mapping[str, TensorView], progress: Progress | None = None
) -> dict[str, Tensor]:
    """All weights of the model on the device, by our names: matrices packed, vectors as f32 [1, n].

    progress: called with (bytes done, bytes in all) of the checkpoint. Raises: UnsupportedError, FileError, PackError.
    """
    matrices = {name: view for name, view in views.items() if is_matrix(name, view)}
    sizes = {name: device.packed_bytes(source_of(view)) for name, view in matrices.items()}
    base = device.alloc(sum(_aligned(n) for n in sizes.values()), "weights")
    total, done = sum(v.n_bytes for v in views.values()), 0
    staging, weights = Staging(), {}
    try:
        for name, view in _in_file_order(views):
            data = staging.read(view)
            if name in matrices:
                address = ctypes.addressof(ctypes.c_char.from_buffer(data))
                device.repack(source_of(view, address), base, sizes[name])
                weights[name] = Tensor(base, view.shape[0], view.shape[1], table.by_name(view.format).id, 0, abi.PK_PACKED)
                base += _aligned(sizes[name])
            else:
                offset = blueprint.norm_offset if "norm" in name else 0.0
                weights[name] = _vector(device, view, data, offset)
            done += view.n_bytes
            del data
            if progress is not None:
                progress(done, total)
    finally:
        staging.close()
    return weights


def _vector(device: Device, view: TensorView, data: memoryview, offset: float) -> Tensor:
    values = dequantize(view.format, np.frombuffer(data, np.uint8), (1, view.n_elements)).astype(np.float32) + np.float32(offset)
    address = device.alloc(_aligned(values.nbytes), "vectors")
    device.write(address, values.tobytes())
    return Tensor(address, 1, view.n_elements, abi.PK_F32)


def _in_file_order(views: Mapping[str, TensorView]) -> Iterable[tuple[str, TensorView]]:
    return sorted(views.items(), key=lambda item: (str(item[1].path), item[1].offset))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES
