"""The table of routes, and the ASGI application that walks it: guard, key, handler, one log line."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .. import log
from ..edge.auth import ADMIN, INFERENCE, KEY_HEADERS, allowing
from ..edge.body import Receive, Scope, Send
from ..edge.problem import ANTHROPIC, OLLAMA, OPENAI, unknown_path, vendor_of, wrong_method
from . import health, mcp, metrics, openapi, rerank
from .anthropic import count_tokens, messages
from .http import Exchange
from .ollama import chat as ollama_chat
from .ollama import embed as ollama_embed
from .ollama import models as ollama_models
from .openai import chat, completions, embeddings, models, responses, tokens
from .problem import LEFT, guarded
from .service import Front

Handler = Callable[[Front, Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint. vendor: whose error shape. scope: what a key must be good for. writes_text: needs a model that does.

    A path that ends in / serves everything below it; / itself only itself.
    """

    method: str
    path: str
    handler: Handler
    vendor: str = OPENAI
    is_open: bool = False
    scope: str = INFERENCE
    writes_text: bool = False

    @property
    def has_name(self) -> bool:
        """Does a name come behind the path?"""
        return self.path != "/" and self.path.endswith("/")


ROUTES = (
    Route("GET", "/", health.get_root, is_open=True),
    Route("GET", "/version", health.get_version, is_open=True),
    Route("GET", "/ping", health.get_ready, is_open=True),
    Route("GET", "/health", health.get_ready, is_open=True),
    Route("GET", "/health/live", health.get_live, is_open=True),
    Route("GET", "/health/ready", health.get_ready, is_open=True),
    Route("GET", "/metrics", metrics.get_metrics, scope=ADMIN),
    Route("GET", "/openapi.json", openapi.get_openapi, is_open=True),
    Route("GET", "/v1/paddock/state", health.get_state, scope=ADMIN),
    Route("GET", "/v1/models", models.list_models),
    Route("GET", "/v1/models/", models.get_model),
    Route("POST", "/v1/chat/completions", chat.post_chat, writes_text=True),
    Route("POST", "/v1/completions", completions.post_completions, writes_text=True),
    Route("POST", "/v1/responses", responses.post_responses, writes_text=True),
    Route("GET", "/v1/responses/", responses.get_response),
    Route("DELETE", "/v1/responses/", responses.delete_response),
    Route("POST", "/v1/embeddings", embeddings.post_embeddings),
    Route("POST", "/v1/rerank", rerank.post_rerank),
    Route("POST", "/v2/rerank", rerank.post_rerank),
    Route("POST", "/rerank", rerank.post_rerank),
    Route("POST", "/v1/score", rerank.post_score),
    Route("POST", "/score", rerank.post_score),
    Route("POST", "/tokenize", tokens.post_tokenize),
    Route("POST", "/detokenize", tokens.post_detokenize),
    Route("POST", "/mcp", mcp.post_mcp),
    Route("GET", "/api/tags", ollama_models.get_tags, OLLAMA),
    Route("GET", "/api/ps", ollama_models.get_running, OLLAMA),
    Route("GET", "/api/version", ollama_models.get_version, OLLAMA, is_open=True),
    Route("POST", "/api/show", ollama_models.post_show, OLLAMA),
    Route("POST", "/api/pull", ollama_models.post_pull, OLLAMA),
    Route("POST", "/api/chat", ollama_chat.post_chat, OLLAMA, writes_text=True),
    Route("POST", "/api/generate", ollama_chat.post_generate, OLLAMA, writes_text=True),
    Route("POST", "/api/embed", ollama_embed.post_embed, OLLAMA),
    Route("POST", "/api/embeddings", ollama_embed.post_embeddings, OLLAMA),
    Route("POST", "/v1/messages", messages.post_messages, ANTHROPIC, writes_text=True),
    Route("POST", "/v1/messages/count_tokens", count_tokens.post_count_tokens, ANTHROPIC),
)
_EXACT = {(r.method, r.path): r for r in ROUTES if not r.has_name}
_BELOW = [r for r in ROUTES if r.has_name]
_PATHS = {r.path for r in ROUTES if not r.has_name}
_KEYS = tuple(name.encode() for name in KEY_HEADERS)


def find(method: str, path: str) -> Route:
    """The route of a request. Raises: UnknownPath, WrongMethod."""
    method = "GET" if method == "HEAD" else method
    route = _EXACT.get((method, path)) or next(
        (r for r in _BELOW if r.method == method and path.startswith(r.path) and path != r.path), None
    )
    if route is not None:
        return route
    if path in _PATHS:
        raise wrong_method(path, method, [r.method for r in ROUTES if r.path == path])
    raise unknown_path(path, _PATHS)


class Application:
    """The ASGI application of one Front."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        vendor = vendor_of(exchange.path)
        front, name = self._front, "unknown"
        exchange.outbox = front.outbox
        front.metrics.in_flight += 1

        async def work() -> None:
            nonlocal name
            origin = front.guard.check_origin(exchange.all_of(b"host"), exchange.header(b"origin"))
            exchange.extra += allowing(origin, exchange.header(b"access-control-request-headers"))
            if exchange.method == "OPTIONS":
                await exchange.answer(204, b"")
                return
            route = find(exchange.method, exchange.path)
            name = route.path
            if not route.is_open:
                caller = front.guard.check_key([exchange.header(name) for name in _KEYS], route.scope)
                exchange.client, exchange.weight = caller.number, caller.weight
            if route.writes_text:
                front.require_text()
            await route.handler(front, exchange)

        try:
            await guarded(exchange, vendor, work)
        finally:
            front.metrics.in_flight -= 1
            took_s = (time.monotonic_ns() - exchange.received_ns) / 1e9
            front.metrics.on_request(name, exchange.status or 499, took_s, exchange.log.get("end") == LEFT)
            say = log.debug if name.startswith(("/health", "/metrics")) and exchange.status < 400 else log.event
            say(
                "request", id=exchange.request_id, method=exchange.method, path=exchange.path, status=exchange.status or 499,
                ms=round(took_s * 1e3, 3), **exchange.log,
            )  # fmt: skip
