"""POST /v1/messages: Anthropic's JSON to a turn, and the turn's events to JSON. Anthropic's words end here."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from ...turns.collect import Answer, Collector
from ...turns.turn import Reading, Turn
from ...turns.wish import Wish
from ..http import Exchange
from ..service import Front, Shape, caller, run_stream, run_turn
from ..sse import EventStream
from .events import Events, signature, stop_of, tool_id
from .fields import Conversation, MessagesRequest, left_out, messages_of, refuse, tools_of, usage_json

SHAPE = Shape(MessagesRequest)
SHAPES = {"post_messages": MessagesRequest}


async def post_messages(front: Front, exchange: Exchange) -> None:
    """POST /v1/messages"""
    body = await SHAPE.read(front, exchange)
    front.require_ready()
    prompt, text, schemas = await prompt_of(front, exchange, body)
    wish = Wish(
        max_tokens=body.max_tokens, temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p, top_k=body.top_k or 0, stop=tuple(body.stop_sequences or ()),
    )  # fmt: skip
    reading = Reading.of(front.served, text, schemas)
    whose = caller(exchange, exchange.client)
    message: dict[str, Any] = {
        "id": "msg_" + secrets.token_hex(12), "type": "message", "role": "assistant", "model": body.model or front.served.name,
        "content": [], "stop_reason": None, "stop_sequence": None,
    }  # fmt: skip
    if body.stream:
        stream = EventStream(exchange)
        events = Events(stream, message)
        events.turn = Turn(front.desk, front.served, [prompt], wish, events, whose, reading)
        await run_stream(front, exchange, events.turn, stream)
        events.close()
        await stream.finish()
        return
    collector = Collector(1)
    turn = Turn(front.desk, front.served, [prompt], wish, collector, whose, reading)
    await run_turn(front, exchange, turn)
    (answer,) = collector.answers
    await exchange.answer_json(
        {**message, "content": _blocks(answer), **stop_of(answer.end), "usage": usage_json(turn.usage)}
    )


async def prompt_of(
    front: Front, exchange: Exchange, body: Conversation
) -> tuple[array[int], str, Mapping[str, Mapping[str, Any]]]:
    """The conversation's ids and text, and the schemas of the tools that may be called. Raises: UsageError."""
    front.require_model(body.model)
    choice = body.tool_choice
    if choice is not None and choice.type not in ("auto", "none"):
        raise refuse(
            "tool_choice.type", f"the tool choice {choice.type[:40]!r} is not supported yet; supported: auto, none"
        )
    if unknown := left_out(body):
        exchange.ignored += unknown
    tools = tools_of(body)
    if tools:
        front.require_tools()
    effort = body.output_config.get("effort") if body.output_config else None
    is_on = None if body.thinking is None else body.thinking.type != "disabled"
    template = front.served.template
    options = template.thinking_options(is_on, effort if isinstance(effort, str) else None)
    if body.thinking is not None and (body.thinking.budget_tokens is not None or not template.thinking_options(is_on)):
        exchange.ignored.append("thinking.budget_tokens" if template.thinking_options(is_on) else "thinking")
    if effort is not None and not template.thinking_options(None, str(effort)):
        exchange.ignored.append("output_config.effort")
    prompt, text = await front.served.chat_prompt(messages_of(body), tools or None, {"options": options})
    return prompt, text, {t["function"]["name"]: t["function"]["parameters"] for t in tools}


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
