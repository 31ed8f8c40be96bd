"""Many chats at once against the real engine: random lengths, aborts and disconnects; each answer equals its answer alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests import tiny_gguf
from tests.conformance.test_runner_process import Runner, pytestmark, running, until  # noqa: F401

WORDS = ["sea", "sky", "the", "thing", "he", "in", "er", "ab", "aaa", "ocean", "wind", "water", "stone", "light", "moon"]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("storm")
    with running(folder, tiny_gguf.write(folder / "tiny.gguf"), "--no-auth", "--max-batch", "16") as found:
        yield found


@pytest.fixture(scope="module")
def real_runner(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("storm-real")
    with running(folder, models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf", "--no-auth", "--max-batch", "32", "--max-ctx", "1024", "--threads", "2") as found:
        yield found


def bodies(n: int, max_words: int, max_tokens: int) -> list[dict]:
    rng = random.Random(4)
    out = []
    for i in range(n):
        text = f"{i} " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, max_words)))
        out.append({"messages": [{"role": "user", "content": text}], "max_tokens": rng.randint(1, max_tokens), "temperature": 0, "stream": rng.random() < 0.7})
    return out


async def answer(client: httpx.AsyncClient, body: dict, leaves_after: int = -1) -> str:
    """The answer's text; leaves after so many events when told to."""
    if not body["stream"]:
        found = await client.post("/v1/chat/completions", json=body)
        assert found.status_code == 200, found.text
        return found.json()["choices"][0]["message"]["content"]
    text, n, is_done = "", 0, False
    async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                n += 1
                if n == leaves_after:
                    return text
    assert is_done, "the stream ended without its mark"
    return text


async def storm(url: str, asks: list[dict], n_alone: int) -> None:
    """All at once, some leaving; then some of them alone: the same answers."""
    rng = random.Random(5)
    limits = httpx.Limits(max_connections=len(asks))
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(body: dict) -> str | None:
            fate = rng.random()
            if fate < 0.15:
                await answer(client, {**body, "stream": True}, rng.randint(1, 5))
                return None
            if fate < 0.25:
                task = asyncio.ensure_future(answer(client, body))
                await asyncio.sleep(rng.random() * 0.3)
                if task.done():
                    return task.result()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return None
            return await answer(client, body)

        together = await asyncio.gather(*(one(body) for body in asks))
        complete = [i for i, text in enumerate(together) if text is not None]
        assert len(complete) > len(asks) // 2
        for i in rng.sample(complete, n_alone):
            assert await answer(client, asks[i]) == together[i], f"ask {i} has another answer alone"


def settled(runner: Runner) -> bool:
    engine = httpx.get(runner.url + "/v1/paddock/state").json()["engine"]
    pages, slots = engine["pages"], engine["slots"]
    return slots["free"] == slots["all"] and engine["queue"]["waiting"] == 0 and pages["free"] + pages["evictable"] >= pages["attached"]


def test_200_chats_at_once_answer_as_alone_and_leave_nothing_behind(runner: Runner) -> None:
    asyncio.run(storm(runner.url, bodies(200, 40, 60), 60))
    assert until(lambda: settled(runner), 10), httpx.get(runner.url + "/v1/paddock/state").json()
    process = psutil.Process(runner.process.pid)
    before = [p.memory_info().rss for p in (process, *runner.children)]
    asyncio.run(storm(runner.url, bodies(200, 40, 60), 0))
    after = [p.memory_info().rss for p in (process, *runner.children)]
    assert all(b - a < 16 << 20 for a, b in zip(before, after, strict=True)), (before, after)
    assert "Traceback" not in runner.said() and "fault" not in runner.said()


@pytest.mark.models
@pytest.mark.slow
def test_200_chats_at_once_with_a_real_model(real_runner: Runner) -> None:
    # Products of few rows take 8-bit activations, products of many rows bf16 tiles: near ties fall either way.
    asyncio.run(storm(real_runner.url, bodies(200, 60, 48), 20))
    assert until(lambda: settled(real_runner), 10)
    assert "Traceback" not in real_runner.said()
