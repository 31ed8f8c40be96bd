"""How many bytes a weight takes after the CUDA pack's pk_repack. A test on the device compares it with pk_packed_bytes.

Source: packs/cuda/src/repack.cu (describe) and packs/cuda/include/format/unit.cuh (UnitTraits).
"""

from __future__ import annotations

from dataclasses import dataclass

from .table import unsupported

ROW_PAD = 32
TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Unit:
    """A tile of 16 rows: bits of a code, elements of a row, bytes of a row's scales and of its superblock's factors."""

    bits: int
    elements: int
    scale_bytes: int
    factor_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the tile."""
        return TILE_ROWS * (self.elements * self.bits // 8 + self.scale_bytes + self.factor_bytes)


UNITS = {
    "q8_0": Unit(8, 128, 8), "q4_0": Unit(4, 128, 8), "q4_1": Unit(4, 128, 16), "q4_z": Unit(5, 128, 8), "q5_0": Unit(5, 128, 8), "q5_1": Unit(5, 128, 16),
    "q2_k": Unit(2, 256, 16, 4), "q3_k": Unit(3, 256, 16, 2), "q4_k": Unit(4, 256, 16, 4), "q5_k": Unit(5, 256, 16, 4), "q6_k": Unit(6, 256, 16, 2),
    "iq4_nl": Unit(4, 128, 8), "iq4_xs": Unit(4, 256, 8, 2), "mxfp4": Unit(4, 128, 4), "nvfp4": Unit(4, 128, 8),
}  # fmt: skip


PANEL_BYTES = 64 << 20


def panel_launches(format: str, rows: int, cols: int, is_gated: bool = False) -> float:
    """Launches of a product of many rows of x beyond one for weights that are unpacked panel by panel (run_gemm in packs/cuda/src/matmul/tiled.cu):
    each panel takes one to unpack and one to multiply, at most: weights side by side share panels. is_gated: gate and up share theirs and one launch to multiply."""
    if format not in UNITS:
        return 0
    sides = 2 if is_gated else 1
    most = max(128, PANEL_BYTES // (-(-cols // 64) * 128 * sides) // 128 * 128)
    return -(-rows // most) * (1.5 if is_gated else 2)


def packed_bytes(format: str, rows: int, cols: int, scales: str = "") -> int:
    """Bytes of a weight [rows, cols] in the CUDA pack. scales: "row", "block" (128 x 128) or another kind, which takes none.

    Raises: UnsupportedError for a format without kernels.
    """
    padded_rows = -(-rows // ROW_PAD) * ROW_PAD
    unit = UNITS.get(format)
    if unit is not None:
        n_bytes = padded_rows // TILE_ROWS * -(-cols // unit.elements) * unit.n_bytes
    elif format in ("fp8_e4m3", "fp8_e5m2"):
        blocks = -(-cols // 128)
        n_bytes = padded_rows * blocks * 128
        n_bytes += 4 * padded_rows if scales == "row" else 4 * -(-rows // 128) * blocks if scales == "block" else 0
    elif format in ("f32", "f16", "bf16"):
        n_bytes = padded_rows * -(-cols // 64) * 64 * 2
    else:
        raise unsupported(format)
    return -(-(n_bytes + 4) // 256) * 256
