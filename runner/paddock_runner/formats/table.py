"""The list of weight formats: names, numbers (those of pk_format in packs/pack.h), block sizes, and what files call them.

Holds no arithmetic on weights: formats/reference.py finds the numpy decoder of a format. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Format:
    """One format. A row of K elements takes K / block_elements * block_bytes bytes.

    id: pk_format in packs/pack.h. ggml: tensor type number in GGUF, or None. safetensors: dtype there, or None.
    decoder: module of this package that holds `dequantize_<name>`, or "" for formats that are not weights.
    """

    name: str
    id: int
    block_elements: int
    block_bytes: int
    ggml: int | None
    safetensors: str | None
    decoder: str

    @property
    def is_weight(self) -> bool:
        """True when a matrix product can read it."""
        return self.decoder != ""

    def row_bytes(self, cols: int) -> int:
        """Bytes of one row of `cols` elements in a file. Raises: UnsupportedError when cols is not a multiple of the block."""
        if cols % self.block_elements:
            raise UnsupportedError(
                f"a row of {cols} elements is not a multiple of {self.name}'s block of {self.block_elements}"
            )
        return cols // self.block_elements * self.block_bytes


FORMATS = (
    Format("f32", 0, 1, 4, 0, "F32", "plain"),
    Format("f16", 1, 1, 2, 1, "F16", "plain"),
    Format("bf16", 2, 1, 2, 30, "BF16", "plain"),
    Format("fp8_e4m3", 3, 1, 1, None, "F8_E4M3", "fp8"),
    Format("fp8_e5m2", 4, 1, 1, None, "F8_E5M2", "fp8"),
    Format("q8_0", 8, 32, 34, 8, None, "block32"),
    Format("q4_0", 9, 32, 18, 2, None, "block32"),
    Format("q4_1", 10, 32, 20, 3, None, "block32"),
    Format("q5_0", 11, 32, 22, 6, None, "block32"),
    Format("q5_1", 12, 32, 24, 7, None, "block32"),
    Format("q2_k", 13, 256, 84, 10, None, "k_quants"),
    Format("q3_k", 14, 256, 110, 11, None, "k_quants"),
    Format("q4_k", 15, 256, 144, 12, None, "k_quants"),
    Format("q5_k", 16, 256, 176, 13, None, "k_quants"),
    Format("q6_k", 17, 256, 210, 14, None, "k_quants"),
    Format("iq4_nl", 18, 32, 18, 20, None, "iq4"),
    Format("iq4_xs", 19, 256, 136, 23, None, "iq4"),
    Format("mxfp4", 20, 32, 17, 39, None, "fp4"),
    Format("nvfp4", 21, 64, 36, 40, None, "fp4"),
    Format("q4_z", 22, 32, 20, None, None, "block32"),
    Format("i32", 32, 1, 4, 26, "I32", ""),
    Format("u8", 33, 1, 1, None, "U8", ""),
    Format("i8", 34, 1, 1, 24, "I8", ""),
    Format("i64", 35, 1, 8, 27, "I64", ""),
    Format("e8m0", 36, 1, 1, None, "F8_E8M0", ""),
)

WEIGHT_FORMATS = tuple(f.name for f in FORMATS if f.is_weight)

OTHER_GGML = {
    9: ("q8_1", 32, 40),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    25: ("i16", 1, 2),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    41: ("q1_0", 128, 18),
}
"""Tensor types of ggml that have no kernels here: number -> (name, block elements, block bytes).

Source: ggml/include/ggml.h and ggml-common.h; sizes as in gguf-py 0.19.0 constants.py, GGML_QUANT_SIZES.
"""

_BY_NAME = {f.name: f for f in FORMATS}
_BY_GGML = {f.ggml: f for f in FORMATS if f.ggml is not None}
_BY_SAFETENSORS = {f.safetensors: f for f in FORMATS if f.safetensors is not None}
_BY_ID = {f.id: f for f in FORMATS}

UNSUPPORTED = "unsupported:"
"""How TensorView.format begins for a type without kernels: "unsupported:iq2_xxs", "unsupported:156"."""


def by_name(name: str) -> Format:
    """The format of that name. Raises: UnsupportedError, naming what is supported."""
    found = _BY_NAME.get(name)
    if found is None:
        raise unsupported(name)
    return found


def by_id(number: int) -> Format:
    """The format of that pk_format number. Raises: UnsupportedError."""
    found = _BY_ID.get(number)
    if found is None:
        raise unsupported(str(number))
    return found


def by_ggml(number: int) -> Format | None:
    """The format of that GGUF tensor type, or None when there is none."""
    return _BY_GGML.get(number)


def by_safetensors(dtype: str) -> Format | None:
    """The format of that safetensors dtype, or None when there is none."""
    return _BY_SAFETENSORS.get(dtype)


def ggml_block(number: int) -> tuple[str, int, int] | None:
    """(format name, block elements, block bytes) of a GGUF tensor type, supported or not; None when nobody knows it."""
    found = _BY_GGML.get(number)
    if found is not None:
        return found.name, found.block_elements, found.block_bytes
    other = OTHER_GGML.get(number)
    return None if other is None else (UNSUPPORTED + other[0], other[1], other[2])


def unsupported(name: str, where: str = "") -> UnsupportedError:
    """The refusal of a format, by name, with the list of what is supported. where: "tensor blk.0.attn_q.weight of m.gguf"."""
    bare = name.removeprefix(UNSUPPORTED)
    what = f"tensor type {bare}" if bare.isdigit() else bare
    return UnsupportedError(
        f"{where + ': ' if where else ''}{what} is not supported; supported: {', '.join(WEIGHT_FORMATS)}",
        what=bare,
        supported=list(WEIGHT_FORMATS),
    )


_SCALE_RECORDS = {
    "q8_0": (32, 32), "q4_0": (32, 32), "q4_1": (32, 64), "q4_z": (32, 48), "q5_0": (32, 32), "q5_1": (32, 64), "q2_k": (256, 320), "q3_k": (256, 288),
    "q4_k": (256, 320), "q5_k": (256, 320), "q6_k": (256, 288), "iq4_nl": (32, 32), "iq4_xs": (256, 160), "mxfp4": (32, 16), "nvfp4": (32, 32),
    "fp8_e4m3": (128, 64), "fp8_e5m2": (128, 64),
}  # fmt: skip
_CODE_BITS = {"q8_0": 8, "q4_0": 4, "q4_1": 4, "q4_z": 4, "q5_0": 5, "q5_1": 5, "q2_k": 2, "q3_k": 3, "q4_k": 4, "q5_k": 5, "q6_k": 6}


def packed_bytes(format: str, rows: int, cols: int) -> int:
    """Bytes that a weight [rows, cols] takes after the CPU pack's pk_repack. Raises: UnsupportedError.

    Panels of 16 rows; columns rounded up to 32; a scale record of so many bytes per so many columns; panels of 64-byte multiples.
    The one place of this formula in Python; a test compares it with pk_packed_bytes. Source: packs/cpu/src/format/layout.h.
    """
    known = by_name(format)
    if format != "nvfp4" or cols % 16:  # in safetensors its blocks are of 16
        known.row_bytes(cols)
    bits = _CODE_BITS.get(format, 4 if known.block_elements > 1 else 8 * known.block_bytes)
    unit, record = _SCALE_RECORDS.get(format, (32, 0))
    panel = -(-cols // 32) * 32 * 16 * bits // 8 + -(-cols // unit) * record
    return -(-rows // 16) * (-(-panel // 64) * 64 + (64 if format == "nvfp4" else 0))
