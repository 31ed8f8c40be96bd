"""Random JSON schemas of the kinds that people send: objects, arrays, enums, bounds, alternatives, definitions."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "tags", "total", "is_ok", "größe", "a b", "x/y", "id", "items", "note")
PATTERNS = ("[a-z]{2,5}", "[A-Z][0-9]{3}", "(red|green)-[0-9]+", "[0-9]{4}-[0-9]{2}")


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose root is an object (most are), an array or a scalar; some parts stand under $defs."""
    root = _object(rng, depth) if rng.random() < 0.8 else _any(rng, depth)
    if rng.random() < 0.25:
        root = {**root, "$defs": {"part": _any(rng, 1)}}
        target = root.get("properties")
        if isinstance(target, dict):
            target["shared"] = {"$ref": "#/$defs/part"}
            root["required"] = [*root.get("required", ()), "shared"]
    return root


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _fixed]
    if depth > 0:
        kinds += [_object, _object, _array, _either]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 4))
    found: dict[str, Any] = {"type": "object", "properties": {n: _any(rng, depth - 1) for n in names}}
    required = [n for n in names if rng.random() < 0.7]
    if required or rng.random() < 0.5:
        found["required"] = required
    found["additionalProperties"] = False if rng.random() < 0.85 else _integer(rng, 0)
    if rng.random() < 0.2:
        found["title"], found["description"] = "T", "what it is"
    return found


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    found: dict[str, Any] = {"type": "array", "items": _any(rng, depth - 1), "maxItems": low + rng.randint(0, 2)}
    if low or rng.random() < 0.5:
        found["minItems"] = low
    if rng.random() < 0.15:
        found = {"type": "array", "prefixItems": [_any(rng, 0), _any(rng, 0)], "items": False, "minItems": 2}
    return found


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.2:
        return {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$"}
    if kind < 0.4:
        return {"enum": rng.sample(["red", "green", "blue", 'q"uote', "snow ☃", ""], rng.randint(1, 4))}
    if kind < 0.5:
        return {"type": "string", "format": rng.choice(["date", "uuid", "time"])}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice([{"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}, {"type": "integer", "exclusiveMinimum": low, "maximum": low + 9}])


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-5, 5)
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([1, 2.5, 100])}


def _fixed(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": rng.choice([1, "one", None, [1, 2], {"a": 1}])}, {"enum": [1, "two", None, False]}])


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1), {"type": "null"}]} if rng.random() < 0.5 else {"type": rng.choice([["string", "null"], ["integer", "boolean"]]), "maxLength": 5}
