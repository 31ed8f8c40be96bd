"""Any PaddockError to the vendor's error JSON, with status, hint and retry headers; what nobody foresaw becomes a 500 in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from .. import log
from ..errors import Busy, Cancelled, ContextTooLong, PaddockError, ShuttingDown, Unauthorized, UnsupportedError
from .http import ENCODER, Exchange, Headers

OPENAI, ANTHROPIC, OLLAMA = "openai", "anthropic", "ollama"
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip
LEFT = "client left"
"""How a request ended whose client went away, in its log line."""
INTERNAL = "something went wrong inside the runner; its log has the details under this request's id"


def openai_body(error: PaddockError) -> dict[str, Any]:
    """OpenAI's error object."""
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
        return error.message
    limit, prompt, answer = facts["max_ctx_tokens"], facts["prompt_tokens"], facts.get("max_tokens") or 0
    asked = f"you requested {prompt + answer} tokens ({prompt} in the prompt, {answer} in the completion)"
    return f"This model's maximum context length is {limit} tokens. However, {asked}."


def anthropic_body(error: PaddockError) -> dict[str, Any]:
    """Anthropic's error object."""
    status = error.http_status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    facts, message = error.facts, error.message
    if isinstance(error, ContextTooLong) and "max_ctx_tokens" in facts:
        prompt, limit, answer = facts["prompt_tokens"], facts["max_ctx_tokens"], facts.get("max_tokens") or 0
        message = f"prompt is too long: {prompt} tokens > {limit} maximum"
        if prompt < limit:
            message = f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {limit}, decrease input length or `max_tokens` and try again"
    inner: dict[str, Any] = {"type": kind, "message": message}
    if error.hint:
        inner["hint"] = error.hint
    return {"type": "error", "error": inner}


def encoded(error: PaddockError, vendor: str) -> bytes:
    """The vendor's error JSON."""
    if vendor == OLLAMA:
        return ENCODER.encode({"error": f"{error.message} ({error.hint})" if error.hint else error.message})
    return ENCODER.encode(anthropic_body(error) if vendor == ANTHROPIC else openai_body(error))


def retry_headers(error: PaddockError) -> Headers:
    """When to come back, and whether at all."""
    if isinstance(error, Busy):
        ms = max(1, error.retry_after_ms)
        return [(b"retry-after", str(-(-ms // 1000)).encode()), (b"retry-after-ms", str(ms).encode())]
    if isinstance(error, ShuttingDown):
        return [(b"retry-after", b"1"), (b"retry-after-ms", b"1000")]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    return [(b"x-should-retry", b"false")] if isinstance(error, UnsupportedError) else []


async def guarded(exchange: Exchange, vendor: str, work: Callable[[], Awaitable[None]]) -> None:
    """Runs a handler; whatever it raises is answered in the vendor's shape (or, mid-stream, ends the stream there)."""
    try:
        await work()
    except Cancelled:
        exchange.status = exchange.status or 499
        exchange.log["end"] = LEFT
        if not exchange.is_started:
            await _answer(exchange, vendor, Cancelled("the client left"))
    except PaddockError as error:
        exchange.log["error"] = error.message
        await _answer(exchange, vendor, error)
    except asyncio.CancelledError:
        raise
    except Exception as fault:
        log.error("fault", fault, request_id=exchange.request_id, path=exchange.path)
        exchange.log["error"] = "fault"
        await _answer(exchange, vendor, PaddockError(INTERNAL))


async def _answer(exchange: Exchange, vendor: str, error: PaddockError) -> None:
    body = encoded(error, vendor)
    if not exchange.is_started:
        await exchange.answer(error.http_status, body, headers=retry_headers(error))
    elif not exchange.is_complete:
        if vendor == OLLAMA:
            await exchange.send_part(body + b"\n", is_last=True)
            return
        event = b"event: error\n" if vendor == ANTHROPIC else b""
        await exchange.send_part(event + b"data: " + body + b"\n\n", is_last=True)
