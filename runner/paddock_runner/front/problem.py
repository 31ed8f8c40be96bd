"""Runs handlers: any PaddockError becomes the vendor's error JSON; what nobody foresaw becomes a 500 in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from .. import log
from ..edge.problem import ANTHROPIC, INTERNAL, OLLAMA, body_of, headers_of
from ..errors import Cancelled, PaddockError
from .http import ENCODER, Exchange

LEFT = "client left"
"""How a request ended whose client went away, in its log line."""


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
    body = ENCODER.encode(body_of(error, vendor, exchange.request_id))
    if not exchange.is_started:
        await exchange.answer(error.http_status, body, headers=headers_of(error))
    elif not exchange.is_complete:
        if vendor == OLLAMA:
            await exchange.send_part(body + b"\n", is_last=True)
            return
        event = b"event: error\n" if vendor == ANTHROPIC else b""
        await exchange.send_part(event + b"data: " + body + b"\n\n", is_last=True)
