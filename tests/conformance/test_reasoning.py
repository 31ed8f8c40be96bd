"""Reasoning budgets: reasoning that has had its tokens is ended, and the answer comes; in every API, streamed and whole, free and held."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.conformance.live import KEY, MAX_CTX_TOKENS, MODEL, Live

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Why?"}]
END = "\n</think>\n\n"


@pytest.fixture
def musing(thinking: Live) -> Iterator[Live]:
    """A server of a model that never ends its reasoning, and answers when it has been ended."""
    encode, decode = thinking.tokenizer.encode, thinking.tokenizer.decode
    before = thinking.script.reply

    def reply(prompt: list[int]) -> list[int]:
        if decode(prompt, skip_special=False).endswith(END):
            return [*encode("Because.", add_special=False), thinking.tokenizer.eos_id]
        return [*encode("<think>", add_special=False), *(encode("a", add_special=False) * 500)]

    thinking.script.reply = reply
    yield thinking
    thinking.script.reply = before


@pytest.mark.parametrize("asks", [{"thinking_token_budget": 7}, {"reasoning": {"max_tokens": 7}}, {"thinking_token_budget": 7, "n": 3}])
def test_reasoning_ends_after_its_budget_and_the_answer_follows(musing: Live, asks: dict[str, Any]) -> None:
    answer = musing.post(CHAT, {"messages": ASK, "max_tokens": 60, **asks})
    found = answer.json()
    assert "x-paddock-ignored-fields" not in answer.headers
    for choice in found["choices"]:
        assert choice["message"]["reasoning"] == "aaaaaaa" and choice["message"]["content"] == "Because." and choice["finish_reason"] == "stop"
    n = asks.get("n", 1)
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 7 * n
    assert found["usage"]["prompt_tokens"] == musing.post("/tokenize", {"messages": ASK}).json()["count"]
    assert musing.front.desk.n_open == 0


def test_what_follows_the_reasoning_is_the_rest_of_an_answer_and_no_new_request(musing: Live) -> None:
    """Its time in the queue is over, its prompt's tokens have been rated, and a runner that shuts down finishes it."""
    asks = {"messages": ASK, "max_tokens": 60, "thinking_token_budget": 7, "prompt_logprobs": 1}
    answer = musing.post(CHAT, asks, headers={"x-queue-timeout-ms": "60000"}).json()
    n_prompt = answer["usage"]["prompt_tokens"]
    first, rest = musing.engine.asked
    assert first.deadline_ns and first.is_scored and not first.goes_on
    assert rest.goes_on and not rest.deadline_ns and not rest.is_scored and rest.prompt_tokens > n_prompt + 7
    rated = answer["prompt_logprobs"]
    prompt = memoryview(first.prompt).cast("i").tolist()
    assert len(rated) == n_prompt and all(str(token) in entry for token, entry in zip(prompt[1:], rated[1:], strict=True))


def test_reasoning_that_ends_where_the_context_does_ends_with_length(musing: Live) -> None:
    n_prompt = musing.post("/tokenize", {"messages": ASK}).json()["count"]
    before = musing.script.reply
    tokens = musing.tokenizer.encode("<think>", add_special=False)
    musing.script.reply = lambda prompt: [*tokens, *musing.tokenizer.encode("a", add_special=False) * 8192]
    budget = MAX_CTX_TOKENS - n_prompt - len(tokens) - 2
    try:
        answer = musing.post(CHAT, {"messages": ASK, "thinking_token_budget": budget})
    finally:
        musing.script.reply = before
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["reasoning"] == "a" * budget
    assert len(musing.engine.asked) == 1, "there is no room to ask for more"


def test_streams_and_both_vendors_agree(musing: Live) -> None:
    with openai.OpenAI(base_url=musing.url + "/v1", api_key=KEY, max_retries=0) as client:
        text = thought = ""
        for chunk in client.chat.completions.create(model=MODEL, messages=ASK, stream=True, max_tokens=99, extra_body={"reasoning": {"max_tokens": 3}}):
            text += chunk.choices[0].delta.content or ""
            thought += getattr(chunk.choices[0].delta, "reasoning", None) or ""
    assert (thought, text) == ("aaa", "Because.")
    with anthropic.Anthropic(base_url=musing.url, api_key=KEY, max_retries=0) as client:
        asks = {"model": MODEL, "messages": ASK, "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 5}}
        whole = client.messages.create(**asks)
        with client.messages.stream(**asks) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [b.type for b in message.content] == ["thinking", "text"] and message.stop_reason == "end_turn"
        assert message.content[0].thinking == "aaaaa" and message.content[0].signature and message.content[1].text == "Because."
    assert whole.usage.output_tokens == streamed.usage.output_tokens


def test_an_answer_without_room_after_its_reasoning_ends_with_length(musing: Live) -> None:
    found = musing.post(CHAT, {"messages": ASK, "max_tokens": 15, "thinking_token_budget": 7}).json()
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["reasoning"] == "aaaaaaa"


def test_a_held_answer_keeps_its_budget_and_its_form(thinking: Live) -> None:
    tokenizer = thinking.tokenizer
    opening, letter = tokenizer.encode("<think>", add_special=False), tokenizer.encode("a", add_special=False)[0]
    wanted = iter(opening)

    def draw(mask: bytes) -> int:
        bits = int.from_bytes(mask, "little")
        allowed = [i for i in range(bits.bit_length()) if bits >> i & 1]
        token = next(wanted, letter)
        return token if token in allowed else next((i for i in allowed if i in tokenizer.stop_ids), allowed[0])

    thinking.script.draw = draw
    wants = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"at": 1}}}}
    found = thinking.post(CHAT, {"messages": ASK, "max_tokens": 400, "response_format": wants, "thinking_token_budget": 9}).json()
    (choice,) = found["choices"]
    assert json.loads(choice["message"]["content"]) == {"at": 1} and set(choice["message"]["reasoning"]) == {"a"}
    assert 9 <= len(choice["message"]["reasoning"]) <= 11


def test_a_budget_is_checked_and_named_where_it_has_no_effect(musing: Live, server: Live) -> None:
    bad = musing.post("/v1/messages", {"model": MODEL, "messages": ASK, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 9}})
    assert bad.status_code == 400 and "thinking.budget_tokens" in bad.json()["error"]["message"]
    answer = server.post(CHAT, {"messages": ASK, "thinking_token_budget": 9, "reasoning": {"effort": "high"}})
    assert answer.status_code == 200 and set(answer.headers["x-paddock-ignored-fields"].split(",")) == {"thinking_token_budget", "reasoning.effort"}
