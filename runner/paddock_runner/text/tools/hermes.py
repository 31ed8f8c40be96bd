"""Hermes and its many followers (Qwen 2.5/3, QwQ, Granite 4, Reka, ...): <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from ..feed import Feed, Wait
from .bodies import json_calls
from .dialect import Dialect, Schemas

_END = "</tool_call>"


def _read(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    yield from json_calls(feed, (_END,))


def _fits(template: str) -> bool:
    return "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template


HERMES = Dialect(
    "hermes",
    ("<tool_call>",),
    _read,
    _fits,
    (_END,),
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
)
