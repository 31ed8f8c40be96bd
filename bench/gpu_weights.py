"""Random weights as checkpoints store them, for checks and timings of the CUDA pack: bytes, scales, and their exact values."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
from paddock_runner.formats.reference import dequantize
from paddock_runner.formats.table import by_name
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device
from paddock_runner.pack.tensor import Tensor

HALVES = {
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2),
    "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
}  # fmt: skip
"""Byte offsets of the f16 fields of a block."""


@dataclass
class Weight:
    """A random matrix [rows, cols] of a format. scales: none, tensor, row or block."""

    format: str
    rows: int
    cols: int
    scales: str = "none"
    data: np.ndarray = field(init=False)
    scale: np.ndarray | None = field(init=False, default=None)

    def fill(self, rng: np.random.Generator) -> Weight:
        """Draws the bytes."""
        kind = by_name(self.format)
        if self.format in ("f32", "f16", "bf16"):
            values = rng.standard_normal((self.rows, self.cols), np.float32) * 0.05
            if self.format == "bf16":
                bits = values.view(np.uint32)
                self.data = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
            else:
                self.data = values.astype(np.float32 if self.format == "f32" else np.float16).view(np.uint8).reshape(-1)
            return self
        blocks = rng.integers(
            0, 256, (self.rows * kind.row_bytes(self.cols) // kind.block_bytes, kind.block_bytes), dtype=np.uint8
        )
        for at in HALVES.get(self.format, ()):
            blocks[:, at : at + 2] = (
                rng.uniform(0.001, 0.01, len(blocks)).astype(np.float16).view(np.uint8).reshape(-1, 2)
            )
        if self.format == "mxfp4":
            blocks[:, 0] = rng.integers(118, 127, len(blocks))
        if self.format == "nvfp4":
            blocks[:, :4] &= 0x3F
        if self.format == "fp8_e4m3":
            blocks[(blocks & 127) == 127] = 0
        if self.format == "fp8_e5m2":
            blocks[(blocks & 127) > 100] = 0
        self.data = blocks.reshape(-1)
        shape = {"tensor": (1, 1), "row": (self.rows, 1), "block": (-(-self.rows // 128), -(-self.cols // 128))}.get(
            self.scales
        )
        if shape:
            self.scale = rng.uniform(0.5e-3, 2e-3, shape).astype(np.float32)
        return self

    def values(self) -> np.ndarray:
        """The exact matrix as f32."""
        exact = dequantize(self.format, self.data, (self.rows, self.cols))
        if self.scale is None:
            return exact
        if self.scales == "block":
            return exact * np.repeat(np.repeat(self.scale, 128, 0)[: self.rows], 128, 1)[:, : self.cols]
        return exact * self.scale

    def source(self) -> abi.pk_source:
        """The record for pk_repack; valid while this object lives."""
        source = abi.pk_source()
        source.data, source.n_bytes = self.data.ctypes.data, self.data.nbytes
        source.rows, source.cols, source.format = self.rows, self.cols, by_name(self.format).id
        source.global_scale = 1.0
        if self.scale is not None:
            source.scales = {"tensor": abi.PK_SCALES_TENSOR, "row": abi.PK_SCALES_ROW, "block": abi.PK_SCALES_BLOCK}[
                self.scales
            ]
            source.scale_data = self.scale.ctypes.data_as(ctypes.c_void_p).value
            source.scale_rows, source.scale_cols = self.scale.shape
            source.block_rows = source.block_cols = 128
        return source

    def upload(self, device: Device) -> Tensor:
        """Packs it into device memory of its own."""
        return self.stack(device, 1)

    def stack(self, device: Device, n: int) -> Tensor:
        """n experts of these bytes, one after the other; the Tensor of the first."""
        source = self.source()
        n_bytes = device.packed_bytes(source)
        step = -(-n_bytes // 256) * 256
        address = device.alloc(step * n, "weights")
        for i in range(n):
            device.repack(source, address + i * step, n_bytes)
        return Tensor(address, self.rows, self.cols, source.format, 0 if n == 1 else step, abi.PK_PACKED)
