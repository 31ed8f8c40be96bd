"""POST /tokenize and /detokenize, in vLLM's shape."""

from __future__ import annotations

from typing import Any

import msgspec

from ..http import Exchange
from ..service import Front, Shape
from .chat import check_messages, messages_of, template_options
from .fields import ChatMessage, Tool, functions_of, refuse


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
        check_messages(body.messages)
        if functions_of(body.tools):
            front.require_tools()
        tools = [msgspec.to_builtins(t) for t in body.tools or ()]
        how = {
            "options": template_options(body.chat_template_kwargs),
            "add_generation_prompt": body.add_generation_prompt is not False,
        }
        ids, _ = await front.served.chat_prompt(messages_of(body.messages), tools or None, how)
    else:
        ids = await front.served.text_prompt(body.prompt or "", body.add_special_tokens is not False)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": front.served.max_ctx_tokens, "tokens": ids.tolist()}
    if body.return_token_strs:
        answer["token_strs"] = [front.served.tokenizer.pieces[i].decode("utf-8", "replace") for i in ids]
    await exchange.answer_json(answer)


async def post_detokenize(front: Front, exchange: Exchange) -> None:
    """POST /detokenize"""
    body = await DETOKENIZE.read(front, exchange)
    front.require_model(body.model)
    text = await front.served.run(lambda: front.served.tokenizer.decode(front.served.id_prompt(body.tokens, "tokens"), skip_special=False), len(body.tokens))
    await exchange.answer_json({"prompt": text})
