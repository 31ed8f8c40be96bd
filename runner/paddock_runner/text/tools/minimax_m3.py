"""MiniMax M3: every tag after the sign ]<]minimax[>[, parameters as tags of their own name."""

from __future__ import annotations

from ..feed import Feed, Malformed, Wait
from .bodies import Parameters, closing, name_until
from .dialect import Dialect, Schemas

_SIGN = "]<]minimax[>["


def _read(feed: Feed, marker: str, schemas: Schemas) -> Wait:
    yield from feed.space()
    yield from feed.expect(f'{_SIGN}<invoke name="')
    while True:
        name, _ = yield from name_until(feed, '">')
        feed.start_call(name)
        parameters = Parameters(feed, name, schemas)
        while True:
            yield from feed.space()
            yield from feed.expect(f"{_SIGN}<")
            key, _ = yield from name_until(feed, ">")
            if key == "/invoke":
                break
            if not key or key.startswith("/"):
                raise Malformed
            yield from parameters.read(key, (f"{_SIGN}</{key}>",))
        parameters.end()
        before = feed.at
        yield from closing(feed, (f'{_SIGN}<invoke name="', f"{_SIGN}</tool_call>"))
        if not feed.buffer[before : feed.at].endswith('"'):
            return


MINIMAX_M3 = Dialect(
    "minimax-m3",
    (f"{_SIGN}<tool_call>",),
    _read,
    lambda t: _SIGN in t,
    (_SIGN,),
    f'{_SIGN}<tool_call>\n{_SIGN}<invoke name="get_weather">{_SIGN}<city>Paris{_SIGN}</city>{_SIGN}</invoke>\n{_SIGN}</tool_call>',
    (f"{_SIGN}<city>", f"{_SIGN}</city>"),
)
