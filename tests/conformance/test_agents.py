"""What Claude Code, Codex, Open WebUI, LangChain, Cline, LiteLLM and others send, answered by a real small model that calls tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from paddock_runner.manifest import pack_folders

from tests.conformance.agents import REQUESTS, Request
from tests.conformance.response_checker import check as check_response
from tests.conformance.stream_checkers import check_chat, check_messages
from tests.conformance.test_runner_process import running

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(not any((f / "libpaddock_cpu.so").exists() for f in pack_folders()), reason="the CPU pack is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="the runner is a Linux program"),
]
NAME = "qwen2.5-coder-0.5b-instruct-q4_k_m"


@pytest.fixture(scope="module")
def client(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("agents")
    flags = ("--max-batch", "8", "--max-ctx", "4096", "--no-auth", "--threads", "2")
    with running(folder, models_dir / f"{NAME}.gguf", *flags) as found, httpx.Client(base_url=found.url, timeout=300) as client:
        yield client


def answered(client: httpx.Client, request: Request) -> str:
    """Sends one request and checks its answer by its kind; gives what went wrong, or ""."""
    program, path, headers, body = request
    sent = {**body, "model": NAME} if body or path == "/api/show" else None
    answer = client.request("GET" if sent is None else "POST", path, headers=headers, json=sent)
    if answer.status_code != 200:
        return f"{program} {path}: {answer.status_code} {answer.text[:300]}"
    try:
        kind = path.partition("?")[0]
        if not body.get("stream"):
            assert isinstance(answer.json(), dict) and "error" not in answer.json()
        elif kind == "/v1/messages":
            check_messages(answer.content)
        elif kind == "/v1/responses":
            check_response(answer.content)
        elif kind == "/v1/chat/completions":
            check_chat(answer.content, bool(body.get("stream_options")))
        elif kind == "/api/chat":
            assert all(json.loads(line)["model"] == NAME for line in answer.text.splitlines()) and '"done":true' in answer.text
        else:
            assert answer.text.endswith("data: [DONE]\n\n")
    except (AssertionError, ValueError) as error:
        return f"{program} {path}: {error!r} in {answer.text[:2000]}"
    return ""


def test_every_programs_requests_are_answered_as_it_expects(client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        wrong = [found for found in pool.map(lambda r: answered(client, r), REQUESTS) if found]
    assert not wrong, "\n".join(wrong)


def test_count_tokens_is_what_claude_code_is_charged(client: httpx.Client) -> None:
    _, path, headers, body = next(r for r in REQUESTS if "count_tokens" in r[1])
    asked = {k: v for k, v in body.items() if k != "thinking"}
    counted = client.post(path, headers=headers, json={**asked, "model": NAME}).json()["input_tokens"]
    usage = client.post("/v1/messages", headers=headers, json={**asked, "model": NAME, "max_tokens": 1}).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
