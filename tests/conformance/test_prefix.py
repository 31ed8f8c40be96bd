"""The second turn of a long conversation computes only what is new, and begins so much sooner."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import tiny_gguf
from tests.conformance.test_runner_process import Runner, pytestmark, running  # noqa: F401


@pytest.fixture(scope="module")
def real_runner(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("prefix")
    with running(folder, models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf", "--no-auth", "--max-batch", "2", "--threads", "2") as found:
        yield found


def turn(url: str, messages: list[dict], max_tokens: int = 12) -> tuple[dict, dict, float]:
    """The answer as a message, its usage, and seconds to the first token."""
    body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    text, usage, first, begun = "", {}, 0.0, time.perf_counter()
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                usage = chunk["usage"] or usage
                piece = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else ""
                first = first or (time.perf_counter() - begun if piece else 0.0)
                text += piece or ""
    return {"role": "assistant", "content": text}, usage, first


def two_turns(url: str, n_words: int) -> tuple[dict, dict, float, float]:
    words = " ".join(f"fact {i} is {i * 7919 % 1000}." for i in range(n_words))
    messages = [{"role": "user", "content": words}]
    answer, first, first_s = turn(url, messages)
    _, second, second_s = turn(url, [*messages, answer, {"role": "user", "content": "And the last one?"}])
    return first, second, first_s, second_s


def computed(usage: dict) -> int:
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


def test_second_turn_computes_only_what_is_new(tmp_path: Path) -> None:
    with running(tmp_path, tiny_gguf.write(tmp_path / "tiny.gguf"), "--no-auth") as runner:
        first, second, _, _ = two_turns(runner.url, 12)
        assert computed(first) == first["prompt_tokens"]
        new = second["prompt_tokens"] - first["prompt_tokens"]
        assert computed(second) <= new + 32 + 16, "what is new, the rest of one page, and the answer's border"


@pytest.mark.models
def test_second_turn_of_4000_tokens_begins_sooner(real_runner: Runner) -> None:
    first, second, first_s, second_s = two_turns(real_runner.url, 420)
    assert first["prompt_tokens"] > 4000 and computed(first) == first["prompt_tokens"]
    assert computed(second) < 120
    assert second_s < first_s / 5, (first_s, second_s)
