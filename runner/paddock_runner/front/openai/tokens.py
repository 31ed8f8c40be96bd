"""POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...text.tokenizer import in_parts
from ..http import ENCODER, Exchange
from ..service import Front, Shape
from .chat import check_messages, messages_of, template_options
from .fields import ChatMessage, Tool, functions_of, refuse, tools_of


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text, or a conversation as the model's template renders it."""

    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str = ""


TOKENIZE = Shape(TokenizeRequest)
DETOKENIZE = Shape(DetokenizeRequest)
SHAPES = {"post_tokenize": TokenizeRequest, "post_detokenize": DetokenizeRequest}


async def post_tokenize(front: Front, exchange: Exchange) -> None:
    """POST /tokenize"""
    body = await TOKENIZE.read(front, exchange)
    front.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise refuse("prompt", "send either prompt or messages")
    if body.messages is not None:
        given = body.messages
        if functions_of(body.tools):
            front.require_tools()
        await front.understand(exchange, lambda: check_messages(given))
        messages = await front.understand(exchange, lambda: messages_of(given))
        how = {
            "options": template_options(body.chat_template_kwargs),
            "add_generation_prompt": body.add_generation_prompt is not False,
        }
        ids, _ = await front.served.chat_prompt(messages, tools_of(body.tools) or None, how, exchange.large_bytes)
    else:
        ids = await front.served.text_prompt(body.prompt or "", body.add_special_tokens is not False)
    pieces = front.served.tokenizer.pieces
    head = {"count": len(ids), "max_model_len": front.served.max_ctx_tokens}

    def written() -> bytes:
        parts = [ENCODER.encode(head)[:-1], b',"tokens":', _list(ids)]
        if body.return_token_strs:
            parts += b',"token_strs":', _list([pieces[i].decode("utf-8", "replace") for i in ids])
        return b"".join((*parts, b"}"))

    await exchange.answer(200, await front.served.run(written, len(ids)))


def _list(values: Sequence[Any]) -> bytes:
    """Its JSON."""
    return b"[" + b",".join(ENCODER.encode(list(part))[1:-1] for part in in_parts(values)) + b"]"


async def post_detokenize(front: Front, exchange: Exchange) -> None:
    """POST /detokenize"""
    body = await DETOKENIZE.read(front, exchange)
    front.require_model(body.model)
    text = await front.served.run(lambda: front.served.tokenizer.decode(front.served.id_prompt(body.tokens, "tokens"), skip_special=False), len(body.tokens))
    await exchange.answer_json({"prompt": text})
