"""LFM 2: <|tool_call_start|>[f(a="x")]<|tool_call_end|>; Apertus: <|tools_prefix|>[{"f": {...}}]<|tools_suffix|>."""

from __future__ import annotations

import json
from functools import partial

from ..feed import Ended, Feed, Malformed, Wait
from .bodies import json_calls, pythonic_calls
from .dialect import Dialect, Schemas
from .written import python_call

_END = "<|tool_call_end|>"
_MAX_CHARACTERS = 1 << 20


def _whole(feed: Feed, end: str) -> Wait:
    """The text up to `end`, or all of it when the text ends first."""
    begin = feed.at
    try:
        text, _ = yield from feed.until((end,), limit=_MAX_CHARACTERS)
        return text
    except Ended:
        feed.at = len(feed.buffer)
        return feed.buffer[begin:]


def _read_lfm(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    begin = feed.at
    first = yield from feed.space()
    if first == "[":
        feed.at += 1
        first = yield from feed.space()
    feed.at = begin
    if first == "{":
        yield from json_calls(feed, (_END,))
        return
    text = yield from _whole(feed, _END)
    for name, arguments in pythonic_calls(text):
        feed.call(name, arguments)


LFM2 = Dialect(
    "lfm-2",
    ("<|tool_call_start|>",),
    _read_lfm,
    lambda t: "<|tool_call_start|>" in t or "List of tools: [" in t,
    (_END,),
    '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
    force=partial(python_call, before="<|tool_call_start|>", after=_END),
)


def _read_apertus(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    text = yield from _whole(feed, "<|tools_suffix|>")
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(calls, list) or not all(isinstance(c, dict) and len(c) == 1 for c in calls):
        raise Malformed
    for call in calls:
        for name, arguments in call.items():
            feed.call(name, json.dumps(arguments, ensure_ascii=False))


APERTUS = Dialect(
    "apertus",
    ("<|tools_prefix|>",),
    _read_apertus,
    lambda t: "<|tools_prefix|>" in t,
    ("<|tools_suffix|>",),
    '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>',
)
