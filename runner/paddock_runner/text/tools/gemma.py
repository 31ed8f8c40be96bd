"""Gemma 4: <|tool_call>call:f{k:<|"|>text<|"|>,n:1}<tool_call|>, with its own quotes and bare keys."""

from __future__ import annotations

import json
import re
from functools import partial

from ..feed import Feed, Malformed, Wait
from .bodies import closing, name_until
from .dialect import Dialect, Schemas
from .written import gemma_call

_QUOTE = '<|"|>'
_SCALAR = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?|true|false|null")
_DEEPEST = 64


def _read(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    yield from feed.space()
    yield from feed.expect("call:")
    name, _ = yield from name_until(feed, "{")
    feed.at -= 1
    feed.start_call(name)
    yield from _value(feed, 0)
    feed.end_call()
    yield from closing(feed, ("<tool_call|>",))


def _value(feed: Feed, depth: int) -> Wait:
    first = yield from feed.space()
    if depth > _DEEPEST:
        raise Malformed
    if first == "{":
        yield from _members(feed, "{", "}", depth)
    elif first == "[":
        yield from _members(feed, "[", "]", depth)
    elif first in '<"':
        yield from _text(feed)
    else:
        text, mark = yield from feed.until((",", "}", "]"), limit=4096)
        feed.at -= len(mark)
        text = text.strip()
        feed.arguments(text if _SCALAR.fullmatch(text) else json.dumps(text, ensure_ascii=False))


def _members(feed: Feed, opening: str, closer: str, depth: int) -> Wait:
    feed.at += 1
    feed.arguments(opening)
    n = 0
    while (yield from feed.space()) != closer:
        if n:
            yield from feed.expect(",")
            yield from feed.space()
            feed.arguments(", ")
        if opening == "{":
            key = yield from _key(feed)
            feed.arguments(json.dumps(key, ensure_ascii=False) + ": ")
        yield from _value(feed, depth + 1)
        n += 1
    feed.at += 1
    feed.arguments(closer)


def _key(feed: Feed) -> Wait:
    if (yield from feed.accept(_QUOTE)):
        key, _ = yield from feed.until((_QUOTE,), limit=4096)
        yield from feed.space()
        yield from feed.expect(":")
        return key
    key, _ = yield from feed.until((":",), limit=4096)
    return key.strip().strip('"')


def _text(feed: Feed) -> Wait:
    if (yield from feed.peek()) == '"':
        yield from feed.raw_string(feed.arguments)
        return
    yield from feed.expect(_QUOTE)
    feed.arguments('"')
    yield from feed.until((_QUOTE,), lambda t: feed.arguments(json.dumps(t, ensure_ascii=False)[1:-1]))
    feed.arguments('"')


GEMMA4 = Dialect(
    "gemma-4",
    ("<|tool_call>",),
    _read,
    lambda t: "<|tool_call>" in t,
    ("<tool_call|>", _QUOTE),
    '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
    force=partial(gemma_call, before="<|tool_call>", after="<tool_call|>"),
)
