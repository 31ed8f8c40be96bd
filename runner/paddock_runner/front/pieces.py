"""Large bodies of requests, decoded in pieces: a decoder holds the interpreter's lock until it is through, and everybody's streams stand meanwhile.

What a body says is what the decoder of its type says of it whole. A piece is a value, or several items of a list or members of an object,
of some ten thousand bytes; where it ends is found by regular expressions, which know brackets and strings and leave everything else to the decoder.
"""

from __future__ import annotations

import re
import types
import typing
from functools import cache
from typing import Annotated, Any

import msgspec

WINDOW_BYTES = 32 << 10
"""About so much goes to the decoder at a time: some hundred microseconds."""
DEPTH = 8
"""Brackets in one another that a piece may have; deeper ones are pieces of their own."""
MAX_DEPTH = 200
"""Brackets in one another that are looked into, likewise; the decoder says what it makes of more."""
_SPACE = rb"[ \t\n\r]*+"
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_VALUE = rb"(?!)"
for _ in range(DEPTH):
    _VALUE = rb'[\[{](?:[^"\[\]{}]++|' + _STRING + rb"|" + _VALUE + rb")*+[\]}]"
_VALUE = rb'(?>[^ \t\n\r,:"\[\]{}]++|' + _STRING + rb"|" + _VALUE + rb")"
_FLAGS = re.DOTALL
WHITE = b" \t\n\r"
SPACE = re.compile(_SPACE)
VALUE = re.compile(_VALUE, _FLAGS)
ITEMS = re.compile(rb"(?>" + _VALUE + _SPACE + rb"," + _SPACE + rb")++", _FLAGS)
MEMBERS = re.compile(rb"(?>" + _STRING + _SPACE + rb":" + _SPACE + _VALUE + _SPACE + rb"," + _SPACE + rb")++", _FLAGS)
_WHERE = re.compile(r" - at `(key` in `)?\$(.*)`$", _FLAGS)
_FIRST = re.compile(r"\[(\d+)\]")


class _Whole(Exception):
    """This cannot be taken apart: the decoder is asked for all of it."""


def decode(raw: bytes, kind: type[Any]) -> tuple[Any, list[str] | None]:
    """The body as a Struct of this kind, and names of fields that it does not have; None where that was not looked at. Raises: msgspec.DecodeError, UnicodeDecodeError, RecursionError."""
    unknown: list[str] = []
    reader = _Reader(raw)
    try:
        at = reader.space(0)
        if raw[at : at + 1] != b"{":
            raise _Whole
        found, end = reader.struct(at, kind, "", unknown)
        if reader.space(end) != len(raw):
            raise _Whole
    except _Whole:
        return _decoder(kind).decode(raw), None  # type: ignore[arg-type]
    return found, unknown


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@cache
def _fields(kind: Any) -> dict[str, tuple[str, Any]]:
    """Fields by their names in JSON: name, type."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.encode_name: (f.name, hints[f.name]) for f in msgspec.structs.fields(kind)}


@cache
def _options(kind: Any) -> tuple[Any, Any]:
    """What a type is where its JSON is a list: the type of items; where it is an object: a Struct, or a dict's (key, value). None: it is no such, or must be decoded whole."""
    if kind in (Any, msgspec.Raw):
        return kind, (str, kind)
    lists, objects = list[Any](), list[Any]()
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    for one in typing.get_args(kind) if union else (kind,):
        is_bounded = typing.get_origin(one) is Annotated
        plain = typing.get_args(one)[0] if is_bounded else one
        origin, inner = typing.get_origin(plain), typing.get_args(plain)
        if plain is Any:
            return Any, (str, Any)
        if origin is list:
            lists.append(inner[0] if not is_bounded or _has_no_end(one) else None)
        elif origin is dict:
            objects.append(inner if not is_bounded else None)
        elif isinstance(plain, type) and issubclass(plain, msgspec.Struct):
            objects.append(plain if plain.__struct_config__.tag is None and not plain.__struct_config__.array_like else None)
    return (lists[0] if len(lists) == 1 else None), (objects[0] if len(objects) == 1 else None)


def _has_no_end(kind: Any) -> bool:
    """A list that only must have some items, as every large one has."""
    return all(isinstance(m, msgspec.Meta) and m.max_length is None and (m.min_length or 0) <= 1 for m in typing.get_args(kind)[1:])


class _Reader:
    """Reads values at places of a text."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._depth = 0
        self._is_dropped = False
        """What is read is the value of a field that nobody knows."""

    def space(self, at: int) -> int:
        """The next place that is not empty."""
        found = SPACE.match(self._raw, at)
        return found.end() if found is not None else at

    def value(self, at: int, kind: Any, path: str) -> tuple[Any, int]:
        """The value there, and where it ends."""
        raw = self._raw
        found = VALUE.match(raw, at, at + WINDOW_BYTES)
        if found is not None and (found.end() < at + WINDOW_BYTES or found.end() == len(raw)):
            return self._decoded(raw[at : found.end()], kind, path), found.end()
        first = raw[at : at + 1]
        if first == b'"':
            end = self._string_end(at)
            return self._decoded(raw[at:end], kind, path), end
        items, members = _options(kind)
        self._depth += 1
        try:
            if first == b"[" and items is not None and self._depth < MAX_DEPTH:
                return self._list(at, items, path)
            if first == b"{" and members is not None and self._depth < MAX_DEPTH:
                return self.struct(at, members, path, None) if isinstance(members, type) else self._dict(at, members, path)
        finally:
            self._depth -= 1
        raise _Whole

    def _decoded(self, piece: bytes, kind: Any, path: str, first: int | None = None) -> Any:
        """A piece, by its type. first: the number of its first item, of a list's."""
        try:
            return _decoder(kind).decode(piece)
        except msgspec.ValidationError as error:
            raise _moved(error, path, first) from None
        except msgspec.DecodeError:
            raise _Whole from None  # it says at which byte

    def _string_end(self, at: int) -> int:
        raw, end = self._raw, at
        while (end := raw.find(b'"', end + 1)) >= 0:
            n = end
            while raw[n - 1 : n] == b"\\":
                n -= 1
            if (end - n) % 2 == 0:
                return end + 1
        raise _Whole

    def _list(self, at: int, kind: Any, path: str) -> tuple[list[Any], int]:
        raw, found = self._raw, list[Any]()
        at = self.space(at + 1)
        while True:
            some = ITEMS.match(raw, at, at + WINDOW_BYTES)
            if some is not None:
                found += self._decoded(b"[" + raw[at : some.end()].rstrip(WHITE)[:-1] + b"]", list[kind], path, len(found))
                at = self.space(some.end())
            item, at = self.value(at, kind, f"{path}[{len(found)}]")
            found.append(item)
            if self._is_dropped:
                found.clear()
            at = self.space(at)
            if raw[at : at + 1] == b"]":
                return found, at + 1
            at = self._behind_comma(at)

    def _dict(self, at: int, kinds: tuple[Any, Any], path: str) -> tuple[dict[Any, Any], int]:
        raw, found = self._raw, dict[Any, Any]()
        at = self.space(at + 1)
        while True:
            some = MEMBERS.match(raw, at, at + WINDOW_BYTES)
            if some is not None:
                found |= self._decoded(b"{" + raw[at : some.end()].rstrip(WHITE)[:-1] + b"}", dict[kinds], path)  # type: ignore[misc, valid-type]
                at = self.space(some.end())
            key, at = self._key(at, kinds[0], path)
            found[key], at = self.value(at, kinds[1], f"{path}[...]")
            if self._is_dropped:
                found.clear()
            at = self.space(at)
            if raw[at : at + 1] == b"}":
                return found, at + 1
            at = self._behind_comma(at)

    def struct(self, at: int, kind: Any, path: str, unknown: list[str] | None) -> tuple[Any, int]:
        """A Struct. unknown: takes the names of fields that it has not."""
        raw, fields, found = self._raw, _fields(kind), dict[str, Any]()
        at = self.space(at + 1)
        while True:
            name, at = self._key(at, str, path)
            field, type_ = fields.get(name, ("", msgspec.Raw))
            was_dropped, self._is_dropped = self._is_dropped, self._is_dropped or not field
            value, at = self.value(at, type_, f"{path}.{name}")
            self._is_dropped = was_dropped
            if field:
                found[field] = value
            elif unknown is not None:
                unknown.append(name)
            at = self.space(at)
            if raw[at : at + 1] == b"}":
                break
            at = self._behind_comma(at)
        missing = next((f.encode_name for f in msgspec.structs.fields(kind) if f.required and f.name not in found), None)
        if missing is not None:
            raise _moved(msgspec.ValidationError(f"Object missing required field `{missing}`"), path, None)
        return kind(**found), at + 1

    def _key(self, at: int, kind: Any, path: str) -> tuple[Any, int]:
        raw = self._raw
        if raw[at : at + 1] != b'"':
            raise _Whole
        end = self._string_end(at)
        (key,) = self._decoded(b"{" + raw[at:end] + b":0}", dict[kind, Any], path)
        end = self.space(end)
        if raw[end : end + 1] != b":":
            raise _Whole
        return key, self.space(end + 1)

    def _behind_comma(self, at: int) -> int:
        if self._raw[at : at + 1] != b",":
            raise _Whole
        return self.space(at + 1)


def _moved(error: msgspec.ValidationError, path: str, first: int | None) -> msgspec.ValidationError:
    """The same, of a piece that lies at a path; first: the number of its first item."""
    text = str(error)
    where = _WHERE.search(text)
    what, key, rest = (text[: where.start()], where.group(1) or "", where.group(2)) if where else (text, "", "")
    if first is not None:
        rest = _FIRST.sub(lambda n: f"[{first + int(n.group(1))}]", rest, count=1)
    return msgspec.ValidationError(f"{what} - at `{key}${path}{rest}`")
