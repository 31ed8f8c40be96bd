"""OpenAI's Responses API: the real client, and a strict reader of the event stream as Codex consumes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from paddock_runner.front.stored import Entry, Stored
from paddock_runner.wire.messages import ErrorCode, Refused, RefusedCode

from tests.conformance.live import KEY, MODEL, Live
from tests.conformance.response_checker import check, frames

PATH = "/v1/responses"
LOOK = {"type": "function", "name": "look", "description": "Looks", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=10) as found:
        yield found


def stream(server: Live, **body: Any) -> dict[str, Any]:
    """A streamed response, held to every rule."""
    answer = server.post(PATH, {"model": MODEL, "input": "Hi", "stream": True, **body})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return check(answer.content)


def prompt_of(server: Live) -> str:
    return server.tokenizer.decode(memoryview(server.engine.asked[-1].prompt).cast("i"), skip_special=False)


def test_whole_response_has_text_usage_and_status(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hi", instructions="Be brief.")
    assert answer.output_text == "Hello there, general." and answer.status == "completed" and answer.object == "response"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.instructions == "Be brief." and answer.error is None and answer.incomplete_details is None


def test_stream_helper_of_the_client_gives_the_whole_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hi") as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == "Hello there, general."


def test_stream_obeys_the_state_machine_and_equals_the_whole_answer(server: Live) -> None:
    streamed = stream(server)
    whole = server.post(PATH, {"model": MODEL, "input": "Hi"}).json()
    assert streamed["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"] == "Hello there, general."
    assert [i["type"] for i in streamed["output"]] == ["message"] and set(streamed) == set(whole)


def test_length_makes_an_incomplete_response_streamed_and_whole(server: Live) -> None:
    for final in (stream(server, max_output_tokens=2), server.post(PATH, {"input": "Hi", "max_output_tokens": 2}).json()):
        assert final["status"] == "incomplete" and final["incomplete_details"] == {"reason": "max_output_tokens"}
        assert final["output"][0]["status"] == "incomplete"


def test_reasoning_is_an_item_of_its_own_and_comes_back_into_the_prompt(thinking: Live) -> None:
    thinking.say("<think>", "Let me see", "</think>", "\n\nYes.")
    final = stream(thinking, include=["reasoning.encrypted_content"])
    reasoning, message = final["output"]
    assert reasoning["type"] == "reasoning" and reasoning["content"][0]["text"] == "Let me see" and reasoning["summary"] == []
    assert message["content"][0]["text"] == "Yes."
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    sent = {k: v for k, v in reasoning.items() if k in ("type", "id", "summary", "encrypted_content")}
    answer = thinking.post(PATH, {"input": [{"role": "user", "content": "a"}, sent, message, {"role": "user", "content": "b"}], "store": False})
    assert answer.status_code == 200
    broken = {**sent, "encrypted_content": "paddock1:***"}
    assert thinking.post(PATH, {"input": [broken]}).status_code == 400


def test_function_calls_have_stable_ids_and_their_outputs_go_back(tools: Live) -> None:
    tools.say("Looking.\n", CALL, "\n", CALL)
    final = stream(tools, tools=[LOOK])
    kinds = [i["type"] for i in final["output"]]
    assert kinds == ["message", "function_call", "function_call"], final["output"]
    first, second = final["output"][1:]
    assert json.loads(first["arguments"]) == {"at": "x"} and first["name"] == "look" and first["call_id"] != second["call_id"]
    tools.say("Done.")
    history = [{"role": "user", "content": "Hi"}, *final["output"], *({"type": "function_call_output", "call_id": c["call_id"], "output": "seen"} for c in (first, second))]
    again = stream(tools, input=history, tools=[LOOK])
    assert again["output"][0]["content"][0]["text"] == "Done."
    prompt = prompt_of(tools)
    assert prompt.count("seen") == 2 and prompt.count('"at": "x"') == 2 and "Looking." in prompt


def test_custom_tool_gets_its_input_as_plain_text(tools: Live) -> None:
    tools.say('<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+é"}}\n</tool_call>')
    final = stream(tools, tools=[PATCH])
    (call,) = final["output"]
    assert call["type"] == "custom_tool_call" and call["input"] == "*** Begin\n+é" and call["name"] == "apply_patch"
    tools.say("ok")
    stream(tools, input=[{"role": "user", "content": "go"}, call, {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "patched"}], tools=[PATCH])
    assert "patched" in prompt_of(tools) and "must match this lark grammar" in prompt_of(tools)


def test_call_cut_off_by_length_is_incomplete(tools: Live) -> None:
    tools.say('<tool_call>\n{"name": "look", "arguments": {"at": "', "xxxxxxxxxxxxxxxxxxxxxxxx", ends=False)
    n = len(tools.answer)
    final = stream(tools, tools=[LOOK], max_output_tokens=n - 4)
    assert final["status"] == "incomplete" and final["output"][-1]["status"] == "incomplete"


def test_tools_of_a_namespace_are_called_by_both_names(tools: Live) -> None:
    tools.say(CALL.replace("look", "eyes__look"))
    final = stream(tools, tools=[{"type": "namespace", "name": "eyes", "description": "", "tools": [LOOK]}])
    assert final["output"][0]["name"] == "look" and final["output"][0]["namespace"] == "eyes"


def test_tools_that_only_openai_runs_are_named_in_a_header(tools: Live) -> None:
    answer = tools.post(PATH, {"input": "Hi", "tools": [{"type": "web_search"}, LOOK, {"type": "local_shell"}]})
    assert answer.status_code == 200 and answer.headers["x-paddock-ignored-fields"] == "tools.0,tools.2"


def test_previous_response_carries_the_conversation_on(server: Live, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="My name is Ada.", instructions="one")
    second = client.responses.create(model=MODEL, input="Who am I?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    prompt = prompt_of(server)
    assert "My name is Ada." in prompt and "Hello there, general." in prompt and prompt.index("Ada") < prompt.index("Who am I?")
    assert "one" not in prompt, "instructions are not carried over"
    third = client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "x"}])
    assert third.output_text


def test_stored_responses_can_be_read_and_deleted_and_others_are_404(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hi")
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert [i.type for i in client.responses.input_items.list(made.id).data] == ["message"]
    client.responses.delete(made.id)
    for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            act(made.id)
    unstored = client.responses.create(model=MODEL, input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hi", previous_response_id=unstored.id)
    assert refused.value.param == "previous_response_id"


def test_store_is_bounded_by_number_and_bytes_and_keeps_clients_apart() -> None:
    stored = Stored(3, 100)
    for i in range(5):
        stored.put(f"r{i}", Entry(1, {"output": []}, (), 0, 10))
    assert len(stored) == 3 and stored.used_bytes == 30 and stored.get("r1", 1) is None and stored.get("r4", 1) is not None
    assert stored.get("r4", 2) is None
    stored.put("big", Entry(1, {"output": []}, (), 0, 90))
    assert stored.used_bytes <= 100 and stored.get("big", 1) is not None
    stored.put("huge", Entry(1, {"output": []}, (), 0, 101))
    assert stored.get("huge", 1) is None and stored.get("big", 1) is not None


def test_stored_response_is_not_streamed_and_says_so(client: openai.OpenAI) -> None:
    """The SDK would read no event from JSON, and tell of nothing."""
    made = client.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError, match="not streamed"):
        list(client.responses.retrieve(made.id, stream=True))
    assert client.responses.retrieve(made.id).id == made.id


def test_items_of_a_conversation_are_counted_once_and_as_long_as_a_response_holds_them() -> None:
    items = [{"content": "x" * 1000} for _ in range(10)]
    whole = len(json.dumps(items[0], separators=(",", ":")))
    stored = Stored(3, 100 * whole)
    for i in range(10):
        stored.put(f"r{i}", Entry(1, {"output": []}, tuple(items[: i + 1]), i, 5))
    assert stored.used_bytes == 10 * whole + 15, "the last three are kept, and the last holds all items"
    stored.drop("r9")
    assert stored.used_bytes == 9 * whole + 10
    stored.put("other", Entry(1, {"output": []}, tuple({"content": "y" * 1000} for _ in range(95)), 0, 5))
    assert len(stored) == 1 and stored.used_bytes == 95 * whole + 5
    stored.drop("other")
    assert stored.used_bytes == 0


@pytest.mark.parametrize(
    "change, param",
    [
        ({"background": True}, "background"), ({"conversation": "c"}, "conversation"), ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"), ({"input": []}, "input"), ({"truncation": "x"}, "truncation"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"), ({"input": [{"type": "martian"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"), ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"), ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": [{"type": "function"}]}, "tools[0].name"), ({"top_logprobs": 99}, "top_logprobs"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
    ],
)  # fmt: skip
def test_wrong_field_is_a_400_that_names_it(server: Live, change: dict[str, Any], param: str) -> None:
    answer = server.post(PATH, {"model": MODEL, "input": "Hi", **change})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert not server.engine.asked


def test_failure_after_the_beginning_is_a_failed_response(server: Live) -> None:
    server.script.error = ErrorCode.NAN
    answer = server.post(PATH, {"input": "Hi", "stream": True})
    final = check(answer.content)
    assert final["status"] == "failed" and final["error"]["code"] == "server_error" and "NaN" in final["error"]["message"]
    assert server.post(PATH, {"input": "Hi"}).status_code == 500


def test_full_queue_is_a_429_before_the_beginning(server: Live) -> None:
    server.script.refusal = Refused(0, RefusedCode.QUEUE_FULL, 250, 9, 8)
    answer = server.post(PATH, {"input": "Hi", "stream": True})
    assert answer.status_code == 429 and answer.headers["retry-after-ms"] == "250"


def test_waiting_request_gets_events_that_reset_a_clients_timer(server: Live) -> None:
    server.script.starts = False
    raw = b""
    with server.client() as client, client.stream("POST", PATH, json={"input": "Hi", "stream": True}) as answer:
        for part in answer.iter_raw():
            raw += part
            if raw.count(b"response.in_progress") >= 2:
                server.script.starts = True
    final = check(raw)
    kinds = [kind for kind, _ in frames(raw)]
    assert kinds[:2] == ["response.created", "response.queued"] and final["status"] == "completed"


def test_structured_text_and_parsed_helper(server: Live) -> None:
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("llguidance")

    class Person(pydantic.BaseModel):
        name: str
        age: int

    server.say('{"name": "Ada", "age": 36}')
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=10) as client:
        answer = client.responses.parse(model=MODEL, input="Hi", text_format=Person)
        assert answer.output_parsed == Person(name="Ada", age=36)


def test_logprobs_come_with_the_deltas(server: Live) -> None:
    answer = server.post(PATH, {"input": "Hi", "stream": True, "top_logprobs": 2, "include": ["message.output_text.logprobs"]})
    final = check(answer.content)
    entries = final["output"][0]["content"][0]["logprobs"]
    deltas = [e for kind, body in frames(answer.content) if kind == "response.output_text.delta" for e in body["logprobs"]]
    assert entries and entries == deltas and all(len(e["top_logprobs"]) == 2 for e in entries)


def test_client_that_leaves_aborts_the_response(server: Live) -> None:
    server.script.n_tokens = 2
    with server.client() as client, client.stream("POST", PATH, json={"input": "Hi", "stream": True}) as answer:
        next(answer.iter_raw())
    assert server.engine.wait_for(lambda: bool(server.engine.aborted))


def test_answer_in_one_byte_pieces_never_breaks_a_character(server: Live) -> None:
    server.say_bytes("Grüße 🐎 漢字")
    assert stream(server)["output"][0]["content"][0]["text"] == "Grüße 🐎 漢字"


def test_async_client_streams_too(server: Live) -> None:
    import asyncio

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=httpx.Timeout(10)) as client:
            found = ""
            async for event in await client.responses.create(model=MODEL, input="Hi", stream=True):
                if event.type == "response.output_text.delta":
                    found += event.delta
            return found

    assert asyncio.run(run()) == "Hello there, general."
