"""Answers of a real small model that are held to a schema, with guesses and without, are the same: greedy and drawn, alone and several at once, with log-probabilities."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from paddock_runner.manifest import pack_folders

from tests.conformance.random_schemas import schema
from tests.conformance.test_runner_process import Runner, running

pytest.importorskip("llguidance")
pytestmark = [
    pytest.mark.models,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not any((f / "libpaddock_cpu.so").exists() for f in pack_folders()), reason="the CPU pack is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="the runner is a Linux program"),
]
N_AT_ONCE = 4
WORDS = ["Anna Okonkwo", "anna@example.org", "Gothenburg", "red", "a small town", "17", "true", "Valparaiso"]
PEOPLE = [{"name": f"{first} {last}", "city": city} for first in ("Anna", "Carlos", "Elena") for last, city in (("Okonkwo", "Gothenburg"), ("Petrov", "Kyoto"))]
LIST = {
    "type": "array", "minItems": 6, "maxItems": 6,
    "items": {"type": "object", "properties": {"name": {"type": "string"}, "city": {"type": "string"}}, "required": ["name", "city"], "additionalProperties": False},
}  # fmt: skip


ALWAYS = """
import dataclasses
from paddock_runner.engine.policy import Policy
names = [field.name for field in dataclasses.fields(Policy)]
told = list(Policy.__init__.__defaults__)
told[names.index("draft_gain") - len(names)] = 0.0
Policy.__init__.__defaults__ = tuple(told)
assert Policy().draft_gain == 0
"""
"""Guesses are made wherever there are some: whether they pay depends on what else runs on the machine."""


def guessing(patch: pytest.MonkeyPatch, folder: Path, *arguments: Any) -> AbstractContextManager[Runner]:
    """A runner whose Python takes the file in its folder along."""
    patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))))
    return running(folder, *arguments)


@pytest.fixture(scope="module", params=["SmolLM2-135M-Instruct.Q4_1.gguf", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"], ids=["smollm2", "qwen2.5"])
def clients(request: pytest.FixtureRequest, models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """One without guesses, one with."""
    model = models_dir / request.param
    flags = ("--max-batch", str(N_AT_ONCE), "--max-ctx", "1024", "--no-auth", "--threads", "2", "--deterministic")
    folders = [tmp_path_factory.mktemp(name) for name in ("plain", "guessed")]
    (folders[1] / "sitecustomize.py").write_text(ALWAYS)
    with (
        pytest.MonkeyPatch.context() as patch,
        running(folders[0], model, *flags, "--guesses", "off") as plain,
        guessing(patch, folders[1], model, *flags, "--guesses", "lookup") as guessed,
        httpx.Client(base_url=plain.url, timeout=300) as a,
        httpx.Client(base_url=guessed.url, timeout=300) as b,
    ):
        yield a, b


def answer(client: httpx.Client, body: dict[str, Any]) -> tuple[Any, ...]:
    """What must be the same: text, calls, why it ended, tokens, their log-probabilities."""
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    (choice,) = found["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    return choice["message"]["content"], calls, choice["finish_reason"], found["usage"]["completion_tokens"], choice.get("logprobs")


def compare(clients: tuple[httpx.Client, httpx.Client], bodies: list[dict[str, Any]]) -> tuple[int, int]:
    """Guessed tokens, and how many were right."""
    found = []
    for client in clients:
        with ThreadPoolExecutor(N_AT_ONCE) as pool:
            found.append(list(pool.map(lambda body, client=client: answer(client, body), bodies)))
    for body, plain, guessed in zip(bodies, *found, strict=True):
        assert guessed == plain, body
    counters = clients[1].get("/v1/paddock/state").json()["engine"]["counters"]
    return counters["drafted_tokens"], counters["accepted_tokens"]


def held(prompt: str, wanted: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted, "strict": True}}, **more}


def test_a_list_that_repeats_the_prompt_is_guessed_and_the_same(clients: tuple[httpx.Client, httpx.Client]) -> None:
    prompt = "Repeat this JSON: " + json.dumps(PEOPLE)
    bodies = [held(prompt, LIST, max_tokens=160, temperature=t, seed=i, **({"logprobs": True} if i % 2 else {})) for i, t in enumerate((0, 0, 0.7, 1.0))]
    drafted, accepted = compare(clients, bodies)
    assert drafted > 0 and accepted > 0, "answers under masks are guessed for"


def test_answers_to_random_schemas_are_the_same(clients: tuple[httpx.Client, httpx.Client]) -> None:
    rng = random.Random(5)
    bodies = []
    for i in range(12):
        prompt = f"Answer in JSON. Some words: {json.dumps([rng.choice(WORDS) for _ in range(20)])}"
        more: dict[str, Any] = {"temperature": rng.choice((0, 0.8)), "top_p": rng.choice((1.0, 0.9)), "seed": i, "max_tokens": 90}
        more |= rng.choice(({}, {"logprobs": True, "top_logprobs": 2}, {"frequency_penalty": 0.3}, {"stop": ["Anna"]}))
        bodies.append(held(prompt, schema(rng), **more))
    compare(clients, bodies)


def test_calls_and_regular_expressions_are_the_same(clients: tuple[httpx.Client, httpx.Client], request: pytest.FixtureRequest) -> None:
    ask = [{"role": "user", "content": "red, green, blue, red, green, blue, red, green, blue, and so on:"}]
    bodies = [{"messages": ask, "guided_regex": "((red|green|blue), ){8,30}", "temperature": t, "seed": 1, "max_tokens": 80} for t in (0, 0.5, 1.0)]
    tool = {"type": "function", "function": {"name": "store", "parameters": {"type": "object", "properties": {"people": LIST}, "required": ["people"], "additionalProperties": False}, "strict": True}}
    if "qwen" in request.node.name:
        bodies.append({"messages": [{"role": "user", "content": "Store " + json.dumps(PEOPLE)}], "tools": [tool], "tool_choice": "required", "temperature": 0, "max_tokens": 160})
    compare(clients, bodies)
