"""Checkpoint tensors to device memory: each matrix is read once, repacked once, and never held twice.

Knows nothing of families; names are ours (blueprint/names.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..blueprint.blueprint import Blueprint
from ..blueprint.unit import unit_norms
from ..errors import FileError, UnsupportedError
from ..files.view import TensorView
from ..formats import table
from ..formats.reference import dequantize
from ..pack import abi
from ..pack.device import Device, aligned, f32_tensor
from ..pack.tensor import Tensor
from . import int4
from .staging import BUFFERS, Part, Staging, parts_of

Progress = Callable[[int, int], None]


def is_matrix(name: str, view: TensorView) -> bool:
    """True for what a matrix product or a lookup reads; the rest (norms, biases, sinks) is small f32."""
    return len(view.shape) == 2 and name.endswith(".weight")


SCALE_KINDS = {"tensor": abi.PK_SCALES_TENSOR, "row": abi.PK_SCALES_ROW, "block": abi.PK_SCALES_BLOCK, "group": abi.PK_SCALES_GROUP}


@dataclass(slots=True)
class ScaleValues:
    """Scales in host memory: f32, or (groups) bytes; and the factor for the whole weight."""

    values: NDArray[Any]
    whole: float


def source_of(view: TensorView, address: int = 0, scales: ScaleValues | None = None, part: Part | None = None) -> abi.pk_source:
    """The pk_source of a weight, or of some of its rows. Without `address` and `scales` it only describes: enough to ask for packed bytes."""
    source = abi.pk_source()
    source.data, source.n_bytes = address, view.weight_bytes
    source.rows, source.cols = view.shape
    source.format = table.by_name(view.format).id
    source.global_scale = 1.0
    if view.scales is not None:
        shape = view.scales.view.shape
        source.scales = SCALE_KINDS[view.scales.kind]
        source.scale_rows, source.scale_cols = (shape[0] if shape else 1), (shape[1] if len(shape) > 1 else 1)
        source.block_rows, source.block_cols = view.scales.block
    if scales is not None:
        source.scale_data, source.global_scale = scales.values.ctypes.data, scales.whole
    if part is not None:
        source.first_row, source.part_rows = part.first_row, part.n_rows
    return source


def read_scales(staging: Staging, view: TensorView) -> ScaleValues | None:
    """The scales beside a weight, checked. Raises: FileError naming the tensor that holds a NaN, an infinity or a zero."""
    scales = view.scales
    if scales is None:
        return None
    whole = 1.0
    if scales.whole is not None:
        whole = float(_numbers(staging, scales.whole)[0])
        whole = 1.0 / whole if scales.is_divisor else whole
    if scales.kind != "group":
        return ScaleValues(_numbers(staging, scales.view), whole)
    codes = np.array(arranged(scales.view, staging.read(scales.view)))
    # e4m3: 0x7f is no number and the sign bit has no place; e8m0: 0xff is no number
    bad = codes >= 0x7F if scales.view.format == "fp8_e4m3" else codes == 0xFF
    if bad.any():
        raise _bad_scale(scales.view, f"code {codes[bad][0]:#04x}")
    return ScaleValues(codes, whole)


def _int4(staging: Staging, view: TensorView) -> NDArray[np.uint8]:
    """What a weight becomes that is stored as 4-bit codes. Raises: UnsupportedError, FileError."""
    return int4.converted(view, lambda x: np.array(np.frombuffer(staging.read(x), np.uint8)), lambda x: _numbers(staging, x))


def _transposed(staging: Staging, view: TensorView) -> NDArray[np.uint8]:
    """The values of a quantised weight, transposed, as f16. Raises: UnsupportedError (4-bit codes with scales of their own), FileError."""
    scales = view.scales
    if view.int4 is not None or (scales is not None and (scales.kind == "group" or scales.whole is not None)):
        raise UnsupportedError(f"{view.path}: tensor {view.name} would be transposed, which is not supported in {view.format}", what="transposed weight")
    values = dequantize(view.format, arranged(view, staging.read(view)), view.shape)
    if scales is not None:
        factors, (rows, cols) = _numbers(staging, scales.view).reshape(scales.view.shape), view.shape
        if scales.kind == "block":
            factors = np.repeat(np.repeat(factors, scales.block[0], 0)[:rows], scales.block[1], 1)[:, :cols]
        values = values * (factors.reshape(-1, 1) if scales.kind == "row" else factors)
    return np.ascontiguousarray(values.T).astype("<f2").view(np.uint8).reshape(-1)


def _numbers(staging: Staging, view: TensorView) -> NDArray[np.float32]:
    """A tensor of scales as f32; every one a positive number."""
    data = arranged(view, staging.read(view))
    values = np.ldexp(np.float32(1), data.astype(np.int32) - 127) if view.format == "e8m0" else dequantize(view.format, data, (1, view.n_elements))
    values = np.ascontiguousarray(values, np.float32).reshape(-1)
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        raise _bad_scale(view, str(values[bad][0]))
    return values.copy()


def _bad_scale(view: TensorView, value: str) -> FileError:
    return FileError(f"{view.path}: tensor {view.name} holds the scale {value}, expected positive numbers", path=str(view.path), field=view.name)


@dataclass(frozen=True, slots=True)
class Away:
    """Matrices that do not lie among the others: addresses by name, and the bytes from one to the next of their stacks."""

    places: Mapping[str, int]
    stride: int


NOWHERE = Away({}, 0)


def load_weights(
    device: Device, blueprint: Blueprint, views: Mapping[str, TensorView], progress: Progress | None = None, away: Away = NOWHERE
) -> dict[str, Tensor]:
    """All weights of the model on the device, by our names: matrices packed, vectors as f32 [1, n].

    away: matrices that have their places elsewhere. progress: called with (bytes done, bytes in all) of the checkpoint. Raises: UnsupportedError, FileError, PackError.
    """
    matrices = {name: view for name, view in views.items() if is_matrix(name, view)}
    sizes = {name: device.packed_bytes(source_of(view)) for name, view in matrices.items()}
    here = {name: n for name, n in sizes.items() if name not in away.places}
    places = {**_places(device.alloc(sum(aligned(n) for n in here.values()), "weights"), here), **away.places}
    total, done = sum(v.n_bytes for v in views.values()), 0
    in_order = _in_file_order(views)
    parts = {name: parts_of(view, is_whole=device.facts.is_host) for name, view in in_order if name in matrices and is_plain(view)}
    ahead = [part for several in parts.values() for part in several]
    pinned = _pinned(device, ahead)
    staging, weights = Staging([device.host_bytes(*place) for place in pinned], ahead), {}
    try:
        for name, view in in_order:
            if name in parts:
                scales = read_scales(staging, view)
                for part in parts[name]:
                    rows = np.frombuffer(staging.next(), np.uint8)
                    device.repack(source_of(view, rows.ctypes.data, scales, part), places[name], sizes[name])
                    del rows
                    if progress is not None and part.stop < view.n_bytes:
                        progress(done + part.stop, total)
            elif name in matrices:
                scales = read_scales(staging, view)
                data = _int4(staging, view) if view.int4 else _transposed(staging, view.transposed_of) if view.transposed_of else arranged(view, staging.read(view))
                device.repack(source_of(view, data.ctypes.data, scales), places[name], sizes[name])
                del data
            else:
                offset = blueprint.norm_offset if "norm" in name else 0.0
                if name == "out_norm.weight" and blueprint.out_norm_offset is not None:
                    offset = blueprint.out_norm_offset
                data = arranged(view, staging.read(view))
                weights[name] = _vector(device, view, data, offset, 1.0 / blueprint.n_streams if name.endswith("hyper_norm.weight") else 1.0)
                del data
            if name in matrices:
                weights[name] = Tensor(places[name], view.shape[0], view.shape[1], table.by_name(view.format).id, 0, abi.PK_PACKED)
            done += view.n_bytes
            if progress is not None:
                progress(done, total)
    finally:
        staging.close()
        for address, _ in pinned:
            device.free(address, "staging", is_pinned=True)
    strides = {name: away.stride if name in away.places else aligned(n) for name, n in sizes.items()}
    return {**weights, **ones(device, blueprint), **stacks(weights, strides)}


def ones(device: Device, blueprint: Blueprint) -> dict[str, Tensor]:
    """What norms without weights are multiplied with: one vector of ones for each width."""
    names = unit_norms(blueprint)
    vectors = {n: f32_tensor(device, [1.0] * n, "vectors") for n in sorted(set(names.values()))}
    return {name: vectors[n] for name, n in names.items()}


def arranged(view: TensorView, data: memoryview) -> NDArray[np.uint8]:
    """The weight's own bytes among those of its view, row after row."""
    raw = np.frombuffer(data, np.uint8)
    pick = view.pick
    if pick is None:
        return raw
    if pick.is_transposed:
        rows, cols = view.shape
        raw = raw.view(f"u{table.by_name(view.format).block_bytes}").reshape(cols, -1).T.copy()
        n = rows // pick.length * pick.period
    else:
        n = (view.n_elements if pick.of_elements else view.shape[0]) // pick.length * pick.period
    kept = raw.reshape(n // pick.period, pick.period, -1)[:, pick.first : pick.first + pick.length]
    return np.ascontiguousarray(kept).view(np.uint8).reshape(-1)


def _places(base: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """An address for every matrix, in the order of their names: a stack of experts lies in one piece."""
    places = {}
    for name, n_bytes in sizes.items():
        places[name] = base
        base += aligned(n_bytes)
    return places


STACKED = (".experts.", ".ngram.")
"""In the names of matrices that are used as one stack."""


def stacks(weights: Mapping[str, Tensor], strides: Mapping[str, int]) -> dict[str, Tensor]:
    """"layers.I.experts.gate.weight" for every "layers.I.experts.gate.0.weight" ...: the first matrix, with the bytes to the next. N-gram tables likewise.

    Raises: UnsupportedError when the experts of a stack have different formats.
    """
    found: dict[str, Tensor] = {}
    for name, first in weights.items():
        if not any(kind in name for kind in STACKED) or not name.endswith(".0.weight"):
            continue
        stem, e = name.removesuffix(".0.weight"), 1
        while other := weights.get(f"{stem}.{e}.weight"):
            if other.format != first.format:
                kinds = " and ".join(table.by_id(t.format).name for t in (first, other))
                raise UnsupportedError(f"{stem}: experts 0 and {e} have different formats ({kinds}), which is not supported", what="mixed experts")
            e += 1
        found[f"{stem}.weight"] = Tensor(first.data, first.rows, first.cols, first.format, strides[name], abi.PK_PACKED)
    return found


def read_vector(view: TensorView) -> NDArray[np.float32]:
    """The numbers of a small tensor."""
    with view.path.open("rb") as file:
        file.seek(view.offset)
        data = np.frombuffer(file.read(view.n_bytes), np.uint8)
    return dequantize(view.format, data, (1, view.n_elements)).reshape(-1).astype(np.float32)


def _vector(device: Device, view: TensorView, data: NDArray[np.uint8], offset: float, factor: float) -> Tensor:
    """The values plus offset, times factor: norms of streams hold the mean over them, since all that reads them divides by their number."""
    values = (dequantize(view.format, data, (1, view.n_elements)).astype(np.float32) + np.float32(offset)) * np.float32(factor)
    if view.is_log_of_negative:
        if not (values < 0).all():
            raise FileError(f"{view.path}: tensor {view.name} holds {values.max()}, expected negative numbers", field=view.name)
        values = np.log(-values)
    address = device.alloc(aligned(values.nbytes), "vectors")
    device.write(address, values.tobytes())
    return Tensor(address, 1, view.n_elements, abi.PK_F32)


def _pinned(device: Device, parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Address and size of the buffers that a GPU's weights are read into; none on a CPU, where reading ahead would only take memory."""
    if device.facts.is_host:
        return []
    size = max((part.n_bytes for part in parts), default=0)
    return [(device.alloc(size, "staging", is_pinned=True), size) for _ in range(min(BUFFERS, len(parts)))]


def is_plain(view: TensorView) -> bool:
    """True for a matrix whose bytes in the file are those of its rows."""
    return view.int4 is None and view.transposed_of is None and view.pick is None


def _in_file_order(views: Mapping[str, TensorView]) -> list[tuple[str, TensorView]]:
    return sorted(views.items(), key=lambda item: (str(item[1].path), item[1].offset))
