"""Writes a GGUF again with every matrix in another format (gguf-py quantises), metadata copied byte for byte."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


def _skip(data: memoryview, at: int, kind: int) -> int:
    if kind == STRING:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    if kind == ARRAY:
        inner, n = struct.unpack_from("<IQ", data, at)
        at += 12
        if inner in SCALAR_BYTES:
            return at + n * SCALAR_BYTES[inner]
        for _ in range(n):
            at = _skip(data, at, inner)
        return at
    return at + SCALAR_BYTES[kind]


def _tensors(data: memoryview) -> tuple[int, list[tuple[bytes, tuple[int, ...], int, int]], int]:
    """(end of the metadata, [(name, ne, type, offset)], end of the tensor list)"""
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    at = 24
    for _ in range(n_keys):
        at = _skip(data, at, STRING)
        kind = struct.unpack_from("<I", data, at)[0]
        at = _skip(data, at + 4, kind)
    metadata_end, found = at, []
    for _ in range(n_tensors):
        n = struct.unpack_from("<Q", data, at)[0]
        name = bytes(data[at + 8 : at + 8 + n])
        at += 8 + n
        n_dims = struct.unpack_from("<I", data, at)[0]
        ne = struct.unpack_from(f"<{n_dims}Q", data, at + 4)
        at += 4 + 8 * n_dims
        kind, offset = struct.unpack_from("<IQ", data, at)
        at += 12
        found.append((name, ne, kind, offset))
    return metadata_end, found, at


def requantise(source: Path, target: Path, kind: Kind) -> Path:
    """Every 2-D tensor of `source` in format `kind`; the rest as it is. Alignment 32."""
    data = memoryview(np.memmap(source, dtype=np.uint8, mode="r"))
    metadata_end, tensors, end = _tensors(data)
    start = -(-end // 32) * 32
    header, bodies, offset = bytearray(data[:metadata_end]), [], 0
    for name, ne, old, at in tensors:
        block, size = gguf.GGML_QUANT_SIZES[Kind(old)]
        n_bytes = int(np.prod(ne)) // block * size
        raw = np.frombuffer(data[start + at : start + at + n_bytes], np.uint8)
        new = kind if len(ne) == 2 else Kind(old)
        if new != old:
            values = dequantize(raw.reshape(*reversed(ne[1:]), -1), Kind(old)).astype(np.float32)
            raw = quantize(values, new).view(np.uint8).reshape(-1)
        header += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(ne)) + struct.pack(f"<{len(ne)}Q", *ne)
        header += struct.pack("<IQ", int(new), offset)
        bodies.append((offset, raw))
        offset += -(-raw.size // 32) * 32
    base = -(-len(header) // 32) * 32
    with target.open("wb") as file:
        file.write(header)
        for at, raw in bodies:
            file.seek(base + at)
            file.write(raw.tobytes())
        file.truncate(base + offset)
    return target
