"""POST /v1/chat/completions: JSON to a turn, and the turn's events to JSON. OpenAI's words end here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...turns.collect import Answer
from ..held import Held
from ..http import Exchange
from ..service import Front, Shape
from ..sse import EventStream
from ..work import Work
from .chunks import FINISH, ChatChunks, Head, call_id
from .fields import ChatMessage, ChatRequest, functions_of, refuse, tools_of, usage_json
from .probs import chat_entries, prompt_entries
from .structured import held_chat

SHAPE = Shape(ChatRequest)
SHAPES = {"post_chat": ChatRequest}
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
SPEAKERS = frozenset({"system", "developer", "user"})
"""Roles whose messages are nothing without content."""


async def post_chat(front: Front, exchange: Exchange) -> None:
    """POST /v1/chat/completions"""
    body = await SHAPE.read(front, exchange)
    front.require_ready()
    front.require_model(body.model)
    wants, tools, messages = await front.understand(exchange, lambda: _understood(front, exchange, body))
    prompt, text = await front.served.chat_prompt(messages, tools, _how(front, body), exchange.large_bytes)
    n_logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    wish = body.wish(_max_tokens(body), n_logprobs)
    wish.max_reasoning = body.max_reasoning
    reading = await wants.reading(front, exchange, wish, text)
    work = Work(front, exchange, [prompt], wish, reading, body.cache_salt)
    head = Head(
        "chatcmpl-" + secrets.token_hex(12), int(time.time()), front.served.name, wish.n,
        body.wants_usage, n_logprobs >= 0,
    )  # fmt: skip
    if body.stream:
        stream = EventStream(exchange)
        chunks = ChatChunks(stream, head, front.served.tokenizer)
        turn = work.turn(chunks)
        if wish.n_prompt_logprobs >= 0:
            delta = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
            chunks.ratings = lambda i: [{"choices": [delta], "prompt_logprobs": prompt_entries(front.served.tokenizer, prompt, turn.prompt_probs(i))}]
        await work.stream(stream, turn, lambda: chunks.close(turn.usage))
        return
    turn, answers = await work.collect()
    choices = [_choice(front, i, answer, head.has_probs) for i, answer in enumerate(answers)]
    more = {"prompt_logprobs": prompt_entries(front.served.tokenizer, prompt, turn.prompt_probs(0))} if wish.n_prompt_logprobs >= 0 else {}
    await exchange.answer_json({**head.fields("chat.completion"), "choices": choices, "usage": usage_json(turn.usage), **more})


def _understood(front: Front, exchange: Exchange, body: ChatRequest) -> tuple[Held, list[dict[str, Any]] | None, list[Mapping[str, Any]]]:
    """What the answer must be; tools and messages as templates take them."""
    _check(body)
    exchange.ignored += _without_effect(front, body)
    if body.tools and body.tool_choice != "none":
        front.require_tools()
    wants = held_chat(body)
    return wants, (tools_of(body.tools) or None) if wants.calls else None, messages_of(body.messages)


def _max_tokens(body: ChatRequest) -> int:
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        raise refuse("max_tokens", "max_tokens is 0, at least 1 is needed")
    return asked or 0


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises: UsageError naming what a conversation cannot have here."""
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise refuse(
                f"messages[{i}].role", f"the role {message.role[:40]!r} is not one of {', '.join(sorted(ROLES))}"
            )
        if message.content is None and message.role in SPEAKERS:
            raise refuse(f"messages[{i}].content", f"messages[{i}] is a message of role {message.role} without content")
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type not in TEXT_PARTS:
                raise refuse(f"messages[{i}].content[{j}]", f"this model takes text, not {part.type[:40]!r}")
            if part.words is None:
                raise refuse(f"messages[{i}].content[{j}].text", f"messages[{i}].content[{j}] has no text")


def _check(body: ChatRequest) -> None:
    check_messages(body.messages)
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "top_logprobs needs logprobs to be true")
    functions_of(body.tools)
    if body.functions or body.function_call not in (None, "none", "auto"):
        raise refuse("functions" if body.functions else "function_call", "functions are called as tools here", "send `tools` and `tool_choice`")
    if body.audio is not None or set(body.modalities or ()) - {"text"}:
        raise refuse("audio" if body.audio is not None else "modalities", "this model answers with text alone")
    if body.store:
        raise refuse("store", "nothing is stored here", "leave `store` out or set it to false")


def _without_effect(front: Front, body: ChatRequest) -> list[str]:
    """Fields that are understood but change nothing here."""
    out = []
    if body.parallel_tool_calls is False and not body.tools:
        out.append("parallel_tool_calls")
    if body.service_tier not in (None, "auto", "default"):
        out.append("service_tier")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        out.append("stream_options.continuous_usage_stats")
    if body.effort and not front.served.template.thinking_options(effort=body.effort):
        out.append("reasoning_effort" if body.reasoning_effort else "reasoning.effort")
    if body.max_reasoning >= 0 and not front.served.format.reasoning_end:
        out.append("reasoning.max_tokens" if body.thinking_token_budget is None else "thinking_token_budget")
    return out


def _how(front: Front, body: ChatRequest) -> dict[str, Any]:
    is_on = body.reasoning.enabled if body.reasoning is not None else None
    options: dict[str, Any] = front.served.template.thinking_options(is_on, body.effort)
    options.update(template_options(body.chat_template_kwargs))
    continues = bool(body.continue_final_message)
    return {
        "documents": body.documents, "options": options, "continue_final": continues,
        "add_generation_prompt": body.add_generation_prompt is not False,
    }  # fmt: skip


def template_options(told: Mapping[str, Any] | None) -> dict[str, Any]:
    """chat_template_kwargs. Raises: UsageError for what has a field of its own."""
    for name in ("messages", "tools", "documents"):
        if told and name in told:
            raise refuse("chat_template_kwargs", f"chat_template_kwargs may not set {name!r}")
    return dict(told or {})


def messages_of(messages: Sequence[ChatMessage]) -> list[Mapping[str, Any]]:
    """Messages as templates take them: plain dicts, absent fields absent, reasoning under one name."""
    out: list[Mapping[str, Any]] = []
    for message in messages:
        plain: dict[str, Any] = msgspec.to_builtins(message)
        plain.setdefault("content", None)
        for part in plain["content"] if isinstance(message.content, list) else ():
            if part["type"] == "refusal":
                part.update(type="text", text=part.pop("refusal", ""))
        thought = plain.pop("reasoning", None)
        if thought and "reasoning_content" not in plain:
            plain["reasoning_content"] = thought
        for call in plain.get("tool_calls", ()):
            call["type"] = "function"
        out.append(plain)
    return out


def _choice(front: Front, index: int, answer: Answer, has_probs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning"] = message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {"id": c.id or call_id(), "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in answer.calls
        ]
    probs = {"content": chat_entries(front.served.tokenizer, answer.probs), "refusal": None} if has_probs else None
    return {
        "index": index, "message": message, "logprobs": probs, "finish_reason": FINISH[answer.end.reason],
        "stop_reason": answer.end.stop,
    }  # fmt: skip
