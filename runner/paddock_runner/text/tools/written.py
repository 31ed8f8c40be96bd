"""Grammars of calls in notations of their own: Python calls (LFM 2) and Gemma 4's objects, arguments held to the tool's schema.

Knows Lark rules and JSON schema, no tokenizer: literal text goes through `spell`, which writes special tokens by their ids.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..grammar import WHITE_SPACE

Spell = Callable[[str], str]
_MAX_TEXT = 20_000
_SCALARS = ("integer", "number", "boolean", "null")


def json_rule(schema: Any) -> str:
    """Lark for JSON of this schema. What cannot be enforced is ignored: a tool's schema is a description first."""
    told = schema if isinstance(schema, Mapping) else {}
    return "%json " + json.dumps({**told, "x-guidance": {"whitespace_pattern": WHITE_SPACE, "lenient": True}})


def members(rule: str, parts: Sequence[tuple[str, bool]], separator: str) -> list[str]:
    """Rules, the first of them named `rule`, for parts in their order with separators between: (rule of a part, whether it must be there)."""
    out = []
    for i, (part, is_required) in enumerate(parts):
        rest, first = f"{rule}_r{i}", rule if i == 0 else f"{rule}_f{i}"
        more, begins = (f"{rule}_r{i + 1}", f"{rule}_f{i + 1}") if i + 1 < len(parts) else ('""', '""')
        out.append(f"{first}: {part} {more}" + ("" if is_required else f" | {begins}"))
        if i:
            out.append(f"{rest}: " + (f"{separator} {part} {more}" if is_required else f"({separator} {part})? {more}"))
    return out or [f'{rule}: ""']


def python_call(number: int, name: str, schema: Mapping[str, Any], spell: Spell, before: str, after: str) -> list[str]:
    """Rules of `[name(key=value, ...)]` between two marks; where that is no Python, of `[{"name": ..., "arguments": {...}}]`."""
    properties = _properties(schema)
    call = f"call_{number}"
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in (*name.split("."), *properties)):
        told = {"type": "object", **schema}
        head = spell(before + '[{"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": ')
        return [f"{call}: {head} {call}_a {spell('}]' + after)}", f"{call}_a: {json_rule(told)}"]
    required, definitions = schema.get("required") or (), _definitions(schema)
    parts, rules = [], []
    for i, (key, kind) in enumerate(properties.items()):
        parts.append((f"{call}_p{i}", key in required))
        told = {**definitions, **kind} if isinstance(kind, Mapping) else definitions
        rules += [f"{call}_p{i}: {spell(key + '=')} {call}_v{i}", f"{call}_v{i}: {json_rule(told)}"]
    head = f"{call}: {spell(f'{before}[{name}(')} {call}_m {spell(')]' + after)}"
    return [head, *members(f"{call}_m", parts, '", "'), *rules]


def gemma_call(number: int, name: str, schema: Mapping[str, Any], spell: Spell, before: str, after: str) -> list[str]:
    """Rules of `call:name{key:value,...}` between two marks."""
    call = f"call_{number}"
    values = _GemmaValues(call, schema, spell)
    told = {"type": "object", "additionalProperties": False, **schema}
    arguments = values.rule(told)
    return [f"{call}: {spell(f'{before}call:{name}')} {arguments} {spell(after)}", *values.rules]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


class _GemmaValues:
    """Makes the rules of a schema's values as Gemma 4 writes them: bare keys, texts between its own quotes, the rest as JSON."""

    def __init__(self, prefix: str, root: Mapping[str, Any], spell: Spell) -> None:
        self.rules: list[str] = []
        self._prefix, self._root, self._quote = prefix, root, spell('<|"|>')
        self._n = 0
        self._known: dict[str, str] = {}
        self._any = ""

    def rule(self, schema: Any) -> str:
        """The name of the rule of a schema's values."""
        if not isinstance(schema, Mapping) or not schema:
            return self._anything()
        if isinstance(schema.get("$ref"), str):
            return self._referred(schema["$ref"])
        name = self._name()
        self._add(name, schema)
        return name

    def _add(self, name: str, schema: Mapping[str, Any]) -> None:
        kinds = schema.get("type")
        if "const" in schema or isinstance(schema.get("enum"), list):
            options = [schema["const"]] if "const" in schema else schema["enum"]
            self._put(name, " | ".join(self._fixed(option) for option in options) or '""')
            return
        several = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
        if several is None and isinstance(kinds, list):
            several = [{**schema, "type": kind} for kind in kinds]
        if several:
            self._put(name, " | ".join(self.rule(option) for option in several))
        elif kinds == "object" or "properties" in schema:
            self._object(name, schema)
        elif kinds == "array" or "items" in schema:
            self._array(name, schema)
        elif kinds == "string":
            self._put(name, f"{self._quote} {self._text(schema)} {self._quote}")
        elif kinds in _SCALARS:
            self._put(name, json_rule(schema))
        else:
            self._put(name, self._anything())

    def _object(self, name: str, schema: Mapping[str, Any]) -> None:
        required = schema.get("required") or ()
        parts = []
        for key, kind in _properties(schema).items():
            pair = self._name()
            spelled = json.dumps(f"{key}:", ensure_ascii=False) if _is_bare(key) else f"{self._fixed(key)} {json.dumps(':')}"
            self._put(pair, f"{spelled} {self.rule(kind)}")
            parts.append((pair, key in required))
        inside = name + "_m"
        if not parts and schema.get("additionalProperties") is not False:
            inside = self._free_members()
        else:
            self.rules += members(inside, parts, '","')
        self._put(name, f'"{{" {inside} "}}"')

    def _array(self, name: str, schema: Mapping[str, Any]) -> None:
        item, low, high = self.rule(schema.get("items")), _count(schema.get("minItems")) or 0, _count(schema.get("maxItems"))
        if high == 0:
            self._put(name, '"[]"')
            return
        many = f'{item} ("," {item}){{{max(0, low - 1)},{"" if high is None else max(high, low, 1) - 1}}}'
        self._put(name, f'"[" {many} "]"' if low else f'"[" ({many})? "]"')

    def _referred(self, path: str) -> str:
        if path not in self._known:
            self._known[path] = name = self._name()
            found: Any = self._root
            for key in path.removeprefix("#").strip("/").split("/") if path != "#" else ():
                found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            if isinstance(found, Mapping) and not isinstance(found.get("$ref"), str):
                self._add(name, found)
            else:
                self._put(name, self._anything())
        return self._known[path]

    def _text(self, schema: Mapping[str, Any]) -> str:
        low, high = _count(schema.get("minLength")) or 0, _count(schema.get("maxLength"))
        name = self._name().upper()
        bound = "*" if not low and high is None else f"{{{low},{'' if high is None else max(high, low)}}}"
        character = "(?s:.)" if self._quote.startswith("<[") else "[^<]"
        self._put(name, f"/{character}{bound}/")
        return name

    def _fixed(self, value: Any) -> str:
        """A constant. Texts between the quotes; what holds texts further in is written as such too."""
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value, ensure_ascii=False)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, Mapping):
            pairs = [f"{self._fixed(key)} {json.dumps(':')} {self._fixed(part)}" for key, part in value.items()]
            return " ".join(['"{"', ' "," '.join(pairs), '"}"'])
        if isinstance(value, list):
            return " ".join(['"["', ' "," '.join(self._fixed(part) for part in value), '"]"'])
        return json.dumps(json.dumps(value))

    def _anything(self) -> str:
        if not self._any:
            self._any = name = self._name()
            text, scalar, free = self._text({}), self._name(), self._free_members()
            self._put(scalar, json_rule({"type": list(_SCALARS)}))
            self._put(name, f'{self._quote} {text} {self._quote} | {scalar} | "[" ({name} ("," {name})*)? "]" | "{{" {free} "}}"')
        return self._any

    def _free_members(self) -> str:
        if "" not in self._known:
            self._known[""] = name = self._name()
            key = name.upper()
            self._put(key, "/[A-Za-z_][A-Za-z0-9_]{0,63}/")
            value = self._anything()
            self._put(name, f'({key} ":" {value} ("," {key} ":" {value})*)?')
        return self._known[""]

    def _name(self) -> str:
        self._n += 1
        return f"{self._prefix}_g{self._n}"

    def _put(self, name: str, body: str) -> None:
        self.rules.append(f"{name}: {body}")


def _is_bare(key: str) -> bool:
    return bool(key) and key.replace("_", "a").replace("-", "a").isalnum()


def _count(value: Any) -> int | None:
    return min(value, _MAX_TEXT) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
