"""Why a request's fields are not as they must be: the decoder's complaint as one sentence that names the field and what it holds."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from ..errors import UsageError

WORDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip
BOUNDS = {">=": "at least {} is needed", "<=": "at most {} is possible", ">": "more than {} is needed", "<": "less than {} is needed"}
MAX_SHOWN = 60
_WHERE = re.compile(r" - at `(key` in `)?\$\.?(.*)`$")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_KINDS = re.compile(r"Expected `([a-z| ]+)`, got `[a-z]+`")
_BOUND = re.compile(r"Expected `[a-z]+` (of length )?(>=|<=|>|<) (\S+)")
_MISSING = re.compile(r"Object missing required field `(.+)`")


def of(error: msgspec.ValidationError, given: Any, inside: str = "") -> UsageError:
    """The refusal (facts: param). given: the value that was decoded. inside: the field that held it, where it is a part of a request."""
    text = str(error)
    where = _WHERE.search(text)
    what, is_key, path = (text[: where.start()], bool(where.group(1)), where.group(2)) if where else (text, False, "")
    param = f"{inside}.{path}".strip(".").replace(".[", "[")
    missing = _MISSING.fullmatch(what)
    if missing:
        name = missing.group(1)
        return UsageError(f"{param or 'the body'} has no {name}, which is required", param=f"{param}.{name}".lstrip("."))
    return UsageError(_sentence(what, param or "the body", is_key, _value(given, path)), param=param or None)


def _sentence(what: str, param: str, is_key: bool, value: object) -> str:
    kinds, bound = _KINDS.fullmatch(what), _BOUND.fullmatch(what)
    if kinds:
        wanted = " or ".join(WORDS.get(k, k) for k in kinds.group(1).split(" | ") if k != "null" or kinds.group(1) == "null")
        if is_key or param.endswith("[...]"):
            return f"a {'key' if is_key else 'value'} of {param.removesuffix('[...]')} is not {wanted}"
        return f"{param} is {_shown(value)}, and must be {wanted}"
    if bound:
        limit = BOUNDS[bound.group(2)].format(bound.group(3).removesuffix(".0"))
        return f"{param} {f'has a length of {_length(value)}' if bound.group(1) else f'is {_shown(value)}'}, {limit}"
    return f"{param}: {what}"


def _value(given: Any, path: str) -> object:
    """What lies at a path of the decoder; ... where that cannot be told."""
    for step in _STEP.finditer(path):
        try:
            given = given[step.group(1)] if step.group(1) is not None else given[int(step.group(2))]
        except (KeyError, IndexError, TypeError):
            return ...
    return ... if "[...]" in path else given


def _length(value: object) -> str:
    return str(len(value)) if isinstance(value, str | list | dict) else "another number"


def _shown(value: object) -> str:
    if value is ...:
        return "something else"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
