"""The real anthropic client against a live server; the events' order is held to what its own clients insist on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import anthropic
import httpx
import pydantic
import pytest
from paddock_runner.wire.messages import ErrorCode

from tests.conformance.live import KEY, MODEL, Live, live

ASK = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture
def client(server: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=10) as found:
        yield found


def events_of(server: Live, body: dict) -> list[dict]:
    """The events of a stream; name and type agree, the order is legal."""
    with server.client() as client:
        answer = client.post("/v1/messages", json={"model": MODEL, "max_tokens": 1000, "messages": ASK, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    kinds = [e["type"] for e in events if e["type"] != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    open_block, n_blocks = None, 0
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == n_blocks
            open_block, n_blocks = event["index"], n_blocks + 1
        elif event["type"].startswith("content_block"):
            assert event["index"] == open_block
            if event["type"] == "content_block_stop":
                open_block = None
    assert open_block is None
    return events


def test_message_has_text_stop_reason_and_usage(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=ASK)
    assert answer.content[0].text == "Hello there, general." and answer.stop_reason == "end_turn"
    assert answer.type == "message" and answer.role == "assistant" and answer.usage.output_tokens > 3


def test_count_tokens_equals_the_usage_of_the_message(client: anthropic.Anthropic) -> None:
    for more in ({}, {"system": "Be brief."}, {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}):
        counted = client.messages.count_tokens(model=MODEL, messages=ASK, **more).input_tokens
        for _ in range(2):
            usage = client.messages.create(model=MODEL, max_tokens=9, messages=ASK, **more).usage
            assert usage.input_tokens + usage.cache_read_input_tokens == counted
        assert usage.cache_read_input_tokens == counted - 1


def test_stream_helper_gives_text_and_final_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "Hello there, general." and final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 3


def test_stop_sequence_and_max_tokens_are_told_apart(server: Live, client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(model=MODEL, max_tokens=100, messages=ASK, stop_sequences=[" there"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", " there", "Hello")
    short = client.messages.create(model=MODEL, max_tokens=2, messages=ASK)
    assert short.stop_reason == "max_tokens" and short.stop_sequence is None
    events = events_of(server, {"stop_sequences": [" there"]})
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " there"}


def test_message_start_carries_the_prompts_usage_and_delta_the_whole(server: Live) -> None:
    events_of(server, {})
    events = events_of(server, {})
    start, delta = events[0]["message"], events[-2]
    assert start["usage"]["cache_read_input_tokens"] > 0 and start["content"] == [] and start["stop_reason"] is None
    assert delta["usage"]["output_tokens"] > 3
    assert delta["usage"]["input_tokens"] == start["usage"]["input_tokens"]


def test_thinking_comes_as_a_signed_block_before_the_text(thinking: Live) -> None:
    thinking.say_bytes("<think>\nHm.\n</think>\n\nFour.")
    with anthropic.Anthropic(base_url=thinking.url, api_key=KEY) as client, client.messages.stream(model=MODEL, max_tokens=100, messages=ASK) as stream:
        final = stream.get_final_message()
    thought, text = final.content
    assert thought.type == "thinking" and thought.thinking.strip() == "Hm." and thought.signature
    assert text.type == "text" and text.text.strip() == "Four."
    thinking.say_bytes("ok")
    again = [*ASK, {"role": "assistant", "content": [block.model_dump() for block in final.content]}, *ASK]
    with anthropic.Anthropic(base_url=thinking.url, api_key=KEY) as client:
        assert client.messages.create(model=MODEL, max_tokens=9, messages=again).content[0].text == "ok"


def test_tool_use_streams_its_input_and_its_result_is_taken_back(tools: Live) -> None:
    tools.say_bytes('Looking.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    with anthropic.Anthropic(base_url=tools.url, api_key=KEY) as client:
        whole = client.messages.create(model=MODEL, max_tokens=200, messages=ASK, tools=[TOOL])
        with client.messages.stream(model=MODEL, max_tokens=200, messages=ASK, tools=[TOOL]) as stream:
            final = stream.get_final_message()
        for answer in (whole, final):
            assert answer.stop_reason == "tool_use" and [b.type for b in answer.content] == ["text", "tool_use"]
            assert answer.content[1].name == "weather" and answer.content[1].input == {"city": "Paris"}
        tools.say("It rains.")
        result = {"type": "tool_result", "tool_use_id": final.content[1].id, "content": [{"type": "text", "text": "rain"}], "is_error": False}
        history = [*ASK, {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in final.content]}, {"role": "user", "content": [result]}]
        assert client.messages.create(model=MODEL, max_tokens=50, messages=history, tools=[TOOL]).content[0].text == "It rains."
    prompt = bytes(tools.engine.asked[-1].prompt)
    text = tools.tokenizer.decode(memoryview(prompt).cast("i").tolist(), skip_special=False)
    assert '"city": "Paris"' in text and "rain" in text


def test_server_tools_without_a_schema_are_left_out_and_named(server: Live) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": ASK, "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}
    answer = server.post("/v1/messages?beta=true", body)
    assert answer.status_code == 200 and answer.headers["x-paddock-ignored-fields"] == "tools.0"


def test_prompt_too_long_says_so_in_the_words_that_agents_know(server: Live, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
        client.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "xyz " * 5000}])
    with pytest.raises(anthropic.BadRequestError, match=r"exceed context limit: \d+ \+ 4090 > 4096"):
        client.messages.create(model=MODEL, max_tokens=4090, messages=ASK)


def test_errors_have_anthropics_shape(server: Live) -> None:
    answer = server.post("/v1/messages", {"model": MODEL, "messages": ASK})
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error" and "max_tokens" in answer.json()["error"]["message"]
    bad = server.post("/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})
    assert bad.status_code == 400 and "messages.0.content.0" in bad.json()["error"]["message"]
    nobody = httpx.post(server.url + "/v1/messages", json={})
    assert nobody.status_code == 401 and nobody.json()["error"]["type"] == "authentication_error"
    other = server.post("/v1/messages", {"model": "other", "max_tokens": 5, "messages": ASK})
    assert other.status_code == 404 and other.json()["error"]["type"] == "not_found_error"


def test_error_in_mid_stream_is_an_error_event(server: Live, client: anthropic.Anthropic) -> None:
    server.script.n_tokens = 2
    with pytest.raises(anthropic.APIStatusError, match="NaN"), client.messages.stream(model=MODEL, max_tokens=100, messages=ASK) as stream:
        for n, _ in enumerate(stream.text_stream):
            if n == 0:
                server.script.error, server.script.n_tokens = ErrorCode.NAN, 100


def test_empty_answer_has_an_empty_text_block(server: Live) -> None:
    server.say("")
    events = events_of(server, {})
    assert [e["content_block"] for e in events if e["type"] == "content_block_start"] == [{"type": "text", "text": ""}]


def test_an_answer_that_the_client_began_goes_on_behind_it(server: Live, client: anthropic.Anthropic) -> None:
    server.say('"a": 1}')
    answer = client.messages.create(model=MODEL, max_tokens=50, messages=[*ASK, {"role": "assistant", "content": "{"}])
    assert answer.content[0].text == '"a": 1}'
    prompt = server.tokenizer.decode(memoryview(server.engine.asked[-1].prompt).cast("i").tolist(), skip_special=False)
    assert prompt.endswith("<|im_start|>assistant\n{")


def test_parsed_messages_are_of_the_wanted_type(server: Live, client: anthropic.Anthropic) -> None:
    pytest.importorskip("llguidance")

    class Person(pydantic.BaseModel):
        name: str
        age: int

    server.say('{"name": "Ada", "age": 36}')
    answer = client.messages.parse(model=MODEL, max_tokens=100, messages=ASK, output_format=Person)
    assert answer.parsed_output == Person(name="Ada", age=36)


def test_a_history_of_ten_thousand_messages_is_answered() -> None:
    with live(max_body_bytes=8 << 20) as server:
        server.front.served.max_ctx_tokens = 1 << 20
        history = [{"role": ("user", "assistant")[i % 2], "content": f"m{i}"} for i in range(9_999)]
        begun = time.monotonic()
        answer = server.post("/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": history}, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["input_tokens"] > 40_000, answer.text[:300]
        assert time.monotonic() - begun < 20


def test_models_are_listed_as_anthropics_client_reads_them(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL) and model.created_at.year > 2000
    assert client.models.retrieve(MODEL).created_at == model.created_at


def test_documents_of_text_are_read_and_others_are_refused_by_their_type(server: Live, client: anthropic.Anthropic) -> None:
    def ask(*blocks: dict) -> str:
        client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [*blocks]}])
        return server.tokenizer.decode(memoryview(server.engine.asked[-1].prompt).cast("i").tolist(), skip_special=False)

    plain = {"type": "text", "media_type": "text/plain", "data": "The sky is green."}
    assert "Sky\n\nThe sky is green.\n\nWhy?" in ask({"type": "document", "title": "Sky", "source": plain}, {"type": "text", "text": "Why?"})
    parts = {"type": "content", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert "one\n\ntwo" in ask({"type": "document", "source": parts})
    for source, kind in (({"type": "base64", "media_type": "application/pdf", "data": "xx"}, "base64"), ({"type": "content", "content": [{"type": "image"}]}, "content"), ({"type": "content", "content": 5}, "content")):
        with pytest.raises(anthropic.BadRequestError, match=f"this model takes documents of text, not of type '{kind}'"):
            ask({"type": "document", "source": source})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0 has no text"):
        ask({"type": "text"})
