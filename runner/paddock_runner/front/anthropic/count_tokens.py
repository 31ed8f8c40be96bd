"""POST /v1/messages/count_tokens: exact, and cheap: the prompt is rendered and tokenized, nothing runs."""

from __future__ import annotations

from ..http import Exchange
from ..service import Front, Shape
from .fields import Conversation
from .messages import prompt_of

SHAPE = Shape(Conversation, frozenset({"max_tokens", "stream", "temperature", "metadata"}))
SHAPES = {"post_count_tokens": Conversation}


async def post_count_tokens(front: Front, exchange: Exchange) -> None:
    """POST /v1/messages/count_tokens"""
    body = await SHAPE.read(front, exchange)
    prompt, _, _ = await prompt_of(front, exchange, body)
    await exchange.answer_json({"input_tokens": len(prompt)})
