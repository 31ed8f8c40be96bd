"""Structured output: whatever the model would choose, a finished answer validates; wrong and hostile grammars are a 400 in time."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.conformance.live import KEY, MODEL, TOOLS, Live, live
from tests.conformance.random_schemas import schema

pytest.importorskip("llguidance")
ASK = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
N_SCHEMAS = 120
LOOK = {
    "type": "object",
    "properties": {"at": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["at", "n"],
    "additionalProperties": False,
}
FUNCTIONS = [{"type": "function", "function": {"name": n, "parameters": LOOK}} for n in ("look", "touch")]


class Drawer:
    """A model without sense: draws any allowed token, ends and closing marks more often than others."""

    def __init__(self, server: Live, seed: int) -> None:
        tokenizer = server.tokenizer
        self._rng = random.Random(seed)
        self._stops = frozenset(tokenizer.stop_ids)
        self._closers = frozenset(i for i, p in enumerate(tokenizer.pieces) if p in (b'"', b"}", b"]", b"<", b"/"))
        self.sizes: set[int] = set()

    def __call__(self, mask: bytes) -> int:
        self.sizes.add(len(mask))
        bits = int.from_bytes(mask, "little")
        allowed = [i for i in range(bits.bit_length()) if bits >> i & 1]
        assert allowed, "an empty mask"
        ends = [i for i in allowed if i in self._stops]
        closers = [i for i in allowed if i in self._closers]
        return self._rng.choice(ends or (closers if closers and self._rng.random() < 0.6 else allowed))


@pytest.fixture
def drawing(server: Live) -> Live:
    """The plain server, its engine drawing at random under the masks."""
    server.script.draw = Drawer(server, 1)
    return server


@pytest.fixture(scope="module")
def _caller() -> Iterator[Live]:
    with live(TOOLS) as found:
        found.script.draw = Drawer(found, 2)
        yield found


def chat(server: Live, **body: Any) -> dict[str, Any]:
    answer = server.post(CHAT, {"messages": ASK, "max_tokens": 3000, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def content(server: Live, **body: Any) -> str:
    choice = chat(server, **body)
    assert choice["finish_reason"] == "stop", choice
    return str(choice["message"]["content"])


def as_format(wanted: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted, "strict": True}}


@pytest.mark.parametrize("n, seed", [(N_SCHEMAS, 7), pytest.param(1000, 8, marks=pytest.mark.slow)])
def test_every_finished_answer_validates_against_its_random_schema(drawing: Live, n: int, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [schema(rng) for _ in range(n)]

    def one(wanted: dict[str, Any]) -> str:
        answer = drawing.post(CHAT, {"messages": ASK, "max_tokens": 3000, "response_format": as_format(wanted)})
        if answer.status_code == 400:
            return "refused"
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] != "stop":
            return "length"
        jsonschema.validate(json.loads(choice["message"]["content"]), wanted, format_checker=None)
        return "valid"

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, schemas))
    refused = [s for s, f in zip(schemas, found, strict=True) if f == "refused"]
    assert not refused, refused[:3]
    assert found.count("valid") > 0.9 * n, found
    assert drawing.front.desk.n_open == 0


def test_json_object_is_an_object_streamed_and_whole(drawing: Live) -> None:
    with openai.OpenAI(base_url=drawing.url + "/v1", api_key=KEY, max_retries=0, timeout=20) as client:
        whole = client.chat.completions.create(model=MODEL, messages=ASK, response_format={"type": "json_object"}, max_tokens=3000)
        assert isinstance(json.loads(whole.choices[0].message.content or ""), dict) or whole.choices[0].finish_reason == "length"
        text, reason = "", None
        for chunk in client.chat.completions.create(model=MODEL, messages=ASK, response_format={"type": "json_object"}, stream=True, max_tokens=3000):
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        assert reason == "length" or isinstance(json.loads(text), dict)


def test_parsed_helper_of_the_client_gives_the_model(drawing: Live) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        age: int = pydantic.Field(ge=0, le=99)

    with openai.OpenAI(base_url=drawing.url + "/v1", api_key=KEY, max_retries=0, timeout=20) as client:
        answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Person, n=3, max_tokens=500)
    assert all(isinstance(c.message.parsed, Person) for c in answer.choices) and len(answer.choices) == 3


@pytest.mark.parametrize(
    "wants, pattern",
    [
        ({"guided_regex": "(yes|no) [0-9]{2}"}, "(yes|no) [0-9]{2}"), ({"guided_choice": ["red", "a b"]}, "red|a b"),
        ({"guided_grammar": 'root ::= "x" | "y" root'}, "y*x"), ({"guided_grammar": 'start: "x" | "y" start'}, "y*x"),
        ({"structured_outputs": {"regex": "[0-9]/[0-9]"}}, "[0-9]/[0-9]"), ({"structured_outputs": {"choice": ["one"]}}, "one"),
        ({"guided_json": json.dumps(LOOK)}, r"\{.*\}"), ({"structured_outputs": {"json": LOOK}}, r"\{.*\}"), ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
    ],
)  # fmt: skip
def test_vllms_fields_hold_chat_and_completions(drawing: Live, wants: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, content(drawing, **wants).strip(), re.S)
    answer = drawing.post(TEXT, {"prompt": ["a", "b"], "n": 2, "max_tokens": 3000, **wants}).json()
    assert len(answer["choices"]) == 4
    assert all(re.fullmatch(pattern, c["text"].strip(), re.S) for c in answer["choices"] if c["finish_reason"] == "stop")


def test_reasoning_may_come_before_the_answer(thinking: Live) -> None:
    thinking.say("<think>", "Let {me} see", "</think>", "\n", '{"at": "x", "n": 1}')
    choice = chat(thinking, response_format=as_format(LOOK))
    assert choice["message"]["reasoning"] == "Let {me} see" and json.loads(choice["message"]["content"]) == {"at": "x", "n": 1}
    thinking.script.draw = Drawer(thinking, 3)
    choice = chat(thinking, response_format=as_format(LOOK))
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), LOOK)


@pytest.mark.parametrize("choice, names", [("required", {"look", "touch"}), ({"type": "function", "function": {"name": "touch"}}, {"touch"})])
def test_required_tools_are_called_with_valid_arguments(_caller: Live, choice: object, names: set[str]) -> None:
    for _ in range(5):
        found = chat(_caller, tools=FUNCTIONS, tool_choice=choice, parallel_tool_calls=False)
        assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
        (call,) = found["message"]["tool_calls"]
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), LOOK)


def test_allowed_tools_keep_the_prompt_and_narrow_the_calls(_caller: Live) -> None:
    _caller.engine.asked.clear()
    tools = [{"type": "function", "function": {"name": "look"}}]
    found = chat(_caller, tools=FUNCTIONS, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}})
    assert {c["function"]["name"] for c in found["message"]["tool_calls"]} == {"look"}
    chat(_caller, tools=FUNCTIONS, tool_choice="required")
    first, second = (bytes(a.prompt) for a in _caller.engine.asked)
    assert first == second


def test_tools_and_a_format_give_a_call_or_a_valid_answer(_caller: Live) -> None:
    wanted = {"type": "object", "properties": {"z": {"type": "boolean"}}, "required": ["z"], "additionalProperties": False}
    for _ in range(6):
        message = chat(_caller, tools=FUNCTIONS, response_format=as_format(wanted))["message"]
        if message["content"] is not None:
            jsonschema.validate(json.loads(message["content"]), wanted)
        for call in message.get("tool_calls", ()):
            jsonschema.validate(json.loads(call["function"]["arguments"]), LOOK)


HOSTILE: dict[str, dict[str, Any]] = {
    "no schema": {"response_format": {"type": "json_schema"}}, "unknown type": {"guided_json": {"type": "martian"}},
    "not JSON": {"guided_json": "{"}, "broken regex": {"guided_regex": "(a"}, "empty choice": {"guided_choice": []},
    "broken grammar": {"guided_grammar": "root ::= ("}, "no grammar": {"guided_grammar": "hello"}, "large": {"guided_json": {"enum": ["x" * 30 + str(i) for i in range(20_000)]}},
    "deep": {"guided_json": "[" * 100_000}, "repeats": {"guided_regex": "((a{1,50}){1,50}){1,50}"}, "two": {"guided_regex": "a", "guided_choice": ["a"]},
    "two formats": {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "unsupported": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "object"}}}}},
    "ignore_eos": {"guided_regex": "a", "ignore_eos": True}, "min_tokens": {"guided_regex": "a", "min_tokens": 5},
    "recursion": {"guided_json": {"$ref": "#"}}, "unknown part": {"structured_outputs": {"regex": 5}},
    "gbnf that recurs": {"guided_grammar": "root ::= root root root"}, "gbnf of marks": {"guided_grammar": "root ::= " + "(" * 4000},
    "intersections": {"guided_json": {"allOf": [{"type": "string", "pattern": f"(.*{c}){{40}}"} for c in "abcdefgh"]}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_or_hostile_grammar_is_a_400_within_a_second(server: Live, name: str) -> None:
    server.post(CHAT, {"messages": ASK, "guided_choice": ["H"], "max_tokens": 1})
    before = time.thread_time(), time.monotonic()
    answer = server.post(CHAT, {"messages": ASK, **HOSTILE[name]})
    took_s = time.monotonic() - before[1]
    assert answer.status_code == 400 and answer.json()["error"]["param"], answer.text
    assert took_s < 3 and len(answer.text) < 2000
    assert server.post(CHAT, {"messages": ASK}).status_code == 200


def test_other_streams_go_on_while_a_grammar_compiles(server: Live) -> None:
    server.script.n_tokens = 3
    with server.client() as client, client.stream("POST", CHAT, json={"messages": ASK, "stream": True}) as answer:
        parts = answer.iter_raw()
        next(parts)
        assert server.post(CHAT, {"messages": ASK, "guided_regex": "(" * 300 + "a" + ")*" * 300}).status_code == 400
        server.script.n_tokens = 1 << 30
        assert b"[DONE]" in b"".join(parts)


def test_answer_that_leaves_the_grammar_ends_in_an_error_not_in_broken_json(server: Live) -> None:
    server.say("Hello")
    answer = server.post(CHAT, {"messages": ASK, "guided_choice": ["red"]})
    assert answer.status_code == 500 and "grammar" in answer.json()["error"]["message"]


def test_client_that_leaves_aborts_a_held_answer(drawing: Live) -> None:
    drawing.script.n_tokens = 2
    with drawing.client() as client, client.stream("POST", CHAT, json={"messages": ASK, "stream": True, "guided_regex": "[a-z]{50}"}) as answer:
        next(answer.iter_raw())
    assert drawing.engine.wait_for(lambda: bool(drawing.engine.aborted))


def test_anthropics_forced_tools_and_formats(_caller: Live) -> None:
    anthropic = pytest.importorskip("anthropic")
    tools = [{"name": n, "input_schema": LOOK} for n in ("look", "touch")]
    with anthropic.Anthropic(base_url=_caller.url, api_key=KEY, max_retries=0, timeout=20) as client:
        for choice, names in (({"type": "any", "disable_parallel_tool_use": True}, {"look", "touch"}), ({"type": "tool", "name": "touch"}, {"touch"})):
            answer = client.messages.create(model=MODEL, max_tokens=2000, messages=ASK, tools=tools, tool_choice=choice)
            assert answer.stop_reason == "tool_use" and {b.name for b in answer.content} <= names
            for block in answer.content:
                jsonschema.validate(block.input, LOOK)
        with client.messages.stream(model=MODEL, max_tokens=2000, messages=ASK, tools=tools, tool_choice={"type": "tool", "name": "look"}) as stream:
            final = stream.get_final_message()
        jsonschema.validate(final.content[0].input, LOOK)
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(model=MODEL, max_tokens=20, messages=ASK, tools=tools, tool_choice={"type": "tool", "name": "nothing"})
    body = {"max_tokens": 2000, "messages": ASK, "output_config": {"format": {"type": "json_schema", "schema": LOOK}}}
    answer = _caller.post("/v1/messages", body).json()
    jsonschema.validate(json.loads(answer["content"][0]["text"]), LOOK)
    assert _caller.post("/v1/messages", {**body, "output_config": {"format": {"type": "yaml"}}}).status_code == 400


def test_strict_tools_hold_the_calls_that_the_model_begins_by_itself(_caller: Live) -> None:
    strict = [{"type": "function", "function": {**f["function"], "strict": True}} for f in FUNCTIONS]
    draw = _caller.script.draw
    pieces = {piece: i for i, piece in enumerate(_caller.tokenizer.pieces)}
    mark = pieces[b"<tool_call>"]
    begun = 0

    def eager(mask: bytes) -> int:
        nonlocal begun
        if mask[mark >> 3] >> (mark & 7) & 1 and begun < 2:
            begun += 1
            return mark
        return draw(mask)

    _caller.script.draw = eager
    try:
        for is_parallel, most in ((True, 2), (False, 1)):
            begun = 0
            found = chat(_caller, tools=strict, parallel_tool_calls=is_parallel, max_tokens=600)
            calls = found["message"].get("tool_calls", [])
            assert 1 <= len(calls) <= most, found
            for call in calls:
                if found["finish_reason"] == "tool_calls":
                    jsonschema.validate(json.loads(call["function"]["arguments"]), LOOK)
    finally:
        _caller.script.draw = draw
