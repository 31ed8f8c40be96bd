"""x-paddock-cache says to the client why not more of its prompt was cached; the log says it in numbers, without a word of the prompt."""

from __future__ import annotations

import json

import pytest
from paddock_runner.wire.messages import Miss

from tests.conformance.live import Live

BODY = {"prompt": "a secret word", "max_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_miss_says_where_and_how_the_prompt_goes_on(server: Live, stream: bool, capfd: pytest.CaptureFixture[str]) -> None:
    server.script.miss, server.script.known_tokens = Miss.DIFFERS, 2
    header = server.post("/v1/completions", {**BODY, "stream": stream}).headers["x-paddock-cache"]
    n = len(server.tokenizer.encode(BODY["prompt"], add_special=True))
    fields = dict(word.split("=", 1) for word in header.split("; "))
    assert fields.pop("text")
    assert fields == {"miss": "differs", "cached": "0", "prompt": str(n), "at": "2"}
    assert "secret" not in capfd.readouterr().err


def test_a_hit_has_no_reason_and_shows_no_text(server: Live) -> None:
    server.script.cached_tokens = 2
    header = server.post("/v1/completions", BODY).headers["x-paddock-cache"]
    assert header.startswith("miss=none; cached=2; prompt=") and "text" not in header and json.dumps(header)


def test_how_long_a_request_may_wait_is_told_in_a_header(server: Live) -> None:
    assert server.post("/v1/completions", BODY, headers={"x-queue-timeout-ms": "30000"}).status_code == 200
    for wrong in ("0", "-5", "soon", "1e3", "99999999999"):
        answer = server.post("/v1/completions", BODY, headers={"x-queue-timeout-ms": wrong})
        assert answer.status_code == 400 and "x-queue-timeout-ms" in answer.text
