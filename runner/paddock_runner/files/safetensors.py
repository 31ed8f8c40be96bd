"""safetensors headers: our own JSON walk, with budgets, that sees duplicates and counts every byte.

Source: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from ..errors import FileError, UnsupportedError
from ..formats.table import UNSUPPORTED, by_safetensors
from .disguise import disguise
from .source import Source, WindowTooSmall
from .view import TensorView

MAX_JSON_BYTES = 64 << 20

DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Every dtype that the format knows. Source: safetensors/src/tensor.rs, enum Dtype."""


@dataclass(slots=True)
class SafetensorsHeader:
    """One file's header. Tensors by name, in header order; data_offset: where tensor data begins."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorView]
    data_offset: int
    warnings: list[str] = field(default_factory=list)


def scan_safetensors(source: Source) -> SafetensorsHeader:
    """The header of one safetensors file.

    Raises: FileError (damaged, hostile, truncated, something else in disguise); UnsupportedError (dtype, header over the limit).
    """
    while True:
        try:
            return _Scanner(source).header()
        except WindowTooSmall:
            source.grow()


class _Twice(Exception):
    """A key that is twice in one JSON object."""


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        raise _Twice(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return out


class _Scanner:
    """One pass over one header."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.warnings: list[str] = []

    def fault(self, trouble: str, **facts: Any) -> FileError:
        return FileError(f"{self.source.path}: {trouble}", path=str(self.source.path), **facts)

    def header(self) -> SafetensorsHeader:
        text, data_offset = self.json_text()
        metadata: dict[str, Any] = {}
        tensors: dict[str, TensorView] = {}
        seen: set[str] = set()
        for name, value in self.entries(text):
            if name in seen:
                raise self.fault(f"tensor {name} is there twice in the header", field=name)
            seen.add(name)
            if name == "__metadata__":
                metadata = self.free_text(value)
            else:
                tensors[name] = self.tensor(name, value, data_offset)
        if not seen:
            raise self.fault("the header is empty: 0 tensors and no metadata", need=1, have=0)
        self.check_cover(tensors, data_offset)
        return SafetensorsHeader(self.source.path, metadata, tensors, data_offset, self.warnings)

    def json_text(self) -> tuple[str, int]:
        """The header as text, and where the data begins."""
        source, head = self.source, bytes(self.source.buffer[:256])
        if len(head) < 8:
            what = disguise(head)
            raise self.fault(
                f"truncated: {f'this is {what}; ' if what else ''}a safetensors file begins with 8 bytes of header length, this file has {source.size}",
                need=8,
                have=source.size,
            )
        (n,) = struct.unpack_from("<Q", head)
        if n + 8 > source.size or (len(head) > 8 and head[8:9] not in (b"{", b" ")):
            what = disguise(head)
            if what and what != "a safetensors file":
                raise self.fault(f"not a safetensors file; this is {what}", offset=0, found=what)
        if n + 8 > source.size:
            raise self.fault(
                f"truncated or corrupt: the header claims {n} bytes, the file has {source.size - 8} left",
                offset=0,
                need=n,
                have=source.size - 8,
            )
        if n > MAX_JSON_BYTES:
            raise UnsupportedError(
                f"{source.path}: the header is {n} bytes long, the limit is {MAX_JSON_BYTES}",
                what="safetensors header size",
                need=n,
                limit=MAX_JSON_BYTES,
            )
        if n < 2:
            raise self.fault(f"the header is {n} bytes long, expected at least 2", offset=0, need=2, have=n)
        if n + 8 > len(source.buffer):
            raise WindowTooSmall
        try:
            return str(memoryview(source.buffer)[8 : 8 + n], "utf-8"), 8 + n
        except UnicodeDecodeError as e:
            raise self.fault(f"the header is not UTF-8 at offset {8 + e.start}", offset=8 + e.start) from None

    def entries(self, text: str) -> list[tuple[str, Any]]:
        """The top-level object's pairs, duplicates included."""
        decoder = json.JSONDecoder(object_pairs_hook=_no_twins)
        at = _skip(text, 0)
        if at:
            self.warnings.append("the header begins with white space, which the format forbids")
        if text[at : at + 1] != "{":
            raise self.fault(f"the header begins with {text[at : at + 1]!r}, expected '{{'", offset=8 + at)
        out: list[tuple[str, Any]] = []
        at = _skip(text, at + 1)
        name = ""
        try:
            if text[at : at + 1] != "}":
                while True:
                    if text[at : at + 1] != '"':
                        raise json.JSONDecodeError("expected a name in quotes", text, at)
                    name, at = scanstring(text, at + 1, True)
                    at = _skip(text, at)
                    if text[at : at + 1] != ":":
                        raise json.JSONDecodeError("expected ':'", text, at)
                    value, at = decoder.raw_decode(text, _skip(text, at + 1))
                    out.append((name, value))
                    at = _skip(text, at)
                    if text[at : at + 1] == "}":
                        break
                    if text[at : at + 1] != ",":
                        raise json.JSONDecodeError("expected ',' or '}'", text, at)
                    at = _skip(text, at + 1)
        except json.JSONDecodeError as e:
            raise self.fault(f"the header is not valid JSON: {e.msg} at offset {8 + e.pos}", offset=8 + e.pos) from None
        except _Twice as e:
            raise self.fault(f"the header entry {name} has the field {e} twice", field=name) from None
        except RecursionError:
            raise self.fault(f"the header entry {name} is nested too deeply", field=name) from None
        except ValueError as e:
            raise self.fault(f"the header entry {name} cannot be read: {str(e)[:80]}", field=name) from None
        rest = text[at + 1 :].strip(" \t\r\n")
        if rest:
            raise self.fault(f"the header goes on after its end with {rest[:8]!r}", offset=8 + at + 1)
        return out

    def free_text(self, value: Any) -> dict[str, Any]:
        """The __metadata__ object; values that are no strings are kept and reported."""
        if not isinstance(value, Mapping):
            self.warnings.append("__metadata__ is not an object; ignored")
            return {}
        odd = [k for k, v in value.items() if not isinstance(v, str)]
        if odd:
            self.warnings.append(f"__metadata__ holds values that are no strings: {', '.join(odd[:5])}")
        return dict(value)

    def tensor(self, name: str, value: Any, data_offset: int) -> TensorView:
        """One entry, checked."""
        if not name or "\0" in name:
            raise self.fault(
                f"the header holds a tensor with the name {name!r}, expected a name without NUL", field=name
            )
        if not isinstance(value, dict):
            raise self.fault(f"tensor {name}: the header entry is no object", field=name)
        for key in ("dtype", "shape", "data_offsets"):
            if key not in value:
                raise self.fault(f"tensor {name}: {key} is missing", field=name)
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str):
            raise self.fault(f"tensor {name}: dtype is {dtype!r:.40}, expected a string", field=name)
        if not _naturals(shape):
            raise self.fault(f"tensor {name}: shape is {shape!r:.60}, expected whole numbers of 0 or more", field=name)
        if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self.fault(
                f"tensor {name}: data_offsets is {offsets!r:.60}, expected two rising whole numbers", field=name
            )
        bits = DTYPE_BITS.get(dtype)
        if bits is None:
            raise UnsupportedError(
                f"{self.source.path}: tensor {name} has the unknown dtype {dtype[:40]}; known: {', '.join(DTYPE_BITS)}",
                what=dtype[:40],
                supported=list(DTYPE_BITS),
            )
        begin, end = offsets
        n_bits = bits
        for d in shape:
            n_bits *= d
        if n_bits % 8 or n_bits // 8 != end - begin:
            raise self.fault(
                f"tensor {name} of dtype {dtype} and shape {shape!r:.60} needs {n_bits / 8 if n_bits % 8 else n_bits // 8} bytes, data_offsets give {end - begin}",
                field=name,
                need=-(-n_bits // 8),
                have=end - begin,
            )
        if data_offset + end > self.source.size:
            raise self.fault(
                f"truncated: tensor {name} needs the file to have {data_offset + end} bytes, it has {self.source.size}",
                field=name,
                need=data_offset + end,
                have=self.source.size,
            )
        known = by_safetensors(dtype)
        return TensorView(
            name,
            tuple(shape),
            known.name if known else UNSUPPORTED + dtype,
            self.source.path,
            data_offset + begin,
            end - begin,
        )

    def check_cover(self, tensors: dict[str, TensorView], data_offset: int) -> None:
        """Tensors must follow each other without hole or overlap, up to the end of the file."""
        at = data_offset
        for view in sorted(tensors.values(), key=lambda v: (v.offset, v.n_bytes)):
            if view.offset != at:
                what = (
                    f"a hole of {view.offset - at} bytes before"
                    if view.offset > at
                    else f"an overlap of {at - view.offset} bytes with"
                )
                raise self.fault(
                    f"{what} tensor {view.name} at offset {view.offset}", field=view.name, offset=view.offset
                )
            at += view.n_bytes
        size = self.source.size
        if at != size and not (size == 1 << 62):
            raise self.fault(
                f"{size - at} bytes after the last tensor: the file should have {at} bytes, it has {size}",
                need=at,
                have=size,
            )


def _skip(text: str, at: int) -> int:
    """The next position that is no JSON white space."""
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(type(v) is int and 0 <= v < 1 << 63 for v in value)
