"""Hermes and its many followers (Qwen 2.5/3, QwQ, Granite 4, Reka, ...): <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json
from typing import Any

from ..feed import Ended, Feed, Malformed, Wait
from .bodies import ARGUMENTS, json_calls
from .dialect import Dialect, Schemas

_END = "</tool_call>"
_FENCES = ("```json", "```")


def _read(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    if marker:
        yield from json_calls(feed, (_END,))
    else:
        yield from _bare(feed, schemas)


def _bare(feed: Feed, schemas: Schemas) -> Wait:
    """Calls without markers, perhaps in fences as code, told when they are whole: nothing but valid JSON with the name of a tool says that they are calls."""
    n_before, is_fenced = feed.n_calls, False
    while True:
        begin = feed.at
        try:
            yield from feed.space()
            if is_fenced and (yield from feed.accept(_FENCES[-1])):
                is_fenced = False
                continue
            is_fenced = is_fenced or bool((yield from feed.accept(*_FENCES)))
            if (yield from feed.space()) != "{":
                raise Malformed
            name, arguments = yield from _whole(feed, schemas)
        except (Ended, Malformed):
            if feed.n_calls == n_before:
                raise
            feed.at = begin
            return
        feed.call(name, arguments)


def _whole(feed: Feed, schemas: Schemas) -> Wait:
    """(name, arguments) of the object that begins here. Its name comes first, so that other JSON is told on at once."""
    begin = feed.at
    feed.at += 1
    yield from feed.space()
    if (yield from feed.string()) != "name":
        raise Malformed
    yield from feed.space()
    yield from feed.expect(":")
    yield from feed.space()
    name = yield from feed.string()
    if name not in schemas:
        raise Malformed
    feed.at = begin
    parts: list[str] = []
    yield from feed.value(parts.append)
    try:
        found = json.loads("".join(parts), strict=False)
    except (ValueError, RecursionError):
        raise Malformed from None
    arguments: Any = next((found[key] for key in ARGUMENTS if key in found), {})
    if not isinstance(arguments, dict):
        raise Malformed
    text = json.dumps(arguments, ensure_ascii=False)
    if not feed.takes(name, text):
        raise Malformed
    return name, text


def _fits(template: str) -> bool:
    return "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template


HERMES = Dialect(
    "hermes",
    ("<tool_call>",),
    _read,
    _fits,
    (_END,),
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    is_loose=True,  # Qwen 2.5 Coder leaves the markers out
)
