"""GET /, /version, /ping, /health and its parts, and /v1/paddock/state: whether the runner is there, lives, takes work, and what it holds."""

from __future__ import annotations

from typing import Any

from ..version import our_version
from .http import Exchange
from .service import Front


async def get_root(front: Front, exchange: Exchange) -> None:
    """GET /: says that a server is there, to browsers and to clients that look for one."""
    await exchange.answer(200, b"Paddock is running", b"text/plain; charset=utf-8")


async def get_version(front: Front, exchange: Exchange) -> None:
    """GET /version: the version of Paddock."""
    await exchange.answer_json({"version": our_version()})


async def get_live(front: Front, exchange: Exchange) -> None:
    """GET /health/live: 200 while the front answers and the engine has not gone."""
    is_alive = front.phase != "failed"
    await exchange.answer_json({"status": "live" if is_alive else "failed"}, 200 if is_alive else 503)


async def get_ready(front: Front, exchange: Exchange) -> None:
    """GET /health, /health/ready, /ping: 200 when requests are taken, else 503 with the phase (loading, draining, failed)."""
    await exchange.answer_json(
        {"status": front.phase, "model": front.served.name}, 200 if front.phase == "ready" else 503
    )


async def get_state(front: Front, exchange: Exchange) -> None:
    """GET /v1/paddock/state: the engine's slots, pages and queues, memory as planned and as held, and the front's own."""
    engine: dict[str, Any] = await front.desk.state()
    held = engine.pop("memory", {})
    body = {
        "phase": front.phase,
        "model": front.served.name,
        "max_ctx_tokens": front.served.max_ctx_tokens,
        "front": {
            "open_asks": front.desk.n_open,
            "open_streams": len(front.streams),
            "requests": front.metrics.in_flight,
            "start": list(front.start),
        },
        "engine": engine,
        "memory": {"planned_bytes": dict(front.served.planned), "held_bytes": held},
        "facts": dict(front.served.facts),
    }
    await exchange.answer_json(body)
