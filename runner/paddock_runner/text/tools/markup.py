"""Calls as marked-up parameters: <function=f><parameter=k>v</parameter></function> and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..feed import Feed, Malformed, Wait
from .bodies import Parameters, closing, json_calls, name_until
from .dialect import Dialect, Schemas


@dataclass(frozen=True, slots=True)
class Markup:
    """The marks of one relative. is_quoted: names stand as name="f">, perhaps with attributes; else as =f>.

    newline: stripped once from both sides of a value.
    """

    block: tuple[str, ...]
    block_end: str
    call: str
    call_end: str
    parameter: str
    parameter_end: str
    is_quoted: bool = True
    newline: str = ""


def markup_dialect(
    name: str, marks: Markup, fits: Callable[[str], bool], example: str, is_bare: bool = False
) -> Dialect:
    """A dialect of these marks. is_bare: calls also come without the block around them."""

    def read(feed: Feed, marker: str, schemas: Schemas) -> Wait:
        yield from _read(feed, marker, schemas, marks)

    starts = (*marks.block, marks.call) if is_bare or not marks.block else marks.block
    hidden = (marks.block_end, marks.call_end, marks.parameter, marks.parameter_end, marks.call)
    return Dialect(name, starts, read, fits, tuple(h for h in hidden if h), example)


def _read(feed: Feed, marker: str, schemas: Schemas, marks: Markup) -> Wait:
    if marker != marks.call:
        if (yield from feed.space()) == "{":
            yield from json_calls(feed, (marks.block_end,))
            return
        yield from feed.expect(marks.call)
    while True:
        name, _ = yield from _name(feed, marks)
        feed.start_call(name)
        yield from _parameters(feed, Parameters(feed, name, schemas), marks)
        follows = (marks.call, marks.block_end) if marker != marks.call else (marks.call,)
        before = feed.at
        yield from closing(feed, tuple(f for f in follows if f))
        if not feed.buffer[before : feed.at].endswith(marks.call):
            return


def _name(feed: Feed, marks: Markup) -> Wait:
    """(name, attributes)."""
    if not marks.is_quoted:
        name, _ = yield from name_until(feed, ">")
        return name.strip("\"'"), ""
    name, _ = yield from name_until(feed, '"')
    attributes, _ = yield from feed.until((">",), limit=256)
    return name, attributes


def _parameters(feed: Feed, parameters: Parameters, marks: Markup) -> Wait:
    while True:
        yield from feed.space()
        mark = yield from feed.expect(marks.parameter, marks.call_end)
        if mark == marks.call_end:
            break
        key, attributes = yield from _name(feed, marks)
        if not key:
            raise Malformed
        is_text = True if 'string="true"' in attributes else False if 'string="false"' in attributes else None
        yield from parameters.read(key, (marks.parameter_end,), marks.newline, is_text)
    parameters.end()


def _quoted(block: str, prefix: str = "", end: str = "") -> Markup:
    return Markup(
        (f"<{prefix}{block}>",), end or f"</{prefix}{block}>", f'<{prefix}invoke name="', f"</{prefix}invoke>",
        f'<{prefix}parameter name="', f"</{prefix}parameter>",
    )  # fmt: skip


def _example(block: str, prefix: str = "", attribute: str = "") -> str:
    return (
        f'<{prefix}{block}>\n<{prefix}invoke name="get_weather">\n<{prefix}parameter name="city"{attribute}>Paris</{prefix}parameter>\n'
        f"</{prefix}invoke>\n</{prefix}{block}>"
    )


_FUNCTION = Markup(
    ("<tool_call>",),
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    is_quoted=False,
    newline="\n",
)
QWEN3_CODER = markup_dialect(
    "qwen3-coder",
    _FUNCTION,
    lambda t: "<function=" in t and "<parameter=" in t and "<seed:" not in t,
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    is_bare=True,
)
SEED_OSS = markup_dialect(
    "seed-oss",
    Markup(
        ("<seed:tool_call>",),
        "</seed:tool_call>",
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        is_quoted=False,
    ),
    lambda t: "<seed:tool_call>" in t or "seed:tool_call" in t,
    "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
)
MINIMAX_M2 = markup_dialect(
    "minimax-m2",
    Markup(
        ("<minimax:tool_call>",),
        "</minimax:tool_call>",
        '<invoke name="',
        "</invoke>",
        '<parameter name="',
        "</parameter>",
    ),
    lambda t: "minimax:tool_call" in t,
    _example("tool_call").replace("tool_call>", "minimax:tool_call>").replace("</minimax", "</minimax"),
)
_DSML = "｜DSML｜"
DEEPSEEK_V32 = markup_dialect(
    "deepseek-v3.2",
    _quoted("function_calls", _DSML),
    lambda t: "DSML" in t and "function_calls" in t,
    _example("function_calls", _DSML, ' string="true"'),
)
DEEPSEEK_V4 = markup_dialect(
    "deepseek-v4",
    _quoted("tool_calls", _DSML),
    lambda t: "DSML" in t and "function_calls" not in t,
    _example("tool_calls", _DSML, ' string="true"'),
)
MUSE = markup_dialect(
    "muse",
    _quoted("function_calls", "atem:"),
    lambda t: "atem:function_calls" in t,
    _example("function_calls", "atem:"),
)
MINICPM5 = markup_dialect(
    "minicpm-5",
    Markup((), "", '<function name="', "</function>", '<param name="', "</param>"),
    lambda t: '<function name="' in t and '<param name="' in t,
    '<function name="get_weather"><param name="city">Paris</param></function>',
)
