"""Structured output of a real small model through the whole runner: every finished answer validates, and costs little."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jsonschema
import pytest
from paddock_runner.manifest import pack_folders

from tests.conformance.random_schemas import schema
from tests.conformance.test_runner_process import running

pytest.importorskip("llguidance")
pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(not any((f / "libpaddock_cpu.so").exists() for f in pack_folders()), reason="the CPU pack is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="the runner is a Linux program"),
]
N_SCHEMAS, N_SCHEMAS_FULL, N_AT_ONCE = 48, 1000, 16


@pytest.fixture(scope="module")
def client(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("structured")
    model = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    flags = ("--max-batch", str(N_AT_ONCE), "--max-ctx", "1024", "--no-auth", "--threads", "2")
    with running(folder, model, *flags) as found, httpx.Client(base_url=found.url, timeout=300) as client:
        yield client


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", [N_SCHEMAS, pytest.param(N_SCHEMAS_FULL, marks=pytest.mark.slow)])
def test_every_finished_answer_of_a_real_model_validates(client: httpx.Client, n: int) -> None:
    rng = random.Random(n)

    def one(wanted: dict) -> str:
        wants = {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted, "strict": True}}
        ask = [{"role": "user", "content": "Answer in JSON about a small town."}]
        answer = client.post("/v1/chat/completions", json={"messages": ask, "max_tokens": 160, "response_format": wants, "seed": 3})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), wanted)
        return str(choice["finish_reason"])

    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        ends = list(pool.map(one, [schema(rng) for _ in range(n)]))
    assert ends.count("stop") > n * 0.7, ends


def test_streamed_held_answer_equals_the_whole_one(client: httpx.Client) -> None:
    body = {"prompt": "Colours: ", "guided_regex": "(red|green|blue)(, (red|green|blue)){3}", "temperature": 0, "max_tokens": 60}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    parts = []
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                parts.append(json.loads(line[6:])["choices"][0]["text"])
    assert whole["finish_reason"] == "stop" and "".join(parts) == whole["text"] and whole["text"].count(",") == 3


def test_a_prompts_log_probabilities_are_those_of_its_tokens_as_they_were_drawn(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": "The capital of France is the city of"}).json()["tokens"]
    drawn = client.post("/v1/completions", json={"prompt": ids, "max_tokens": 40, "temperature": 0, "logprobs": 2, "ignore_eos": True}).json()["choices"][0]
    text = client.post("/tokenize", json={"prompt": drawn["text"], "add_special_tokens": False}).json()["tokens"]
    assert len(text) == 40, "the answer is not tokenized as it was drawn"
    whole = {"prompt": [*ids, *text], "echo": True, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 0}
    rated = client.post("/v1/completions", json=whole).json()
    (choice,) = rated["choices"]
    found = choice["logprobs"]
    assert choice["text"].endswith(drawn["text"]) and rated["usage"]["completion_tokens"] == 0 and found["token_logprobs"][0] is None
    assert len(found["tokens"]) == len(ids) + 40 == len(choice["prompt_logprobs"]) and found["tokens"][len(ids) :] == drawn["logprobs"]["tokens"]
    wanted = drawn["logprobs"]["token_logprobs"]
    assert max(abs(a - b) for a, b in zip(found["token_logprobs"][len(ids) :], wanted, strict=True)) < 0.02
    best = [next(iter(top)) for top in found["top_logprobs"][len(ids) :]]
    assert best == found["tokens"][len(ids) :], "the greedy tokens are the best ones"
    assert all(str(t) in entry and entry[str(t)]["rank"] == 1 for t, entry in zip(text, choice["prompt_logprobs"][len(ids) :], strict=True))
    chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0, "max_tokens": 2, "n": 2}).json()
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and len(chat["choices"]) == 2
    assert client.post("/v1/completions", json=whole).json()["choices"][0]["logprobs"] == found


def test_held_and_free_answers_run_side_by_side(client: httpx.Client) -> None:
    def one(i: int) -> str:
        wants = {"guided_choice": ["alpha beta gamma", "delta epsilon"]} if i % 2 else {}
        answer = client.post("/v1/completions", json={"prompt": f"{i} Once upon a time", "max_tokens": 24, "seed": i, **wants}).json()["choices"][0]
        return str(answer["text"])

    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        texts = list(pool.map(one, range(24)))
    assert all(text in ("alpha beta gamma", "delta epsilon") for text in texts[1::2]) and all(texts[::2])
