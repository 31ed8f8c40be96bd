"""Calls as JSON between a pair of markers that differs from family to family; the JSON inside is the same."""

from __future__ import annotations

from collections.abc import Callable

from ..feed import Feed, Wait
from .bodies import json_calls
from .dialect import Dialect, Schemas

_CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def _block(
    name: str, start: str, end: str, fits: Callable[[str], bool], example: str, starts: tuple[str, ...] = ()
) -> Dialect:
    def read(feed: Feed, marker: str, schemas: Schemas) -> Wait:
        yield from json_calls(feed, (end,))

    return Dialect(name, (start, *starts), read, fits, (end,), example)


def _names(*texts: str) -> Callable[[str], bool]:
    return lambda template: all(t in template for t in texts)


COHERE = _block(
    "cohere", "<|START_ACTION|>", "<|END_ACTION|>", _names("<|START_ACTION|>"),
    '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>',
)  # fmt: skip
NEMOTRON = _block("nemotron", "<TOOLCALL>", "</TOOLCALL>", _names("<TOOLCALL>"), f"<TOOLCALL>[{_CALL}]</TOOLCALL>")
TOOL_CALLS = _block(
    "tool-calls", "<tool_calls>", "</tool_calls>", _names("<tool_calls>"), f"<tool_calls>[{_CALL}]</tool_calls>"
)
GRANITE = _block(
    "granite",
    "<|tool_call|>",
    "<|end_of_text|>",
    _names("<|tool_call|>", "<|start_of_role|>"),
    f"<|tool_call|>[{_CALL}]",
)
PHI4 = _block(
    "phi-4",
    "<|tool_call|>",
    "<|/tool_call|>",
    _names("<|tool_call|>", "<|/tool_call|>"),
    f"<|tool_call|>[{_CALL}]<|/tool_call|>",
)
GIGACHAT = _block(
    "gigachat", "<|function_call|>", "<|message_sep|>", lambda t: ("<|role_sep|>" in t and "function call" in t) or "<|function_call|>" in t,
    f"<|function_call|>{_CALL}", ("<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>"),
)  # fmt: skip
FUNCTOOLS = _block("functools", "functools", "\0", _names("functools["), f"functools[{_CALL}]")
