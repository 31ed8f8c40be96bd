"""Ollama's API as tools that only know it use it: lines of JSON, whole answers, formats, tools and its error shape."""

from __future__ import annotations

import json
import threading
from typing import Any

import ollama
import pytest
from paddock_runner.wire.messages import SAMPLING, ErrorCode

from tests.conformance.live import KEY, MODEL, Live

ASK = [{"role": "user", "content": "Hi"}]
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}


def lines(server: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = server.post(path, {"model": MODEL, **body})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.text
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert all(not line["done"] for line in found[:-1]) and found[-1]["done"] and {line["model"] for line in found} == {MODEL}
    return found


def test_chat_streams_lines_and_equals_the_whole_answer(server: Live) -> None:
    found = lines(server, "/api/chat", messages=ASK)
    assert "".join(line["message"]["content"] for line in found) == "Hello there, general." and len(found) > 1
    last = found[-1]
    whole = server.post("/api/chat", {"model": MODEL + ":latest", "messages": ASK, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello there, general."} and whole["done_reason"] == "stop"
    for name in ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"):
        assert isinstance(last[name], int) and last[name] >= 0 and isinstance(whole[name], int)
    assert last["eval_count"] == whole["eval_count"] > 3


def test_generate_streams_lines_raw_and_templated(server: Live) -> None:
    found = lines(server, "/api/generate", prompt="the", system="S")
    assert "".join(line["response"] for line in found) == "Hello there, general."
    templated = bytes(server.engine.asked[-1].prompt)
    lines(server, "/api/generate", prompt="the", raw=True)
    raw = bytes(server.engine.asked[-1].prompt)
    assert len(raw) == 4 * len(server.tokenizer.encode("the")) < len(templated)


def test_options_reach_the_engine_and_those_of_loading_are_named(server: Live) -> None:
    options = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "seed": 5, "num_predict": 3, "repeat_penalty": 1.25, "num_ctx": 2048, "stop": ["zz"]}
    answer = server.post("/api/chat", {"messages": ASK, "stream": False, "options": options})
    assert answer.json()["done_reason"] == "length" and answer.headers["x-paddock-ignored-fields"] == "options.num_ctx"
    fields = SAMPLING.unpack(server.engine.asked[-1].sampling)
    assert (fields[0], fields[1], fields[4], fields[7], fields[8]) == (0.25, 0.5, 1.25, 7, 5) and server.engine.asked[-1].max_tokens == 3


def test_thinking_and_calls_have_their_own_fields(thinking: Live, tools: Live) -> None:
    thinking.say("<think>", "Let me see", "</think>", "Yes.")
    found = lines(thinking, "/api/chat", messages=ASK, think=True)
    assert "".join(line["message"].get("thinking", "") for line in found) == "Let me see"
    assert "".join(line["message"]["content"] for line in found) == "Yes."
    tools.say('<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>')
    wanted = [{"function": {"name": "look", "arguments": {"at": "x"}}}]
    found = lines(tools, "/api/chat", messages=ASK, tools=[LOOK])
    assert [line["message"]["tool_calls"] for line in found if "tool_calls" in line["message"]] == [wanted]
    whole = tools.post("/api/chat", {"messages": ASK, "tools": [LOOK], "stream": False}).json()
    assert whole["message"]["tool_calls"] == wanted
    history = [*ASK, {"role": "assistant", "content": "", "tool_calls": wanted}, {"role": "tool", "content": "seen", "tool_name": "look"}]
    tools.say("Done.")
    assert tools.post("/api/chat", {"messages": history, "tools": [LOOK], "stream": False}).json()["message"]["content"] == "Done."


def test_format_holds_the_answer_to_a_schema(server: Live) -> None:
    pytest.importorskip("llguidance")
    server.say('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(server.post("/api/chat", {"messages": ASK, "format": schema, "stream": False}).json()["message"]["content"]) == {"a": 1}
    assert json.loads(server.post("/api/generate", {"prompt": "x", "format": "json", "stream": False}).json()["response"]) == {"a": 1}
    assert server.post("/api/chat", {"messages": ASK, "format": {"type": "martian"}}).status_code == 400


def test_models_are_listed_and_shown(server: Live) -> None:
    with server.client() as client:
        (entry,) = client.get("/api/tags").json()["models"]
        assert entry["name"] == entry["model"] == MODEL and entry["digest"] and entry["modified_at"] and "details" in entry
        assert client.get("/api/ps").json()["models"][0]["name"] == MODEL and client.get("/api/version").json()["version"]
    shown = server.post("/api/show", {"model": MODEL}).json()
    assert "completion" in shown["capabilities"] and shown["template"] and shown["details"]["format"]
    assert server.post("/api/show", {"name": MODEL + ":latest"}).status_code == 200
    assert json.loads(server.post("/api/pull", {"model": MODEL}).text)["status"] == "success"


def test_empty_request_says_that_the_model_is_loaded(server: Live) -> None:
    assert server.post("/api/chat", {"model": MODEL, "messages": []}).json()["done_reason"] == "load"
    assert server.post("/api/generate", {"model": MODEL}).json()["done_reason"] == "load"


@pytest.mark.parametrize(
    "path, change, status",
    [
        ("/api/chat", {"model": "other"}, 404), ("/api/show", {"model": "other"}, 404), ("/api/chat", {"messages": [{"role": "king"}]}, 400),
        ("/api/chat", {"format": "xml"}, 400), ("/api/chat", {"options": {"temperature": "hot"}}, 400), ("/api/generate", {"prompt": "x", "images": ["a"]}, 400),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400), ("/api/generate", {"prompt": "x", "template": "y"}, 400), ("/api/nothing", {}, 404),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, 400),
    ],
)  # fmt: skip
def test_wrong_request_is_a_4xx_in_ollamas_shape(server: Live, path: str, change: dict[str, Any], status: int) -> None:
    answer = server.post(path, {"messages": ASK, **change})
    assert answer.status_code == status and isinstance(answer.json()["error"], str) and answer.json()["error"]


def test_failure_in_a_stream_is_its_last_line(server: Live) -> None:
    server.script.n_tokens = 2

    with server.client() as client, client.stream("POST", "/api/chat", json={"messages": ASK}) as answer:
        raw = b""
        for part in answer.iter_raw():
            raw += part
            server.script.error, server.script.n_tokens = ErrorCode.NAN, 1 << 30
    assert "NaN" in json.loads(raw.strip().split(b"\n")[-1])["error"]


def test_every_line_of_a_stream_that_had_to_wait_is_json(server: Live) -> None:
    server.script.starts = False
    with server.client() as client, client.stream("POST", "/api/chat", json={"messages": ASK}) as answer:
        raw = b""
        for part in answer.iter_raw():
            raw += part
            server.script.starts = True
    assert raw.startswith(b" ") and all(json.loads(line)["model"] == MODEL for line in raw.splitlines())


def test_ollamas_own_client_reads_everything(server: Live) -> None:
    with ollama.Client(host=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        assert [m.model for m in client.list().models] == [m.model for m in client.ps().models] == [MODEL]
        assert client.show(MODEL).capabilities and client.show(MODEL).details is not None
        assert client.chat(MODEL, messages=ASK).message.content == client.generate(MODEL, prompt="Hi").response == "Hello there, general."
        server.script.starts = False
        threading.Timer(0.4, lambda: setattr(server.script, "starts", True)).start()
        parts = list(client.chat(MODEL, messages=ASK, stream=True))
        assert "".join(part.message.content or "" for part in parts) == "Hello there, general." and parts[-1].done and parts[-1].eval_count
        with pytest.raises(ollama.ResponseError, match="is not served here") as caught:
            client.chat("nobody", messages=ASK)
    assert caught.value.status_code == 404


def test_client_that_leaves_aborts_the_answer(server: Live) -> None:
    server.script.n_tokens = 2
    with server.client() as client, client.stream("POST", "/api/chat", json={"messages": ASK}) as answer:
        next(answer.iter_raw())
    assert server.engine.wait_for(lambda: bool(server.engine.aborted))


@pytest.mark.parametrize("path, more", [("/api/chat", {"messages": ASK}), ("/api/generate", {"prompt": "the"})])
def test_log_probabilities_are_told_with_each_token_streamed_or_not(server: Live, path: str, more: dict[str, Any]) -> None:
    whole = server.post(path, {"model": MODEL, **more, "stream": False, "logprobs": True, "top_logprobs": 2}).json()
    streamed = [entry for line in lines(server, path, logprobs=True, top_logprobs=2, **more) for entry in line.get("logprobs", ())]
    assert [e["token"] for e in streamed] == [e["token"] for e in whole["logprobs"]] and "".join(e["token"] for e in streamed) == "Hello there, general."
    assert all(set(e) == {"token", "logprob", "bytes", "top_logprobs"} and len(e["top_logprobs"]) == 2 for e in streamed)
    assert "logprobs" not in server.post(path, {"model": MODEL, **more, "stream": False}).json()
    assert server.post(path, {"model": MODEL, **more, "top_logprobs": 2}).status_code == 400
