"""Thousands of mutated requests at every endpoint: never a 5xx, never a hang, nothing left open, and the server as quick as before."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import httpx
import pytest

from tests.conformance.bodies import BODIES
from tests.conformance.live import KEY, Live

N_DEFAULT, N_FULL, N_AT_ONCE = 1000, 10_000, 16
CHAT = "/v1/chat/completions"
HEADERS = {"authorization": f"Bearer {KEY}", "accept": "application/json, text/event-stream", "content-type": "application/json"}


def deep(n: int) -> Any:
    found: Any = 1
    for _ in range(n):
        found = [found]
    return found


ODD: list[Any] = [
    None, -1, 0, 1, 1 << 31, 1 << 63, 1 << 70, -(1 << 70), 1.5, 1e300, "", "x" * 5000, "\x00", "\u202e", "ÿ" * 50, [], {}, [[]], [None], {"": ""}, {"a": None}, True, False, "null", "auto",
    "required", "json_object", "<|im_end|>", "{{ messages }}", "../../etc/passwd", deep(60), {"$ref": "#"}, {"type": "object"}, {"type": ["string", 5]}, [1, "a"], {"type": "function"}, "data:image/png;base64,AAAA",
]  # fmt: skip


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is something to change."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(p for k, v in inside for p in paths(v, (*at, k)))]


def changed(rng: random.Random, value: Any, at: tuple[Any, ...]) -> Any:
    """The value with the part at a path replaced, left out, doubled, or renamed."""
    if not at:
        return rng.choice(ODD) if rng.random() < 0.2 else value
    key, rest = at[0], at[1:]
    if rest:
        part = changed(rng, value[key], rest)
        return {**value, key: part} if isinstance(value, dict) else [*value[:key], part, *value[key + 1 :]]
    how = rng.random()
    if isinstance(value, dict):
        if how < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if how < 0.25:
            return {**{k: v for k, v in value.items() if k != key}, key[:-1] + "\u00e9": value[key]}
        return {**value, key: rng.choice(ODD)}
    if how < 0.2:
        return value[:key] + value[key + 1 :]
    if how < 0.35:
        return value * rng.choice((2, 20))
    return [*value[:key], rng.choice(ODD), *value[key + 1 :]]


def mutated(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body with one to three things wrong with it, sometimes broken as bytes too."""
    value: Any = body
    for _ in range(rng.randint(1, 3)):
        value = changed(rng, value, rng.choice(paths(value)))
    raw = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15 and raw:
        at, how = rng.randrange(len(raw)), rng.random()
        if how < 0.4:
            raw = raw[:at]
        elif how < 0.7:
            raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
        else:
            raw = raw[:at] + rng.choice((b"\\ud800", b"NaN", b"1e999", b"}", b"\x00", b'"')) + raw[at:]
    return raw


@pytest.mark.parametrize("path", list(BODIES))
def test_bodies_that_the_fuzz_begins_with_are_valid(tools: Live, path: str) -> None:
    for body in BODIES[path]:
        if "response_format" in body or "structured_outputs" in body or "guided_grammar" in body or "guided_choice" in body or "format" in str(body):
            tools.say('{"at": "a"}')
        answer = tools.post(path, body, headers=HEADERS)
        assert answer.status_code == 200 or "grammar" in answer.text, (body, answer.text)


async def storm(server: Live, n: int, seed: int) -> list[tuple[str, bytes, int, str]]:
    """Sends n mutated bodies; gives those that were answered with a 5xx for which the request is to blame."""
    rng = random.Random(seed)
    work = [(path := rng.choice(list(BODIES)), mutated(rng, rng.choice(BODIES[path]))) for _ in range(n)]
    bad: list[tuple[str, bytes, int, str]] = []
    limits = httpx.Limits(max_connections=N_AT_ONCE)
    async with httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=30, limits=limits) as client:

        async def one() -> None:
            while work:
                path, raw = work.pop()
                answer = await client.post(path, content=raw)
                # The scripted engine does not look at masks: its answers leave the grammar, which ends in this 500.
                if answer.status_code >= 500 and "that the grammar does not allow" not in answer.text:
                    bad.append((path, raw, answer.status_code, answer.text))

        await asyncio.gather(*(one() for _ in range(N_AT_ONCE)))
    return bad


@pytest.mark.parametrize("n", [N_DEFAULT, pytest.param(N_FULL, marks=pytest.mark.slow)])
def test_mutated_requests_never_make_a_5xx_and_leave_nothing_behind(tools: Live, n: int) -> None:
    tools.say("Hi")
    bad = asyncio.run(storm(tools, n, n))
    assert not bad, bad[:3]
    assert tools.front.desk.n_open == 0 and not tools.front.streams and tools.front.metrics.in_flight == 0
    begun = time.monotonic()
    assert tools.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}]}).status_code == 200
    assert time.monotonic() - begun < 2
