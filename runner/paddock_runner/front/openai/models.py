"""GET /v1/models and /v1/models/NAME, with the fields of OpenAI's clients and of Anthropic's: neither minds the other's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from ..http import Exchange
from ..service import Front


async def list_models(front: Front, exchange: Exchange) -> None:
    """GET /v1/models: the one model that is served."""
    name = front.served.name
    await exchange.answer_json({"object": "list", "data": [_entry(front)], "has_more": False, "first_id": name, "last_id": name})


async def get_model(front: Front, exchange: Exchange) -> None:
    """GET /v1/models/NAME"""
    front.require_model(unquote(exchange.path.removeprefix("/v1/models/")))
    await exchange.answer_json(_entry(front))


def _entry(front: Front) -> dict[str, Any]:
    served = front.served
    return {
        "id": served.name, "object": "model", "created": served.created_s, "owned_by": "paddock",
        "type": "model", "display_name": served.name, "created_at": datetime.fromtimestamp(served.created_s, UTC).isoformat().replace("+00:00", "Z"),
        "max_model_len": served.max_ctx_tokens, "context_length": served.max_ctx_tokens, **served.facts,
    }  # fmt: skip
