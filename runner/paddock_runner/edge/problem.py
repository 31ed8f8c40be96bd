"""Any PaddockError as the clients of a path read it: OpenAI's, Anthropic's or Ollama's JSON, with the headers that say when to come back."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from ..errors import Busy, ContextTooLong, PaddockError, ShuttingDown, Unauthorized, UnknownModel, UnsupportedError

OPENAI, ANTHROPIC, OLLAMA = "openai", "anthropic", "ollama"
INTERNAL = "something went wrong inside the server; its log has the details under this request's id"
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {**_OPENAI_TYPES, 413: "request_too_large", 503: "overloaded_error", 529: "overloaded_error"}


class UnknownPath(PaddockError):
    """There is nothing at this path."""

    http_status, code = 404, "unknown_path"


class WrongMethod(PaddockError):
    """The path is there, but not for this method (facts: allow, the methods that it takes)."""

    http_status, code = 405, "wrong_method"


def wrong_method(path: str, method: str, taken: Collection[str]) -> WrongMethod:
    """The path takes other methods."""
    allow = ", ".join(sorted({*taken, *({"HEAD"} if "GET" in taken else ())}))
    return WrongMethod(f"{path[:200]} does not take {method[:20]}", f"it takes {allow}", allow=allow)


class UnknownResponse(UnknownModel):
    """No stored response of that id."""

    code = "response_not_found"


def vendor_of(path: str) -> str:
    """Whose error shape a path wants."""
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return OLLAMA if path.startswith("/api/") else OPENAI


def body_of(error: PaddockError, vendor: str, request_id: str = "") -> dict[str, Any]:
    """The vendor's error JSON. Its message ends with the hint: most clients show nothing else."""
    if vendor == OLLAMA:
        return {"error": str(error)}
    return _anthropic(error, request_id) if vendor == ANTHROPIC else _openai(error)


def unknown_path(path: str, known: Collection[str]) -> UnknownPath:
    """There is nothing at this path; what is meant, where that can be told."""
    hint = "models are managed by `paddock pull`, `add` and `rm`, not here" if path.startswith("/api/") else "the API's paths are listed in /openapi.json"
    shown = path[:200]
    if f"/v1{path}" in known:
        hint = f"it is at /v1{shown}: the client's base URL ends in /v1"
    elif path.startswith(("/v1/v1/", "/v1/api/")) and path.removeprefix("/v1") in known:
        hint = f"it is at {shown.removeprefix('/v1')}: this client's base URL does not end in /v1"
    elif near := difflib.get_close_matches(path, known, 1, 0.9):
        hint = f"did you mean {near[0]}?"
    return UnknownPath(f"there is nothing at {shown}", hint)


def headers_of(error: PaddockError) -> list[tuple[bytes, bytes]]:
    """When to come back, and whether at all."""
    if isinstance(error, Busy):
        ms = max(1, error.retry_after_ms)
        return [(b"retry-after", str(-(-ms // 1000)).encode()), (b"retry-after-ms", str(ms).encode())]
    if isinstance(error, ShuttingDown):
        return [(b"retry-after", b"1"), (b"retry-after-ms", b"1000")]
    if isinstance(error, WrongMethod):
        return [(b"allow", str(error.facts["allow"]).encode())]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    return [(b"x-should-retry", b"false")] if isinstance(error, UnsupportedError) else []


def _openai(error: PaddockError) -> dict[str, Any]:
    status = error.http_status
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body: dict[str, Any] = {
        "message": _openai_message(error), "type": kind, "param": error.facts.get("param"), "code": error.code,
    }  # fmt: skip
    if error.hint:
        body["hint"] = error.hint
    return {"error": body}


def _openai_message(error: PaddockError) -> str:
    facts = error.facts
    if not isinstance(error, ContextTooLong) or "max_ctx_tokens" not in facts:
        return str(error)
    limit, prompt, answer = facts["max_ctx_tokens"], facts["prompt_tokens"], facts.get("max_tokens") or 0
    asked = f"you requested {prompt + answer} tokens ({prompt} in the prompt, {answer} in the completion)"
    return f"This model's maximum context length is {limit} tokens. However, {asked}."


def _anthropic(error: PaddockError, request_id: str) -> dict[str, Any]:
    status = error.http_status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    facts, message = error.facts, str(error)
    if isinstance(error, ContextTooLong) and "max_ctx_tokens" in facts:
        prompt, limit, answer = facts["prompt_tokens"], facts["max_ctx_tokens"], facts.get("max_tokens") or 0
        message = f"prompt is too long: {prompt} tokens > {limit} maximum"
        if prompt < limit:
            message = f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {limit}, decrease input length or `max_tokens` and try again"
    inner: dict[str, Any] = {"type": kind, "message": message}
    if error.hint:
        inner["hint"] = error.hint
    return {"type": "error", "error": inner, **({"request_id": request_id} if request_id else {})}
