"""POST /api/chat and /api/generate: Ollama's JSON to a turn, and the turn's events to lines of JSON."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from ...turns.turn import PLAIN, Reading
from ...turns.wish import Wish
from ..held import Held
from ..http import Exchange
from ..openai.fields import functions_of, refuse, tools_of
from ..openai.fill import Fill
from ..openai.probs import chat_entries
from ..service import Front, Shape
from ..sse import EventStream
from ..work import Work
from .fields import Generation, OllamaChat, OllamaGenerate, messages_of, now
from .lines import Lines, as_message, as_response, last, tool_calls
from .lines import Shape as Part

CHAT, GENERATE = Shape(OllamaChat), Shape(OllamaGenerate)
SHAPES = {"post_chat": OllamaChat, "post_generate": OllamaGenerate}
NDJSON = b"application/x-ndjson"


async def post_chat(front: Front, exchange: Exchange) -> None:
    """POST /api/chat"""
    body = await CHAT.read(front, exchange)
    wish = _begin(front, exchange, body)
    if not body.messages:
        await _loaded(front, exchange, {"message": {"role": "assistant", "content": ""}})
        return
    schemas = {f.name: f.parameters or {} for f in functions_of(body.tools)}
    if schemas:
        front.require_tools()
    messages = await front.understand(exchange, lambda: messages_of(body.messages))
    prompt, text = await front.served.chat_prompt(messages, tools_of(body.tools) or None, _how(front, body), exchange.large_bytes)
    held = Held(body.held(), schemas, param="format")
    await _answer(front, exchange, body, (prompt, wish, await _reading(front, exchange, wish, text, held)), as_message)


async def post_generate(front: Front, exchange: Exchange) -> None:
    """POST /api/generate"""
    body = await GENERATE.read(front, exchange)
    wish = _begin(front, exchange, body)
    if body.images:
        raise refuse("images", "this model takes text, not images")
    if body.template is not None or body.context:
        raise refuse(
            "template" if body.template is not None else "context",
            "only the model's own template is used; send messages to /api/chat",
        )
    if not body.prompt:
        await _loaded(front, exchange, {"response": ""})
        return
    held = Held(body.held(), param="format", is_chat=not (body.raw or body.suffix))
    prompt: array[int]
    text = ""
    if body.suffix:
        fill = Fill.of(front.served.tokenizer)
        prompt = await front.served.run(
            lambda: fill.prompt(body.prompt, body.suffix or ""), len(body.prompt) + len(body.suffix)
        )
        wish.stop_ids = fill.marks
    elif body.raw or not front.served.template.exists:
        prompt = await front.served.text_prompt(body.prompt)
    else:
        messages: list[Mapping[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": body.prompt})
        prompt, text = await front.served.chat_prompt(messages, None, _how(front, body))
    await _answer(front, exchange, body, (prompt, wish, await _reading(front, exchange, wish, text, held)), as_response)


def _begin(front: Front, exchange: Exchange, body: Generation) -> Wish:
    front.require_ready()
    front.require_model(body.model)
    options, ignored = body.sampling()
    exchange.ignored += ignored
    wish = options.wish()
    wish.n_logprobs = body.n_logprobs
    return wish


def _how(front: Front, body: Generation) -> dict[str, Any]:
    effort = body.think if isinstance(body.think, str) else None
    is_on = body.think if isinstance(body.think, bool) else None
    return {"options": front.served.template.thinking_options(is_on, effort)}


async def _reading(front: Front, exchange: Exchange, wish: Wish, text: str, held: Held) -> Reading:
    if held.is_chat and text:
        return await held.reading(front, exchange, wish, text)
    return PLAIN if held.is_free else Reading(guide=await held.guide(front, wish, text))


async def _loaded(front: Front, exchange: Exchange, empty: dict[str, Any]) -> None:
    """An empty request asks to load the model, which is loaded."""
    await exchange.answer_json(
        {"model": front.served.name, "created_at": now(), **empty, "done": True, "done_reason": "load"}
    )


async def _answer(
    front: Front, exchange: Exchange, body: Generation, work: tuple[array[int], Wish, Reading], shape: Part
) -> None:
    prompt, wish, reading = work
    model, todo = body.model or front.served.name, Work(front, exchange, [prompt], wish, reading)
    if body.stream is not False:
        stream = EventStream(exchange, NDJSON)
        lines = Lines(stream, model, shape, front.served.tokenizer)
        lines.turn = todo.turn(lines)
        await todo.stream(stream, lines.turn, lines.close)
        return
    turn, (answer,) = await todo.collect()
    part: dict[str, Any] = {"text": answer.text}
    if answer.reasoning:
        part["thinking"] = answer.reasoning
    if answer.calls:
        part["tool_calls"] = tool_calls(answer.calls)
    told = {"logprobs": chat_entries(front.served.tokenizer, answer.probs)} if wish.n_logprobs >= 0 else {}
    await exchange.answer_json({"model": model, "created_at": now(), **shape(part), **told, **last(turn, answer.end)})
