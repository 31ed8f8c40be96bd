"""What a request's wrong field is called: the field, what it holds, and what it may hold."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta
from paddock_runner.errors import UsageError
from paddock_runner.front.service import Shape


class Part(msgspec.Struct):
    type: str


class Body(msgspec.Struct, kw_only=True):
    messages: Annotated[list[Part], Meta(min_length=1)]
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=0)] | None = None
    name: Annotated[str, Meta(max_length=3)] = ""
    bias: dict[int, float] | None = None
    kinds: list[int | str | list[int]] | None = None
    stream: bool | None = None


@pytest.mark.parametrize(
    ("given", "said", "param"),
    [
        ({"top_p": 2}, "top_p is 2, at most 1 is possible", "top_p"),
        ({"top_p": 0}, "top_p is 0, more than 0 is needed", "top_p"),
        ({"top_p": "1"}, 'top_p is "1", and must be a number', "top_p"),
        ({"n": -1}, "n is -1, at least 0 is needed", "n"),
        ({"n": 1.5}, "n is 1.5, and must be a whole number", "n"),
        ({"name": "four"}, "name has a length of 4, at most 3 is possible", "name"),
        ({"messages": []}, "messages has a length of 0, at least 1 is needed", "messages"),
        ({"messages": "hi"}, 'messages is "hi", and must be a list', "messages"),
        ({"messages": [{"type": "a"}, {}]}, "messages[1] has no type, which is required", "messages[1].type"),
        ({"messages": [{"type": None}]}, "messages[0].type is null, and must be a text", "messages[0].type"),
        ({"messages": [{"type": "é" * 99}, {"type": ["x"]}]}, "messages[1].type is a list, and must be a text", "messages[1].type"),
        ({"bias": {"x": 1}}, "a key of bias is not a whole number", "bias"),
        ({"bias": {"1": "x"}}, "a value of bias is not a number", "bias[...]"),
        ({"kinds": [1.5]}, "kinds[0] is 1.5, and must be a whole number or a text or a list", "kinds[0]"),
        ({"stream": "yes" * 50}, f'stream is "{"yes" * 20}'[:70] + "…, and must be true or false", "stream"),
        (None, "the body has no messages, which is required", "messages"),
        ([], "the body is a list, and must be an object", None),
    ],
)  # fmt: skip
def test_field_is_named_with_what_it_holds(given: Any, said: str, param: str | None) -> None:
    body = {"messages": [{"type": "x"}], **given} if isinstance(given, dict) else {} if given is None else given
    with pytest.raises(UsageError) as raised:
        Shape(Body).parse(json.dumps(body).encode())
    assert (raised.value.message, raised.value.facts["param"]) == (said, param)
