"""POST /v1/messages: Anthropic's JSON to a turn, and the turn's events to JSON. Anthropic's words end here."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from ...turns.collect import Answer
from ...turns.wish import Wish
from ..held import Held, callable_schemas, of_schema
from ..http import Exchange
from ..service import Front, Shape
from ..sse import EventStream
from ..work import Work
from .events import Events, signature, stop_of, tool_id
from .fields import Conversation, MessagesRequest, left_out, messages_of, refuse, tools_of, usage_json

SHAPE = Shape(MessagesRequest)
SHAPES = {"post_messages": MessagesRequest}
CHOICES = ("auto", "none", "any", "tool")


async def post_messages(front: Front, exchange: Exchange) -> None:
    """POST /v1/messages"""
    body = await SHAPE.read(front, exchange)
    front.require_ready()
    prompt, text, schemas = await prompt_of(front, exchange, body)
    wish = Wish(
        max_tokens=body.max_tokens, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, stop=tuple(body.stop_sequences or ()),
        max_reasoning=_budget(body),
    )  # fmt: skip
    reading = await held_of(body, schemas).reading(front, exchange, wish, text)
    work = Work(front, exchange, [prompt], wish, reading)
    message: dict[str, Any] = {
        "id": "msg_" + secrets.token_hex(12), "type": "message", "role": "assistant", "model": body.model or front.served.name,
        "content": [], "stop_reason": None, "stop_sequence": None,
    }  # fmt: skip
    if body.stream:
        stream = EventStream(exchange)
        events = Events(stream, message)
        events.turn = work.turn(events)
        await work.stream(stream, events.turn, events.close)
        return
    turn, (answer,) = await work.collect()
    await exchange.answer_json(
        {**message, "content": _blocks(answer), **stop_of(answer.end), "usage": usage_json(turn.usage)}
    )


async def prompt_of(
    front: Front, exchange: Exchange, body: Conversation
) -> tuple[array[int], str, Mapping[str, Mapping[str, Any]]]:
    """The conversation's ids and text, and the schemas of the tools that may be called. Raises: UsageError."""
    front.require_model(body.model)
    choice = body.tool_choice
    if choice is not None and choice.type not in CHOICES:
        raise refuse("tool_choice.type", f"the tool choice {choice.type[:40]!r} is not one of {', '.join(CHOICES)}")
    unknown, tools = await front.understand(exchange, lambda: (left_out(body), tools_of(body)))
    exchange.ignored += unknown
    if tools:
        front.require_tools()
    effort = body.output_config.get("effort") if body.output_config else None
    is_on = None if body.thinking is None else body.thinking.type != "disabled"
    template = front.served.template
    options = template.thinking_options(is_on, effort if isinstance(effort, str) else None)
    if body.thinking is not None and not template.thinking_options(is_on):
        if not front.served.format.reasoning_end:
            exchange.ignored.append("thinking")
        elif body.thinking.type == "disabled":
            exchange.ignored.append("thinking.type")
    if effort is not None and not template.thinking_options(None, str(effort)):
        exchange.ignored.append("output_config.effort")
    messages = await front.understand(exchange, lambda: messages_of(body))
    last = messages[-1]
    goes_on = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last  # the client began the answer
    how = {"options": options, "continue_final": goes_on, "add_generation_prompt": not goes_on}
    prompt, text = await front.served.chat_prompt(messages, tools or None, how, exchange.large_bytes)
    return prompt, text, {t["function"]["name"]: t["function"]["parameters"] for t in tools}


def _budget(body: MessagesRequest) -> int:
    """Tokens of reasoning, -1: any number. Raises: UsageError when the answer cannot have so many."""
    told = body.thinking.budget_tokens if body.thinking is not None and body.thinking.type != "disabled" else None
    if told is None:
        return -1
    if not 0 < told < body.max_tokens:
        raise refuse(
            "thinking.budget_tokens", f"{told} tokens of thinking are not between 1 and max_tokens {body.max_tokens}"
        )
    return told


def held_of(body: Conversation, schemas: Mapping[str, Mapping[str, Any]]) -> Held:
    """What the answer must be: the format of output_config, and the tools that must be called. Raises: UsageError."""
    choice = body.tool_choice
    wanted = body.output_format or (body.output_config or {}).get("format")
    content = None
    if wanted is not None:
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema" or "schema" not in wanted:
            raise refuse("output_config.format", "the format must be of type json_schema and have a schema")
        content = of_schema(wanted["schema"])
    if choice is None or choice.type not in ("any", "tool"):
        is_parallel = choice is None or not choice.disable_parallel_tool_use
        return Held(content, schemas, False, is_parallel, "output_config.format")
    if choice.type == "tool" and choice.name is None:
        raise refuse("tool_choice.name", "the tool that must be called is not named")
    calls = callable_schemas(schemas, choice.name if choice.type == "tool" else None, "tool_choice")
    return Held(None, calls, True, not choice.disable_parallel_tool_use, "tool_choice")


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if answer.reasoning:
        out.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature()})
    if answer.text or not (answer.calls or answer.reasoning):
        out.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        out.append({"type": "tool_use", "id": call.id or tool_id(), "name": call.name, "input": _input(call.arguments)})
    return out


def _input(arguments: str) -> Any:
    """A call's arguments as an object; what the model left broken stands under `_raw`, so that nothing is lost."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {"_raw": arguments}
    return found if isinstance(found, dict) else {"_raw": arguments}
