"""GET /v1/models and /v1/models/NAME, with the fields of OpenAI's clients and of Anthropic's."""

from __future__ import annotations

from ...edge.lists import openai_entry, openai_list
from ..http import Exchange
from ..service import Front


async def list_models(front: Front, exchange: Exchange) -> None:
    """GET /v1/models: the one model that is served."""
    await exchange.answer_json(openai_list([front.listed]))


async def get_model(front: Front, exchange: Exchange) -> None:
    """GET /v1/models/NAME"""
    front.require_model(exchange.path.removeprefix("/v1/models/"))
    await exchange.answer_json(openai_entry(front.listed))
