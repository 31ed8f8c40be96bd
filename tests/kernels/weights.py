"""Random weights as checkpoints store them: bytes, scales beside them, their exact values, and how they get onto a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from harness import Bench, to_bf16
from paddock_runner.formats.fp4 import E2M1
from paddock_runner.formats.fp8 import E4M3
from paddock_runner.formats.reference import dequantize
from paddock_runner.formats.table import by_name
from paddock_runner.pack import abi
from paddock_runner.pack.tensor import Tensor

HALVES = {
    "q8_0": [0], "q4_0": [0], "q4_1": [0, 2], "q4_z": [0], "q5_0": [0], "q5_1": [0, 2], "q2_k": [80, 82], "q3_k": [108],
    "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208], "iq4_nl": [0], "iq4_xs": [0],
}  # fmt: skip
"""Byte offsets of the f16 fields of a block: scale, minimum."""


@dataclass
class Weight:
    """A matrix [rows, cols] of a format: its bytes, its exact values, and the scales beside it."""

    format: str
    rows: int
    cols: int
    data: np.ndarray
    values: np.ndarray
    kind: int = abi.PK_SCALES_NONE
    scales: np.ndarray | None = None
    global_scale: float = 1.0

    def source(self) -> abi.pk_source:
        """The record for pk_packed_bytes and pk_repack; valid while this object lives."""
        source = abi.pk_source(
            self.data.ctypes.data, self.data.nbytes, self.rows, self.cols, by_name(self.format).id, self.kind
        )
        source.global_scale, source.block_rows, source.block_cols = self.global_scale, 128, 128
        if self.scales is not None:
            source.scale_data, (source.scale_rows, source.scale_cols) = self.scales.ctypes.data, self.scales.shape
        return source

    def upload(self, b: Bench, part_rows: int = 0, is_pinned: bool = False) -> Tensor:
        """The packed matrix in memory of its own, which was poisoned before. part_rows: so many rows a call, from memory that holds no others."""
        source = self.source()
        n = b.device.packed_bytes(source)
        address = b.device.alloc(n, "weight")
        b.device.fill(address, 0xFF, n)
        if not part_rows:
            b.device.repack(source, address, n)
        rows = self.data.reshape(self.rows, -1)
        for first in range(0, self.rows, part_rows) if part_rows else ():
            part = rows[first : first + part_rows].copy()
            if is_pinned:
                place = b.device.alloc(part.nbytes, "part", is_pinned=True)
                b.device.host_bytes(place, part.nbytes)[:] = part.tobytes()
            source.data = place if is_pinned else part.ctypes.data
            source.first_row, source.part_rows = first, len(part)
            b.device.repack(source, address, n)
            part[:] = 0xFF
        return Tensor(address, self.rows, self.cols, by_name(self.format).id, 0, abi.PK_PACKED)


def random_bytes(name: str, n_blocks: int, rng: np.random.Generator, negative: float = 0.1, size: float = 1.0) -> np.ndarray:
    """Blocks [n, block bytes] whose values are finite and mostly below one; `negative` of the scales are below zero, all are `size` times the usual."""
    kind = by_name(name)
    if name in ("f32", "f16", "bf16"):
        values = rng.standard_normal(n_blocks) * 0.1
        raw = to_bf16(values) if name == "bf16" else values.astype("<f2" if name == "f16" else "<f4")
        return raw.view(np.uint8).reshape(n_blocks, -1)
    blocks = rng.integers(0, 256, (n_blocks, kind.block_bytes), dtype=np.uint8)
    for i, at in enumerate(HALVES.get(name, [])):
        scale = size * rng.uniform(1e-3, 2e-2, n_blocks) * np.where(rng.random(n_blocks) < negative, -1, 1)
        if name in ("q4_1", "q5_1") and i == 1:
            scale = scale * -8
        blocks[:, at : at + 2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    if name == "q4_z":
        blocks[:, 2] = rng.integers(0, 17, n_blocks)
    if name == "mxfp4":
        blocks[:, 0] = rng.integers(116, 126, n_blocks)
    if name == "nvfp4":
        blocks[:, :4] = rng.integers(16, 64, (n_blocks, 4))
    if name == "fp8_e4m3":
        blocks &= 0xBF
    if name == "fp8_e5m2":
        blocks &= 0xBB
    return blocks


def random_weight(name: str, rows: int, cols: int, rng: np.random.Generator, negative: float = 0.1, size: float = 1.0) -> Weight:
    """A weight without scales beside it."""
    kind = by_name(name)
    data = np.ascontiguousarray(random_bytes(name, rows * cols // kind.block_elements, rng, negative, size)).reshape(-1)
    return Weight(name, rows, cols, data, dequantize(name, data, (rows, cols)))


def scaled_fp8(name: str, rows: int, cols: int, kind: str, rng: np.random.Generator) -> Weight:
    """fp8 with f32 scales per tensor, per row, or per 128 x 128 block."""
    w = random_weight(name, rows, cols, rng)
    number, shape = {
        "tensor": (abi.PK_SCALES_TENSOR, (1, 1)), "row": (abi.PK_SCALES_ROW, (rows, 1)),
        "block": (abi.PK_SCALES_BLOCK, (-(-rows // 128), -(-cols // 128))),
    }[kind]  # fmt: skip
    w.kind, w.scales = number, rng.uniform(0.01, 0.1, shape).astype(np.float32)
    grid = w.scales if kind != "block" else np.repeat(np.repeat(w.scales, 128, 0)[:rows], 128, 1)[:, :cols]
    w.values = w.values * grid
    return w


def grouped_fp4(name: str, rows: int, cols: int, rng: np.random.Generator) -> Weight:
    """mxfp4 or nvfp4 as safetensors holds them: neighbours share a byte, scales in a matrix of their own."""
    group = 16 if name == "nvfp4" else 32
    data = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    codes = np.stack([data & 15, data >> 4], -1).reshape(rows, cols)
    scales = (
        rng.integers(16, 64, (rows, cols // group), dtype=np.uint8)
        if name == "nvfp4"
        else rng.integers(116, 126, (rows, cols // group), dtype=np.uint8)
    )
    factor = E4M3[scales] if name == "nvfp4" else np.ldexp(1.0, scales.astype(int) - 127)
    overall = 0.37 if name == "nvfp4" else 1.0
    values = E2M1[codes] * np.repeat(factor, group, 1) * np.float32(overall)
    return Weight(name, rows, cols, data, values.astype(np.float32), abi.PK_SCALES_GROUP, scales, overall)
