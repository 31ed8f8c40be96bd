"""The real openai client against a live server: what it sends is understood, what it gets it can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from paddock_runner.wire.messages import ErrorCode, Refused, RefusedCode

from tests.conformance.live import KEY, MODEL, Live

ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=10) as found:
        yield found


def test_chat_answers_with_content_usage_and_finish_reason(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK)
    assert answer.choices[0].message.content == "Hello there, general."
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_begins_with_the_role_and_ends_with_a_finish_reason(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=ASK, stream=True))
    assert len({c.id for c in chunks}) == 1 and {c.object for c in chunks} == {"chat.completion.chunk"}
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert all(c.choices[0].delta.role is None and c.choices[0].delta.content for c in middle)
    assert "".join(c.choices[0].delta.content for c in middle) == "Hello there, general."
    assert last.choices[0].finish_reason == "stop" and last.choices[0].delta.content is None
    assert all(c.usage is None for c in chunks), "usage only where it was asked for"


def test_usage_chunk_comes_last_with_no_choices_when_asked_for(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 3
    assert all(c.choices and c.usage is None for c in chunks[:-1])


def test_stream_helper_gives_the_whole_completion(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "Hello there, general."


def test_second_request_of_the_same_prompt_reports_cached_tokens(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=ASK)
    again = client.chat.completions.create(model=MODEL, messages=ASK)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


def test_n_gives_that_many_choices_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASK, n=3)
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert {c.message.content for c in whole.choices} == {"Hello there, general."}
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model=MODEL, messages=ASK, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hello there, general."] * 3


def test_seeded_choices_have_seeds_of_their_own(server: Live, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=ASK, n=2, seed=7)
    client.chat.completions.create(model=MODEL, messages=ASK, seed=-1)
    from paddock_runner.wire.messages import SAMPLING

    seeds = [SAMPLING.unpack(ask.sampling)[8] for ask in server.engine.asked]
    assert seeds == [7, 8, (1 << 64) - 1]


def test_every_sampling_field_reaches_the_engine(server: Live, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0.5, top_p=0.25, presence_penalty=1.5, frequency_penalty=-0.5, max_completion_tokens=9,
        logit_bias={"7": -100, "8": 5}, seed=3, logprobs=True, top_logprobs=2,
        extra_body={"top_k": 5, "min_p": 0.125, "typical_p": 0.75, "repetition_penalty": 1.25, "min_tokens": 2, "stop_token_ids": [9], "priority": 3},
    )  # fmt: skip
    from paddock_runner.wire.messages import BIAS, SAMPLING

    (ask,) = server.engine.asked
    fields = SAMPLING.unpack(ask.sampling)
    assert fields[:9] == (0.5, 0.25, 0.125, 0.75, 1.25, -0.5, 1.5, 5, 3)
    assert fields[12] == 2 and list(BIAS.iter_unpack(ask.bias)) == [(7, -100.0), (8, 5.0)]
    assert fields[16 : 16 + fields[15]] == (9, *server.tokenizer.stop_ids)
    assert (ask.max_tokens, ask.min_tokens, ask.priority) == (9, 2, 3)


def test_ignore_eos_leaves_the_models_stop_tokens_out(server: Live, client: openai.OpenAI) -> None:
    server.say("abc", ends=True)
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=10, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 10 and answer.choices[0].finish_reason == "length"


def test_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=2)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2


def test_chat_logprobs_have_an_entry_per_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert "".join(e.token for e in entries) == "Hello there, general."
    assert all(len(e.top_logprobs) == 3 and e.logprob == -0.5 and bytes(e.bytes).decode() == e.token for e in entries)
    streamed = []
    for chunk in client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [e.token for e in streamed] == [e.token for e in entries]
    assert all(e.top_logprobs == [] for e in streamed)


def test_completion_takes_text_lists_and_token_ids(server: Live, client: openai.OpenAI) -> None:
    ids = server.tokenizer.encode("the thing", add_special=False).tolist()
    for prompt in ("the thing", ["the thing"], ids, [ids]):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=100)
        assert answer.choices[0].text == "Hello there, general." and answer.usage.prompt_tokens == len(ids)
    both = client.completions.create(model=MODEL, prompt=["the", "thing"], n=2, max_tokens=100)
    assert [c.index for c in both.choices] == [0, 1, 2, 3] and both.usage.prompt_tokens == sum(len(server.tokenizer.encode(t, False)) for t in ("the", "thing"))


def test_completion_defaults_to_sixteen_tokens(server: Live, client: openai.OpenAI) -> None:
    server.say("abc" * 20)
    assert client.completions.create(model=MODEL, prompt="x").usage.completion_tokens == 16


def test_completion_echo_puts_the_prompt_first(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="the ", echo=True, max_tokens=100)
    assert answer.choices[0].text == "the Hello there, general."
    streamed = client.completions.create(model=MODEL, prompt="the ", echo=True, max_tokens=100, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == "the Hello there, general."
    nothing = client.completions.create(model=MODEL, prompt="the ", echo=True, max_tokens=0)
    assert nothing.choices[0].text == "the " and nothing.usage.completion_tokens == 0


def test_echo_with_logprobs_rates_the_prompt_too(server: Live) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        answer = client.completions.create(model=MODEL, prompt=["the thing", "ab"], echo=True, logprobs=1, max_tokens=2, n=2, extra_body={"prompt_logprobs": 2})
    for choice, text in zip(answer.choices, ["the thing", "the thing", "ab", "ab"], strict=True):
        ids = server.tokenizer.encode(text)
        probs = choice.logprobs
        assert choice.text.startswith(text) and probs is not None and "".join(probs.tokens or ()) == choice.text
        assert probs.token_logprobs is not None and probs.token_logprobs[: len(ids)] == [None, *(-0.25 * i for i in range(1, len(ids)))]
        assert probs.text_offset is not None and choice.text[probs.text_offset[len(ids)] :] == "".join((probs.tokens or [])[len(ids) :])
        assert all(top is None or len(top) <= 1 for top in probs.top_logprobs or ())
        listed = choice.prompt_logprobs  # type: ignore[attr-defined]
        assert listed[0] is None and [str(i) in entry for i, entry in zip(ids[1:], listed[1:], strict=True)] == [True] * (len(ids) - 1)


@pytest.mark.parametrize("more", [{"logprobs": 1, "echo": True}, {"echo": True, "extra_body": {"prompt_logprobs": 0}}, {"logprobs": 2, "extra_body": {"prompt_logprobs": 1}}])
def test_streamed_ratings_of_prompts_are_those_of_whole_answers(server: Live, more: dict[str, Any]) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": ["the thing", "a"], "max_tokens": 3, "n": 2, **more}
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        whole = client.completions.create(**ask)
        chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert all(c.usage is None for c in chunks[:-1]) and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert "".join(c.text for c in mine) == choice.text and mine[-1].finish_reason == choice.finish_reason
        rated = [c.prompt_logprobs for c in mine if "prompt_logprobs" in (c.model_extra or {})]  # type: ignore[attr-defined]
        assert rated == ([choice.prompt_logprobs] if "extra_body" in more else [])  # type: ignore[attr-defined]
        if choice.logprobs is not None:
            for name in ("tokens", "token_logprobs", "text_offset"):
                parts = [getattr(c.logprobs, name) for c in mine if c.logprobs is not None]
                assert [x for part in parts for x in part] == getattr(choice.logprobs, name)


def test_streamed_chat_tells_how_its_prompt_was_rated_before_any_text(server: Live) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "n": 2, "extra_body": {"prompt_logprobs": 1}}
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        whole = client.chat.completions.create(**ask)
        chunks = list(client.chat.completions.create(**ask, stream=True))
    rated = [(i, c.prompt_logprobs) for i, c in enumerate(chunks) if "prompt_logprobs" in (c.model_extra or {})]  # type: ignore[attr-defined]
    assert [found for _, found in rated] == [whole.prompt_logprobs]  # type: ignore[attr-defined]
    said = [i for i, c in enumerate(chunks) if c.choices[0].index == 0 and c.choices[0].delta.content]
    assert said and rated[0][0] < said[0] and all(len(c.choices) == 1 for c in chunks)


def test_completion_logprobs_have_offsets_into_the_text(client: openai.OpenAI) -> None:
    choice = client.completions.create(model=MODEL, prompt="x", logprobs=2, max_tokens=100).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text and all(len(t) == 2 for t in found.top_logprobs)
    assert all(choice.text[at:].startswith(token) for at, token in zip(found.text_offset, found.tokens, strict=True))


def test_models_are_listed_with_their_context(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and model.max_model_len == model.context_length == 4096
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_prompt_over_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[1] * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert "4096" in str(caught.value) and "5000" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[1] * 4000, max_tokens=97)
    assert "4097" in str(caught.value)


def test_full_queue_is_retried_after_the_time_that_the_server_names(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", lambda s: (naps.append(s), setattr(server.script, "refusal", None)))
    server.script.refusal = Refused(0, RefusedCode.QUEUE_FULL, 250, 5, 4)
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=2) as client:
        assert client.chat.completions.create(model=MODEL, messages=ASK).choices[0].message.content
    assert 0.25 in naps
    server.script.refusal = Refused(0, RefusedCode.QUEUE_FULL, 250, 5, 4)
    raw = server.post("/v1/chat/completions", {"messages": ASK, "stream": True})
    assert raw.status_code == 429 and raw.headers["retry-after-ms"] == "250" and raw.headers["retry-after"] == "1"


def test_error_in_mid_stream_reaches_the_client_as_an_error(server: Live, client: openai.OpenAI) -> None:
    server.script.n_tokens = 2
    stream = client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
    next(stream)
    next(stream)
    server.script.error, server.script.n_tokens = ErrorCode.NAN, 100
    with pytest.raises(openai.APIError, match="NaN"):
        list(stream)


def test_wrong_key_and_missing_key_are_401(server: Live) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert httpx.get(server.url + "/v1/models").status_code == 401
    assert httpx.get(server.url + "/v1/models", headers={"x-api-key": KEY}).status_code == 200
    assert httpx.get(server.url + "/health").status_code == 200


async def _async_answers(server: Live) -> list[str]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
        return [c.choices[0].delta.content or "" async for c in stream]


def test_async_client_streams_too(server: Live) -> None:
    import asyncio

    assert "".join(asyncio.run(_async_answers(server))) == "Hello there, general."
