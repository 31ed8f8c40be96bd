"""GGUF headers: a scanner that skips over values, with budgets, and metadata that is decoded when somebody asks.

Reads versions 2 and 3, little endian. Knows nothing of model families.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; limits as in ggml/src/gguf.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, overload

from ..errors import FileError, UnsupportedError
from ..formats.table import UNSUPPORTED, ggml_block
from .disguise import not_a
from .source import MAX_HEADER_BYTES, Source, WindowTooSmall
from .view import TensorView

STRING, ARRAY, BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_SIZES = {kind: struct.calcsize("<" + code) for kind, code in _SCALARS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

MAX_KEYS = 65536
MAX_TENSORS = 65536
MAX_KEY_BYTES = 65535
MAX_STRING_BYTES = 16 << 20
MAX_STRINGS = 2_000_000
"""Strings in all arrays of a header; the largest vocabularies with their merges have about 800,000."""
MAX_DIMS = 4
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 65536


class Entry(NamedTuple):
    """Where a value lies. kind: GGUF value type; element: that of an array; length: of an array, or bytes of a string; at: offset."""

    kind: int
    element: int
    length: int
    at: int


class Array(Sequence[Any]):
    """A metadata array, decoded as a whole at the first access to an element. Its length costs nothing."""

    def __init__(self, buffer: Any, entry: Entry) -> None:
        self._buffer = buffer
        self._entry = entry
        self._values: list[Any] | None = None

    @property
    def is_strings(self) -> bool:
        """True for an array of strings."""
        return self._entry.element == STRING

    def raw(self) -> list[bytes]:
        """The strings as the bytes of the file (an empty list for other arrays)."""
        if not self.is_strings:
            return []
        out, at, buffer, read = [], self._entry.at, self._buffer, _U64.unpack_from
        for _ in range(self._entry.length):
            (n,) = read(buffer, at)
            at += 8
            out.append(buffer[at : at + n])
            at += n
        return out

    def values(self) -> list[Any]:
        """All elements: str (bad UTF-8 replaced), int, float or bool."""
        if self._values is None:
            e = self._entry
            if self.is_strings:
                self._values = [s.decode("utf-8", "replace") for s in self.raw()]
            else:
                numbers = struct.unpack_from(f"<{e.length}{_SCALARS[e.element]}", self._buffer, e.at)
                self._values = [n != 0 for n in numbers] if e.element == BOOL else list(numbers)
        return self._values

    def __len__(self) -> int:
        return self._entry.length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.values()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __repr__(self) -> str:
        return f"Array of {len(self)}"


class Metadata(Mapping[str, Any]):
    """Keys in file order; a value is int, float, bool, str or Array, decoded at access."""

    def __init__(self, buffer: Any, entries: dict[str, Entry]) -> None:
        self._buffer = buffer
        self._entries = entries

    def __getitem__(self, key: str) -> Any:
        entry = self._entries[key]
        if entry.kind == ARRAY:
            return Array(self._buffer, entry)
        if entry.kind == STRING:
            return self._buffer[entry.at : entry.at + entry.length].decode("utf-8", "replace")
        (value,) = struct.unpack_from("<" + _SCALARS[entry.kind], self._buffer, entry.at)
        return value != 0 if entry.kind == BOOL else value

    def kind(self, key: str) -> int:
        """The GGUF value type of a key."""
        return self._entries[key].kind

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(slots=True)
class GgufHeader:
    """One file's header. Tensors in file order; data_offset: where tensor data begins."""

    path: Path
    version: int
    alignment: int
    metadata: Metadata
    tensors: list[TensorView]
    data_offset: int
    warnings: list[str] = field(default_factory=list)


def scan_gguf(source: Source) -> GgufHeader:
    """The header of one GGUF file.

    Raises: FileError (damaged, hostile, truncated, something else in disguise); UnsupportedError (version, big endian).
    """
    while True:
        try:
            return _Scanner(source).header()
        except WindowTooSmall:
            source.grow()


class _Scanner:
    """A position in the header, and what is left of the budgets."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.buffer = source.buffer
        self.limit = len(source.buffer)
        self.at = 0
        self.n_strings = 0
        self.warnings: list[str] = []

    def fault(self, trouble: str, **facts: Any) -> FileError:
        """The error for this file at this offset."""
        facts.setdefault("offset", self.at)
        return FileError(f"{self.source.path}: {trouble}", path=str(self.source.path), **facts)

    def need(self, n_bytes: int, what: str) -> None:
        """Raises unless n_bytes are left from here on: WindowTooSmall when only the window ends, else FileError."""
        end = self.at + n_bytes
        if end <= self.limit:
            return
        size = self.source.size
        if end > size:
            raise self.fault(
                f"truncated or corrupt: {what} at offset {self.at} needs {n_bytes} bytes, the file has {max(size - self.at, 0)} left",
                need=n_bytes,
                have=max(size - self.at, 0),
            )
        if end > MAX_HEADER_BYTES:
            raise self.fault(
                f"{what} at offset {self.at} needs {n_bytes} bytes: the header is over its limit of {MAX_HEADER_BYTES}",
                need=end,
                have=MAX_HEADER_BYTES,
            )
        raise WindowTooSmall

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.buffer, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.buffer, self.at)
        self.at += 8
        return int(value)

    def name(self, what: str, max_bytes: int) -> str:
        """A key or tensor name: valid UTF-8, no NUL. The caller refuses an empty one."""
        n = self.u64(f"the length of {what}")
        self.need(n, what)
        if n > max_bytes:
            raise self.fault(f"{what} is {n} bytes long, the limit is {max_bytes}")
        raw = self.buffer[self.at : self.at + n]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8: {raw[:40]!r}") from None
        if "\0" in text:
            raise self.fault(f"{what} holds a NUL: {text[:40]!r}")
        self.at += n
        return text

    def header(self) -> GgufHeader:
        """Scans everything. The caller makes the source grow on WindowTooSmall and starts anew."""
        self.magic()
        version = self.version()
        n_tensors, n_keys = self.u64("the tensor count"), self.u64("the metadata count")
        for n, each, limit, what in ((n_tensors, 24, MAX_TENSORS, "tensors"), (n_keys, 13, MAX_KEYS, "metadata keys")):
            left = self.source.size - self.at
            if n > limit and n * each > left:
                raise self.fault(
                    f"the header claims {n} {what}, at least {n * each} bytes, but the file has {left} left",
                    need=n * each,
                    have=left,
                )
            if n > limit:
                raise self.fault(f"the header claims {n} {what}, the limit is {limit}", need=n, have=limit)
        entries: dict[str, Entry] = {}
        for i in range(n_keys):
            key = self.name(f"metadata key {i}", MAX_KEY_BYTES)
            if key in entries:
                raise self.fault(f"metadata key {key} is there twice", field=key)
            entries[key] = self.value(key or "''")
            if not key:
                raise self.fault(f"metadata key {i} has no name")
        metadata = Metadata(self.buffer, entries)
        alignment = self.alignment(metadata)
        infos = [self.tensor(i) for i in range(n_tensors)]
        if self.at > MAX_HEADER_BYTES:
            raise self.fault(
                f"the header is {self.at} bytes long, the limit is {MAX_HEADER_BYTES}",
                need=self.at,
                have=MAX_HEADER_BYTES,
            )
        data_offset = -(-self.at // alignment) * alignment
        tensors = place_tensors(self, infos, data_offset, alignment)
        return GgufHeader(self.source.path, version, alignment, metadata, tensors, data_offset, self.warnings)

    def magic(self) -> None:
        head = bytes(self.buffer[:256])
        if head[:4] != b"GGUF":
            raise not_a("GGUF", self.source.path, head)
        self.at = 4

    def version(self) -> int:
        version = self.u32("the version")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedError(
                f"{self.source.path}: this GGUF file is big-endian; only little-endian files are supported",
                what="big-endian GGUF",
                supported=["little-endian"],
            )
        if version not in (2, 3):
            raise UnsupportedError(
                f"{self.source.path}: GGUF version {version} is not supported; supported: 2, 3",
                what=f"GGUF version {version}",
                supported=[2, 3],
            )
        return version

    def value(self, key: str) -> Entry:
        """Skips one value and says where it lies."""
        kind = self.u32(f"the type of metadata key {key}")
        if kind in _SIZES:
            self.need(_SIZES[kind], f"metadata key {key}")
            entry = Entry(kind, 0, 0, self.at)
            if kind == BOOL and self.buffer[self.at] > 1:
                self.warnings.append(
                    f"metadata key {key} is a boolean with the value {self.buffer[self.at]}; read as true"
                )
            self.at += _SIZES[kind]
            return entry
        if kind == STRING:
            n = self.u64(f"the length of metadata key {key}")
            if MAX_STRING_BYTES < n <= self.source.size - self.at:
                raise self.fault(
                    f"metadata key {key} is a string of {n} bytes, the limit is {MAX_STRING_BYTES}",
                    field=key,
                    need=n,
                    have=MAX_STRING_BYTES,
                )
            self.need(n, f"metadata key {key}")
            entry = Entry(kind, 0, n, self.at)
            self.at += n
            return entry
        if kind == ARRAY:
            return self.array(key)
        raise self.fault(f"metadata key {key} has the unknown value type {kind}", field=key)

    def array(self, key: str) -> Entry:
        """Skips an array: by arithmetic for numbers, string by string otherwise."""
        element = self.u32(f"the element type of metadata key {key}")
        count = self.u64(f"the length of metadata key {key}")
        if element == ARRAY:
            raise self.fault(f"metadata key {key} is an array of arrays; nested arrays are not allowed", field=key)
        if element != STRING and element not in _SIZES:
            raise self.fault(f"metadata key {key} is an array of the unknown type {element}", field=key)
        entry = Entry(ARRAY, element, count, self.at)
        if element != STRING:
            n_bytes = count * _SIZES[element]
            if MAX_STRING_BYTES < n_bytes <= self.source.size - self.at:
                raise self.fault(
                    f"metadata key {key} is an array of {n_bytes} bytes, the limit is {MAX_STRING_BYTES}", field=key
                )
            self.need(n_bytes, f"the array {key} of {count} elements")
            self.at += n_bytes
            return entry
        left = self.source.size - self.at
        if count * 8 > left:
            raise self.fault(
                f"metadata key {key} claims {count} strings, at least {count * 8} bytes, but the file has {left} left",
                field=key,
                need=count * 8,
                have=left,
            )
        self.n_strings += count
        if self.n_strings > MAX_STRINGS:
            raise self.fault(
                f"metadata key {key}: the header holds over {MAX_STRINGS} strings, the limit",
                field=key,
                have=self.n_strings,
            )
        self.skip_strings(key, count)
        return entry

    def skip_strings(self, key: str, count: int) -> None:
        """The hot loop of the scanner: half a million strings in a big vocabulary."""
        at, buffer, read, last = self.at, self.buffer, _U64.unpack_from, self.limit - 8
        for _ in range(count):
            if at > last:
                break
            at += read(buffer, at)[0] + 8
        else:
            if at <= self.limit:
                self.at = at
                return
        self.blame_string(key, count)

    def blame_string(self, key: str, count: int) -> None:
        """Raises, naming the string that leads out of the file."""
        for i in range(count):
            n = self.u64(f"string {i} of metadata key {key}")
            self.need(n, f"string {i} of metadata key {key}")
            self.at += n

    def alignment(self, metadata: Metadata) -> int:
        key = "general.alignment"
        if key not in metadata:
            return 32
        value = metadata[key]
        if metadata.kind(key) != 4:
            raise self.fault(f"metadata key {key} has value type {metadata.kind(key)}, expected 4 (u32)", field=key)
        if value & (value - 1) or not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT:
            raise self.fault(
                f"metadata key {key} is {value}, expected a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}",
                field=key,
            )
        return int(value)

    def tensor(self, i: int) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape outermost first, tensor type, offset within the data)."""
        name = self.name(f"the name of tensor {i}", MAX_KEY_BYTES)
        if not name:
            raise self.fault(f"tensor {i} has no name")
        n_dims = self.u32(f"the dimensions of tensor {name}")
        if n_dims > MAX_DIMS:
            raise self.fault(f"tensor {name} has {n_dims} dimensions, the limit is {MAX_DIMS}", field=name)
        dims = [self.u64(f"a dimension of tensor {name}") for _ in range(n_dims)]
        return (
            name,
            tuple(reversed(dims)),
            self.u32(f"the type of tensor {name}"),
            self.u64(f"the offset of tensor {name}"),
        )


def place_tensors(
    scanner: _Scanner, infos: list[tuple[str, tuple[int, ...], int, int]], data_offset: int, alignment: int
) -> list[TensorView]:
    """Views in file order, after checks of names, sizes, alignment, overlaps, holes and the end of the file."""
    path, room = scanner.source.path, scanner.source.size - data_offset
    sized: list[tuple[int, int, str, str, tuple[int, ...]]] = []  # offset, bytes or -1, name, format, shape
    seen: set[str] = set()
    for name, shape, kind, offset in infos:
        if name in seen:
            raise scanner.fault(f"tensor {name} is there twice", field=name)
        seen.add(name)
        if offset % alignment:
            raise scanner.fault(
                f"tensor {name} lies at offset {offset}, not a multiple of the alignment {alignment}", field=name
            )
        block = ggml_block(kind)
        sized.append(
            (offset, _n_bytes(scanner, name, shape, block), name, block[0] if block else f"{UNSUPPORTED}{kind}", shape)
        )
    order = sorted(range(len(sized)), key=lambda i: sized[i][:2])
    views: dict[int, TensorView] = {}
    end = 0
    for rank, i in enumerate(order):
        offset, n_bytes, name, format, shape = sized[i]
        if offset < end:
            raise scanner.fault(
                f"tensor {name} at offset {offset} overlaps the tensor before it, which ends at {end}",
                field=name,
                offset=offset,
            )
        padded = -(-end // alignment) * alignment
        if offset > padded:
            scanner.warnings.append(f"{offset - padded} unused bytes before tensor {name}")
        if n_bytes < 0:
            n_bytes = max((sized[order[rank + 1]][0] if rank + 1 < len(order) else room) - offset, 0)
        end = offset + n_bytes
        if end > max(room, 0):
            raise scanner.fault(
                f"truncated: tensor {name} needs the file to have {data_offset + end} bytes, it has {scanner.source.size}",
                field=name,
                need=data_offset + end,
                have=scanner.source.size,
            )
        views[i] = TensorView(name, shape, format, path, data_offset + offset, n_bytes)
    _check_tail(scanner, data_offset + end, alignment)
    return [views[i] for i in range(len(sized))]


def _n_bytes(scanner: _Scanner, name: str, shape: tuple[int, ...], block: tuple[str, int, int] | None) -> int:
    """Bytes of a tensor; -1 for a type whose size nobody knows."""
    if block is None:
        return -1
    format, elements, n_bytes = block
    cols = shape[-1] if shape else 1
    if cols % elements:
        raise scanner.fault(
            f"tensor {name} of type {format.removeprefix(UNSUPPORTED)} has rows of {cols} elements, not a multiple of the block of {elements}",
            field=name,
        )
    total = n_bytes
    for d in (*shape[:-1], cols // elements):
        total *= d
    if total > scanner.source.size:
        raise scanner.fault(
            f"tensor {name} of shape {list(shape)} needs {total} bytes, the file has {scanner.source.size}",
            field=name,
            need=total,
            have=scanner.source.size,
        )
    return total


def _check_tail(scanner: _Scanner, end: int, alignment: int) -> None:
    """Bytes after the last tensor: a second header means that shards were joined; others are only odd."""
    padded = -(-end // alignment) * alignment
    extra = scanner.source.size - padded
    if extra <= 0 or len(scanner.buffer) < scanner.source.size:
        return
    for at in (end, padded):
        if scanner.buffer[at : at + 4] == b"GGUF":
            raise scanner.fault(
                f"another GGUF header follows at offset {at}: shards were joined end to end; keep them as separate files",
                offset=at,
            )
    if extra > MAX_ALIGNMENT:
        scanner.warnings.append(f"{extra} bytes after the last tensor are not used")
