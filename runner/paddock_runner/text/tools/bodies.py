"""Readers that several dialects share: calls as JSON objects, calls as a name and then JSON, parameters between marks."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..feed import Ended, Feed, Malformed, Wait
from .dialect import Schemas

NAMES = ("name", "function", "tool_name", "function_name")
ARGUMENTS = ("arguments", "parameters", "args", "input")
_IDS = ("id", "tool_call_id", "call_id")
_NAME_CHARACTERS = 256
_JSON_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)\\/")


def json_object(feed: Feed, known: Schemas | None = None) -> Wait:
    """One call as {"name": ..., "arguments": {...}}; arguments are told as they come when the name came first.

    known: refuse a name that is not among these tools. Raises: Malformed.
    """
    yield from feed.expect("{")
    name, call_id, held = "", "", ""
    is_open = False
    while True:
        if (yield from feed.space()) == "}":
            break
        key = yield from feed.string()
        yield from feed.space()
        yield from feed.expect(":")
        first = yield from feed.space()
        if key in NAMES and first == '"':
            name = yield from feed.string()
            if known is not None and name not in known:
                raise Malformed
        elif key in ARGUMENTS and name and first == "{" and not is_open:
            feed.start_call(name, call_id)
            is_open = True
            yield from feed.value(feed.arguments)
        elif key in ARGUMENTS and first in '{"':
            held = (yield from feed.string()) if first == '"' else (yield from _kept(feed))
        elif key in _IDS and first == '"':
            call_id = yield from feed.string()
        else:
            yield from _kept(feed)
        if (yield from feed.space()) == ",":
            feed.at += 1
        elif feed.buffer[feed.at] != "}":
            raise Malformed
    feed.at += 1
    if is_open:
        feed.end_call()
    elif name:
        feed.call(name, held or "{}", call_id)
    else:
        raise Malformed


def _kept(feed: Feed) -> Wait:
    parts: list[str] = []
    yield from feed.value(parts.append)
    return "".join(parts)


def json_calls(feed: Feed, ends: Sequence[str] = (), known: Schemas | None = None, between: str = ",") -> Wait:
    """Calls as JSON objects, one or more, perhaps in a list; then one of `ends`, if it comes. between: what may separate them."""
    first = yield from feed.space()
    is_list = first == "["
    if is_list:
        feed.at += 1
    elif first != "{":
        raise Malformed
    n_calls = feed.n_calls
    try:
        while True:
            char = yield from feed.space()
            if char == "{":
                yield from json_object(feed, known)
            elif char in between:
                feed.at += 1
            elif char == "]" and is_list:
                feed.at += 1
                break
            else:
                break
        yield from closing(feed, ends)
    except Ended:
        if feed.n_calls == n_calls or feed.is_call_open:
            raise


def closing(feed: Feed, ends: Sequence[str]) -> Wait:
    """Skips white space and one of `ends`, where they come; the end of the text is as good."""
    if not ends:
        return
    before = feed.at
    try:
        yield from feed.space()
        if not (yield from feed.accept(*ends)):
            feed.at = before
    except Ended:
        return


def json_arguments(feed: Feed, name: str, call_id: str = "") -> Wait:
    """The arguments of `name` as one JSON object, told as they come. An empty text stands for no arguments."""
    first = yield from feed.space()
    if first != "{":
        raise Malformed
    feed.start_call(name.strip(), call_id)
    yield from feed.value(feed.arguments)
    feed.end_call()


def name_until(feed: Feed, *marks: str) -> Wait:
    """A tool's name up to one of `marks`; returns (name, mark). Raises: Malformed."""
    text, mark = yield from feed.until(marks, limit=_NAME_CHARACTERS)
    return text.strip(), mark


class Parameters:
    """Arguments that come as single parameters, told as one JSON object.

    Text stays text where the tool's schema says string (or where it is no JSON); else it is taken for JSON.
    """

    def __init__(self, feed: Feed, name: str, schemas: Schemas) -> None:
        self._feed = feed
        self._n = 0
        properties = (schemas.get(name) or {}).get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}

    def read(self, key: str, ends: Sequence[str], newline: str = "", is_text: bool | None = None) -> Wait:
        """One parameter up to one of `ends`; returns that mark. newline: stripped once from both sides where it is there."""
        if is_text is None:
            is_text = self._is_text(key)
        self._feed.arguments(("{" if self._n == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._n += 1
        if newline:
            yield from self._feed.accept(newline)
        if not is_text:
            text, mark = yield from self._feed.until(ends)
            self._feed.arguments(self._as_json(key, text.removesuffix(newline) if newline else text))
            return mark
        self._feed.arguments('"')
        told = _Escaped(self._feed.arguments, newline)
        _, mark = yield from self._feed.until(ends, told.tell)
        self._feed.arguments('"')
        return mark

    def end(self) -> None:
        """No more parameters."""
        self._feed.arguments("{}" if self._n == 0 else "}")
        self._feed.end_call()

    def _is_text(self, key: str) -> bool:
        schema = self._properties.get(key)
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        return kind == "string" or (isinstance(kind, list) and set(kind) <= {"string", "null"} and "string" in kind)

    def _as_json(self, key: str, text: str) -> str:
        schema = self._properties.get(key)
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        stripped = text.strip()
        try:
            json.loads(stripped)
            return stripped
        except (ValueError, RecursionError):
            pass
        if kind == "boolean" and stripped.lower() in ("true", "false"):
            return stripped.lower()
        if stripped == "None" and kind != "string":
            return "null"
        if kind in ("object", "array"):
            try:
                return json.dumps(ast.literal_eval(stripped), ensure_ascii=False)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                pass
        return json.dumps(text, ensure_ascii=False)


class _Escaped:
    """Tells text on as the inside of a JSON string, keeping back one newline that may be the last."""

    def __init__(self, tell: Callable[[str], None], newline: str) -> None:
        self._tell = tell
        self._newline = newline
        self._held = ""

    def tell(self, text: str) -> None:
        """More text."""
        if not text:
            return
        text = self._held + text
        self._held = self._newline if self._newline and text.endswith(self._newline) else ""
        text = text[: len(text) - len(self._held)]
        self._tell(json.dumps(text, ensure_ascii=False)[1:-1])


def pythonic_calls(source: str, known: Schemas | None = None) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of `name(a=1, b="x")` or a list of such calls; texts may be escaped as in JSON. Raises: Malformed."""
    try:
        tree = ast.parse(_JSON_SLASH.sub(r"\1/", source.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    calls = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args:
            raise Malformed
        name = ast.unparse(node.func)
        if known is not None and name not in known:
            raise Malformed
        try:
            arguments = {k.arg: _literal(k.value) for k in node.keywords if k.arg}
            calls.append((name, json.dumps(json.loads(json.dumps(arguments)), ensure_ascii=False).encode("utf-8", "replace").decode()))
        except (ValueError, TypeError, RecursionError):
            raise Malformed from None
    if not calls:
        raise Malformed
    return calls


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(e) for e in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(k)): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    return ast.literal_eval(node)
