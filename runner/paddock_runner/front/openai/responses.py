"""POST /v1/responses, and what was stored of earlier ones: OpenAI's Responses API over the same turns as chat."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...edge.problem import UnknownResponse
from ...errors import Busy, Cancelled, ContextTooLong, PaddockError
from ...turns.turn import Reading, Turn
from ...turns.usage import Usage
from ...turns.wish import Wish
from ..held import Held
from ..http import ENCODER, Exchange
from ..service import Front, Shape, caller, run_stream, run_turn
from ..sse import EventStream
from ..stored import Entry
from .fields import ResponseFormat, refuse
from .response_events import Items
from .response_fields import ResponsesRequest, Tools, items_of, messages_of, tools_of
from .structured import chosen, formatted

SHAPE = Shape(ResponsesRequest)
SHAPES = {"post_responses": ResponsesRequest}
BELOW = "/v1/responses/"
Conversation = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """A request, understood. items: the whole conversation."""

    prompt: Any
    text: str
    wish: Wish
    reading: Reading
    tools: Tools
    items: Conversation
    response: dict[str, Any]


async def post_responses(front: Front, exchange: Exchange) -> None:
    """POST /v1/responses"""
    body = await SHAPE.read(front, exchange)
    front.require_ready()
    front.require_model(body.model)
    _check(body)
    work = await _understand(front, exchange, body)
    include = body.include or ()
    stream = EventStream(exchange) if body.stream else None
    items = Items(
        work.response, work.tools.called, front.served.tokenizer, stream,
        "reasoning.encrypted_content" in include, work.wish.n_logprobs >= 0,
    )  # fmt: skip
    whose = caller(exchange, exchange.client, body.cache_salt)
    turn = Turn(front.desk, front.served, [work.prompt], work.wish, items, whose, work.reading)
    if stream is None:
        await run_turn(front, exchange, turn)
    else:
        try:
            await run_stream(front, exchange, turn, stream)
        except PaddockError as error:
            if isinstance(error, Cancelled) or not exchange.is_started:
                raise
            exchange.log["error"] = error.message
            items.fail(_failure(error), error.message)
            await stream.finish()
            return
    done = items.finish(_usage(turn.usage))
    if body.store is not False:
        _store(front, exchange, work, done)
    if stream is None:
        await exchange.answer_json(done)
    else:
        await stream.finish()


def _failure(error: PaddockError) -> str:
    """The codes that clients know."""
    if isinstance(error, Busy):
        return "rate_limit_exceeded"
    return error.code if isinstance(error, ContextTooLong) else "server_error"


def _check(body: ResponsesRequest) -> None:
    if body.background:
        raise refuse("background", "responses are not made in the background here", "leave `background` out, or stream")
    if body.conversation is not None:
        raise refuse("conversation", "conversations are not kept here", "send the items, or previous_response_id")
    if body.prompt is not None:
        raise refuse("prompt", "prompt templates are not kept here", "send the items")
    if body.truncation not in (None, "disabled", "auto"):
        raise refuse("truncation", f"truncation is {body.truncation[:40]!r}, auto or disabled are possible")


async def _understand(front: Front, exchange: Exchange, body: ResponsesRequest) -> _Work:
    items = (*_before(front, exchange, body), *await _items(front, exchange, body))
    tools = await front.understand(exchange, lambda: tools_of(body.tools or ()))
    if tools.ignored:
        exchange.ignored += [f"tools.{i}" for i in tools.ignored]
    if body.max_tool_calls is not None:
        exchange.ignored.append("max_tool_calls")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        exchange.ignored.append("text.verbosity")
    allowed, must_call = chosen(_known(body.tool_choice, tools), tools.schemas)
    if allowed:
        front.require_tools()
    options = front.served.template.thinking_options(effort=body.reasoning.effort if body.reasoning else None)
    options.update(body.chat_template_kwargs or {})
    if clash := {"messages", "tools", "documents"} & options.keys():
        raise refuse("chat_template_kwargs", f"chat_template_kwargs may not set {min(clash)!r}")
    messages = await front.understand(exchange, lambda: messages_of(items, body.instructions))
    if not messages:
        raise refuse("input", "the input is empty")
    prompt, text = await front.served.chat_prompt(messages, tools.functions if allowed else None, {"options": options}, exchange.large_bytes)
    wish = _wish(body)
    content = formatted(_format(body), "text.format")
    held = Held(
        content, allowed, must_call, body.parallel_tool_calls is not False, "tool_choice" if must_call else "text.format",
        is_strict=any(tool.get("strict") is True for tool in body.tools or ()),
    )  # fmt: skip
    reading = await held.reading(front, exchange, wish, text)
    return _Work(prompt, text, wish, reading, tools, items, _response(front, body))


def _before(front: Front, exchange: Exchange, body: ResponsesRequest) -> Conversation:
    if body.previous_response_id is None:
        return ()
    entry = front.stored.get(body.previous_response_id, exchange.client)
    if entry is None:
        raise refuse(
            "previous_response_id", f"the response {body.previous_response_id[:100]!r} is not stored here",
            "send the conversation's items; responses are kept in memory only, the latest of them",
        )  # fmt: skip
    return entry.items


async def _items(front: Front, exchange: Exchange, body: ResponsesRequest) -> list[dict[str, Any]]:
    items = items_of(body.input)
    for i in await front.understand(exchange, lambda: [at for at, item in enumerate(items) if item.get("type") == "item_reference"]):
        items[i] = _referred(front, exchange, i, items[i])
    return items


def _referred(front: Front, exchange: Exchange, i: int, item: dict[str, Any]) -> dict[str, Any]:
    found = front.stored.item(str(item.get("id")), exchange.client)
    if found is None:
        raise refuse(f"input[{i}].id", f"the item {str(item.get('id'))[:100]!r} is not stored here")
    return found


def _known(choice: str | dict[str, Any] | None, tools: Tools) -> str | Mapping[str, Any] | None:
    """The tool choice by the names that the model knows."""
    if not isinstance(choice, dict) or choice.get("namespace") is None:
        return choice
    wanted = (choice.get("name"), choice["namespace"])
    known = next((k for k, c in tools.called.items() if (c.name, c.namespace) == wanted), None)
    return {**choice, "name": known} if known is not None else choice


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    told = body.text.format if body.text is not None else None
    if told is None:
        return None
    kind = told.get("type")
    if not isinstance(kind, str):
        raise refuse("text.format", "text.format has no type")
    return ResponseFormat(type=kind, json_schema=told if kind == "json_schema" else None)


def _wish(body: ResponsesRequest) -> Wish:
    wants_probs = body.top_logprobs or "message.output_text.logprobs" in (body.include or ())
    return Wish(
        max_tokens=body.max_output_tokens or 0, min_tokens=body.min_tokens or 0,
        temperature=body.temperature, top_p=body.top_p, top_k=None if body.top_k is None else max(0, body.top_k), min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed, n_logprobs=(body.top_logprobs or 0) if wants_probs else -1, priority=body.priority or 0,
    )  # fmt: skip


def _response(front: Front, body: ResponsesRequest) -> dict[str, Any]:
    reasoning, text = body.reasoning, body.text
    return {
        "id": "resp_" + secrets.token_hex(24), "object": "response", "created_at": int(time.time()), "status": "in_progress",
        "background": False, "error": None, "incomplete_details": None, "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens, "max_tool_calls": body.max_tool_calls, "model": front.served.name, "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None}, "safety_identifier": body.safety_identifier,
        "service_tier": "default", "store": body.store is not False, "temperature": front.served.recommended.temperature if body.temperature is None else body.temperature,
        "text": {"format": (text.format if text else None) or {"type": "text"}, **({"verbosity": text.verbosity} if text and text.verbosity else {})},
        "tool_choice": body.tool_choice or "auto", "tools": body.tools or [], "top_logprobs": body.top_logprobs or 0,
        "top_p": front.served.recommended.top_p if body.top_p is None else body.top_p, "truncation": "disabled", "usage": None, "user": body.user,
        "metadata": body.metadata or {},
    }  # fmt: skip


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens, "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }  # fmt: skip


def _store(front: Front, exchange: Exchange, work: _Work, done: dict[str, Any]) -> None:
    items = (*work.items, *done["output"])
    n_bytes = len(ENCODER.encode({**done, "output": []})) + 8 * len(items)
    front.stored.put(done["id"], Entry(exchange.client, done, items, len(work.items), n_bytes))


def _entry(front: Front, exchange: Exchange, name: str) -> Entry:
    entry = front.stored.get(name, exchange.client)
    if entry is None:
        raise UnknownResponse(f"the response {name[:100]!r} is not stored here", "the latest are kept, in memory only")
    return entry


async def get_response(front: Front, exchange: Exchange) -> None:
    """GET /v1/responses/ID: a stored response; with /input_items, what it answered."""
    name, _, below = exchange.path.removeprefix(BELOW).partition("/")
    entry = _entry(front, exchange, name)
    if below == "":
        if exchange.query.get("stream") == "true":
            raise refuse("stream", "stored responses are told whole, not streamed again", "leave `stream` out")
        await exchange.answer_json(entry.answer)
        return
    if below != "input_items":
        raise UnknownResponse(f"a response has no {below[:40]!r}")
    data = [{"id": f"item_{i}", **item} for i, item in enumerate(entry.items[: entry.n_input])][::-1]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    await exchange.answer_json({"object": "list", "data": data, **ends, "has_more": False})


async def delete_response(front: Front, exchange: Exchange) -> None:
    """DELETE /v1/responses/ID: forgets a stored response."""
    name = exchange.path.removeprefix(BELOW)
    _entry(front, exchange, name)
    front.stored.drop(name)
    await exchange.answer_json({"id": name, "object": "response", "deleted": True})
