"""Errors of the gateway itself, in the shape that the clients of a path read: OpenAI's, Anthropic's or Ollama's."""

from __future__ import annotations

from typing import Any

from paddock_runner.errors import PaddockError

from paddock_manager.fleet.spawn import RunnerDied

OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {**OPENAI_TYPES, 413: "request_too_large", 503: "overloaded_error", 529: "overloaded_error"}


class UnknownPath(PaddockError):
    """There is nothing at this path."""

    http_status, code = 404, "unknown_path"


class WrongMethod(PaddockError):
    """The path is there, but not for this method."""

    http_status, code = 405, "wrong_method"


def body_of(error: PaddockError, path: str) -> dict[str, Any]:
    """The error's JSON."""
    hint = "" if isinstance(error, RunnerDied) else error.hint  # it quotes the log, which is for the owner of this machine
    if path.startswith("/api/"):
        return {"error": f"{error.message} ({hint})" if hint else error.message}
    status, more = error.http_status, {"hint": hint} if hint else {}
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message, **more}}
    kind = OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.facts.get("param"), "code": error.code, **more}}


def headers_of(error: PaddockError) -> tuple[tuple[bytes, bytes], ...]:
    """When to come back."""
    wait = error.facts.get("retry_after_ms")
    return ((b"retry-after", str(max(1, int(wait) // 1000)).encode()), (b"retry-after-ms", str(wait).encode())) if wait else ()
