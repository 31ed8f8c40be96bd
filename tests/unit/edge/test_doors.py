"""Who may call, from which pages, in the same way on a runner's port and a gateway's; bodies that do not come; versions."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paddock_manager.fleet.client import error_of
from paddock_manager.paths import Places
from paddock_manager.web.gateway import Gateway
from paddock_manager.web.pool import Pool
from paddock_runner import version
from paddock_runner.edge import body, lists, problem
from paddock_runner.edge.auth import Guard, allowing
from paddock_runner.errors import Forbidden, UsageError

PAGES = ("http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]:5173", "http://a.localhost", "http://box.example", "https://studio.example", "https://Studio.example/")
FOREIGN = ("https://evil.example", "null", "http://10.1.2.3", "http://localhost.evil.example", "http://127.0.0.1.evil.example", "http://[", "file://")


def test_pages_of_this_machine_may_call_and_others_only_where_allowed() -> None:
    guard = Guard((), ["box.example"], ["https://studio.example"])
    for page in PAGES:
        assert guard.check_origin(["localhost:1"], page) == page.rstrip("/").lower()
    for page in FOREIGN:
        with pytest.raises(Forbidden):
            guard.check_origin(["localhost:1"], page)
    assert guard.check_origin(["10.1.2.3:11660"], "http://10.1.2.3:11660") and guard.check_origin(["localhost"], "") == ""
    assert Guard((), (), ["*"]).check_origin(["localhost"], FOREIGN[0]) == FOREIGN[0]


def test_page_gets_the_headers_that_its_browser_asked_for_unless_they_are_none() -> None:
    told = dict(allowing("http://localhost:1", "x-stainless-lang, anthropic-dangerous-direct-browser-access"))
    assert told[b"access-control-allow-headers"] == b"x-stainless-lang, anthropic-dangerous-direct-browser-access"
    assert b"authorization" in dict(allowing("http://localhost:1", "a\r\nb: c"))[b"access-control-allow-headers"]
    assert allowing("", "x") == []


def test_errors_with_odd_names_are_told_though_standard_error_was_closed() -> None:
    """As Python's own standard error does, which this one stands in for."""
    code = "import os, sys; from paddock_runner.edge.streams import hold_streams; hold_streams(); print('caf\\udce9', file=sys.stderr, flush=True); print(sys.stderr.errors)"
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "backslashreplace\n")


def ask(parts: list[bytes], then: float) -> tuple[int, dict[bytes, bytes], bytes]:
    """The answer of a gateway without models to a body that comes in parts, and then does not go on for so many seconds."""
    sent: list[Any] = []
    queue = list(parts)

    async def receive() -> dict[str, Any]:
        if not queue:
            await asyncio.sleep(then)
        return {"type": "http.request", "body": queue.pop(0) if queue else b"", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        gateway = Gateway(Pool(Places(Path()), [], 0, 0, 1), lambda: "", Guard(()), 1000)
        scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": [(b"host", b"localhost")]}
        await gateway(scope, receive, send)

    asyncio.run(run())
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


def test_gateway_waits_for_no_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_GRACE_S", 0.1)
    status, headers, raw = ask([b"{", b'"model'], 30)
    assert status == 408 and headers[b"connection"] == b"close" and b'"type": "error"' in raw
    assert ask([b"x" * 600, b"x" * 600], 30)[0] == 413


def test_version_has_three_numbers_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise version.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", missing)
    version.our_version.cache_clear()
    assert version.our_version() == version.UNKNOWN and version.version_of("numpy") == ""
    version.our_version.cache_clear()


def test_path_that_a_wrong_base_url_makes_is_told_right() -> None:
    known = {"/v1/chat/completions", "/v1/models", "/api/chat"}
    for path, hint in [
        ("/chat/completions", "it is at /v1/chat/completions"), ("/v1/v1/models", "it is at /v1/models"), ("/v1/api/chat", "it is at /api/chat"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"), ("/nothing", "/openapi.json"),
    ]:  # fmt: skip
        assert hint in problem.unknown_path(path, known).hint


def test_message_ends_with_the_hint_since_clients_show_nothing_else() -> None:
    error = Forbidden("no", "do that")
    assert problem.body_of(error, problem.OPENAI)["error"] | {"param": 0} == {"message": "no (do that)", "type": "permission_error", "param": 0, "code": "forbidden", "hint": "do that"}
    told = problem.body_of(error, problem.ANTHROPIC, "req_1")
    assert told["error"]["message"] == "no (do that)" and told["request_id"] == "req_1"
    again = error_of(403, json.dumps(problem.body_of(error, problem.OPENAI)).encode())
    assert (again.message, again.hint) == ("no", "do that")


def test_keep_alive_is_read_as_ollama_does() -> None:
    for value, seconds in [(None, None), (0, 0), (-1, -1), (300, 300), (1.5, 1.5), ("5m", 300), ("1h30m", 5400), ("300ms", 0.3), ("0", 0), ("-1m", -60), ("24h", 86400)]:
        assert lists.keep_s(value) == seconds
    for value in (1e12, 1e300, 10**400, -(10**400), "99999999h", "9" * 400):
        assert lists.keep_s(value) == -1, "for ever: no date is so far away"
    for value in ("", "soon", "5 m", [], True, "1x"):
        with pytest.raises(UsageError, match="keep_alive"):
            lists.keep_s(value)
