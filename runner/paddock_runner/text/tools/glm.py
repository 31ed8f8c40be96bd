"""GLM 4.5 and later, Laguna, Ling, Spark, Hunyuan: <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>."""

from __future__ import annotations

from ..feed import Feed, Malformed, Wait
from .bodies import Parameters, closing, json_calls, name_until
from .dialect import Dialect, Schemas


def _dialect(name: str, suffix: str) -> Dialect:
    call, call_end = f"<tool_call{suffix}>", f"</tool_call{suffix}>"
    key, key_end = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
    value, value_end = f"<arg_value{suffix}>", f"</arg_value{suffix}>"
    sep, block, block_end = f"<tool_sep{suffix}>", f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"

    def read(feed: Feed, marker: str, schemas: Schemas) -> Wait:
        if marker == block:
            yield from feed.space()
            yield from feed.expect(call)
        if (yield from feed.space()) == "{":
            yield from json_calls(feed, (call_end, block_end))
            return
        tool, mark = yield from name_until(feed, key, call_end, sep)
        feed.start_call(tool)
        parameters = Parameters(feed, tool, schemas)
        while mark != call_end:
            if mark != key:
                yield from feed.space()
                mark = yield from feed.expect(key, call_end)
                continue
            name, _ = yield from feed.until((key_end,), limit=1024)
            if not name.strip():
                raise Malformed
            yield from feed.space()
            yield from feed.expect(value)
            mark = yield from parameters.read(name.strip(), (value_end,))
        parameters.end()
        yield from closing(feed, (block_end,))

    starts = (call, block) if suffix else (call,)
    example = f"{call}get_weather\n{key}city{key_end}\n{value}Paris{value_end}\n{call_end}"
    if suffix:
        example = (
            f"{block}\n{call}get_weather{sep}\n{key}city{key_end}\n{value}Paris{value_end}\n{call_end}\n{block_end}"
        )
    return Dialect(
        name,
        starts,
        read,
        lambda t: (":opensource" in t and "<arg_key{}>" in t) if suffix else key in t,
        (call_end, key, key_end, value, value_end, sep, block_end),
        example,
    )


GLM = _dialect("glm", "")
HUNYUAN = _dialect("hunyuan", ":opensource")
