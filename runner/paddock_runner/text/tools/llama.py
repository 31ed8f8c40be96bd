"""Llama 3.x and 4: a bare {"name": ..., "parameters": {...}} as the whole answer, after <|python_tag|>, or [f(a=1)] calls.

Only names of tools that were given count as calls: a bare object is otherwise an answer in JSON.
"""

from __future__ import annotations

import json
import re

from ..feed import Ended, Feed, Malformed, Wait
from .bodies import json_calls, pythonic_calls
from .dialect import Dialect, Schemas

_CODE_TOOLS = ("python", "ipython", "code_interpreter")
_MAX_CHARACTERS = 1 << 20
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[\[\]]", re.S)


def _read(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    if marker == "<|python_start|>":
        yield from feed.space()
        yield from feed.accept("<|python_end|>")
    first = yield from feed.space()
    if first == "{":
        yield from json_calls(feed, ("<|python_end|>",), schemas, ";,")
    elif first == "[":
        yield from _read_list(feed, schemas)
    elif marker:
        yield from _read_code(feed, schemas)
    else:
        raise Malformed


def _read_list(feed: Feed, schemas: Schemas) -> Wait:
    begin = feed.at
    feed.at += 1
    after = yield from feed.space()
    feed.at = begin
    if after == "{":
        yield from json_calls(feed, ("<|python_end|>",), schemas)
        return
    while (end := _list_end(feed.buffer, begin)) is None:
        if len(feed.buffer) - begin > _MAX_CHARACTERS:
            raise Malformed
        yield from feed.more()
    for name, arguments in pythonic_calls(feed.buffer[begin:end], schemas):
        feed.call(name, arguments)
    feed.at = end


def _list_end(text: str, begin: int) -> int | None:
    """After the bracket that closes the one at `begin`, outside quotes."""
    depth = 0
    for match in _QUOTED.finditer(text, begin):
        if match.group() == "[":
            depth += 1
        elif match.group() == "]":
            depth -= 1
            if depth == 0:
                return match.end()
    return None


def _read_code(feed: Feed, schemas: Schemas) -> Wait:
    """`tool.call(query="x")` of the built-in tools, or code for an interpreter that was given."""
    begin = feed.at
    try:
        while True:
            feed.at = len(feed.buffer)
            yield from feed.more()
    except Ended:
        source = feed.buffer[begin:]
    try:
        calls = pythonic_calls(source)
    except Malformed:
        calls = []
    if calls and all(name.removesuffix(".call") in schemas for name, _ in calls):
        for name, arguments in calls:
            feed.call(name.removesuffix(".call"), arguments)
        return
    tool = next((t for t in _CODE_TOOLS if t in schemas), None)
    if tool is None:
        raise Malformed
    feed.call(tool, json.dumps({"code": source}, ensure_ascii=False))


def _fits(template: str) -> bool:
    return ("<|python_tag|>" in template or "<|python_start|>" in template or "ipython" in template) and (
        "<|start_header_id|>" in template or "<|header_start|>" in template
    )


LLAMA = Dialect(
    "llama",
    ("", "<|python_tag|>", "<|python_start|>"),
    _read,
    _fits,
    ("<|python_end|>",),
    '{"name": "get_weather", "parameters": {"city": "Paris"}}',
)
