"""A tool's name between marks, then its arguments as JSON: Mistral, DeepSeek, Kimi, Solar, Functionary."""

from __future__ import annotations

from ..feed import Feed, Malformed, Wait
from .bodies import closing, json_arguments, json_calls, name_until
from .dialect import Dialect, Schemas


def _read_mistral(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    if (yield from feed.space()) in "[{":
        yield from json_calls(feed)
        return
    name, mark = yield from name_until(feed, "[ARGS]", "[CALL_ID]", "{")
    call_id = ""
    if mark == "[CALL_ID]":
        call_id, mark = yield from name_until(feed, "[ARGS]", "{")
    if mark == "{":
        feed.at -= 1
    yield from json_arguments(feed, name, call_id)


MISTRAL = Dialect(
    "mistral",
    ("[TOOL_CALLS]",),
    _read_mistral,
    lambda t: "[TOOL_CALLS]" in t,
    ("[ARGS]", "[CALL_ID]"),
    '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
)

_CALLS, _CALL, _SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL_END, _CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


def _read_deepseek(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    if marker == _CALLS:
        yield from feed.space()
        yield from feed.expect(_CALL)
    while True:
        name, _ = yield from name_until(feed, _SEP)
        if (yield from feed.peek()) != "{":
            if name != "function":
                raise Malformed
            name, _ = yield from name_until(feed, "\n")
            yield from feed.space()
            yield from feed.accept("```json", "```")
        yield from json_arguments(feed, name)
        yield from closing(feed, ("```",))
        yield from closing(feed, (_CALL_END,))
        before = feed.at
        yield from closing(feed, (_CALL, _CALLS_END))
        if not feed.buffer[before : feed.at].endswith(_CALL):
            return


DEEPSEEK = Dialect(
    "deepseek",
    (_CALLS, _CALL),
    _read_deepseek,
    lambda t: _CALLS in t,
    (_SEP, _CALL_END, _CALLS_END),
    f'{_CALLS}{_CALL}get_weather{_SEP}{{"city": "Paris"}}{_CALL_END}{_CALLS_END}',
)


def _read_kimi(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    if marker == "<|tool_calls_section_begin|>":
        yield from feed.space()
        yield from feed.expect("<|tool_call_begin|>")
    while True:
        call_id, _ = yield from name_until(feed, "<|tool_call_argument_begin|>")
        yield from json_arguments(feed, call_id.removeprefix("functions.").rpartition(":")[0] or call_id, call_id)
        yield from closing(feed, ("<|tool_call_end|>",))
        before = feed.at
        yield from closing(feed, ("<|tool_call_begin|>", "<|tool_calls_section_end|>"))
        if not feed.buffer[before : feed.at].endswith("<|tool_call_begin|>"):
            return


KIMI = Dialect(
    "kimi",
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    _read_kimi,
    lambda t: "<|tool_calls_section_begin|>" in t,
    ("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
)


def _read_solar(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    if marker == "<|tool_calls|>":
        yield from feed.space()
        yield from feed.expect("<|tool_call:begin|>")
    while True:
        call_id, _ = yield from name_until(feed, "<|tool_call:name|>")
        name, _ = yield from name_until(feed, "<|tool_call:args|>")
        yield from json_arguments(feed, name, call_id)
        yield from closing(feed, ("<|tool_call:end|>",))
        before = feed.at
        yield from closing(feed, ("<|tool_call:begin|>", "<|calls|>"))
        if not feed.buffer[before : feed.at].endswith("<|tool_call:begin|>"):
            return


SOLAR = Dialect(
    "solar",
    ("<|tool_calls|>", "<|tool_call:begin|>"),
    _read_solar,
    lambda t: "<|tool_call:name|>" in t,
    ("<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>"),
    '<|tool_calls|><|tool_call:begin|>c1<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris"}<|tool_call:end|><|calls|>',
)


def _read_functionary(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    name, _ = yield from name_until(feed, ">")
    yield from json_arguments(feed, name)
    yield from closing(feed, ("</function>",))


FUNCTIONARY = Dialect(
    "functionary",
    ("<function=",),
    _read_functionary,
    lambda t: "<function=" in t and "<parameter=" not in t,
    ("</function>",),
    '<function=get_weather>{"city": "Paris"}</function>',
)
