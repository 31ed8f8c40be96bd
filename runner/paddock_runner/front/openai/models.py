"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from ..http import Exchange
from ..service import Front


async def list_models(front: Front, exchange: Exchange) -> None:
    """GET /v1/models: the one model that is served."""
    await exchange.answer_json({"object": "list", "data": [_entry(front)]})


async def get_model(front: Front, exchange: Exchange) -> None:
    """GET /v1/models/NAME"""
    front.require_model(unquote(exchange.path.removeprefix("/v1/models/")))
    await exchange.answer_json(_entry(front))


def _entry(front: Front) -> dict[str, Any]:
    served = front.served
    return {
        "id": served.name, "object": "model", "created": served.created_s, "owned_by": "paddock",
        "max_model_len": served.max_ctx_tokens, "context_length": served.max_ctx_tokens, **served.facts,
    }  # fmt: skip
