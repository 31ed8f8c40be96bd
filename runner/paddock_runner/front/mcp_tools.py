"""The tools of the runner's MCP server: generate, embed, rerank, count_tokens, fit, list_models. Knows nothing of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ..errors import UsageError
from ..turns.collect import Collector
from ..turns.turn import Caller, Reading, Turn
from ..turns.vectors import vectors
from ..turns.wish import Wish
from . import misfit
from .held import Held, of_schema
from .http import Exchange
from .openai.embeddings import finished, inputs_of, prompts_of
from .rerank import MAX_DOCUMENTS, scores_of
from .service import Front, account_vectors, caller, run_alone, run_turn

MAX_TOKENS = 1024
"""Of an answer whose length the caller leaves open."""


class Generate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the tool generate: a prompt (as a user's message), or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    json_schema: dict[str, Any] | None = None


class CountTokens(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the tool count_tokens."""

    text: str


class Embed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the tool embed: texts, and of what kind they are where the model tells kinds apart ("query", "document")."""

    texts: list[str]
    input_type: str | None = None


class Rerank(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the tool rerank."""

    query: str
    documents: list[str]
    top_n: int | None = None


class Fit(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the tool fit: a text, or a number of tokens; and how long answers may be."""

    text: str | None = None
    prompt_tokens: int | None = None
    max_tokens: int = MAX_TOKENS


class ListModels(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the tool list_models: none."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. kind: the type of its arguments, from which its schema is made."""

    name: str
    description: str
    kind: type


TOOLS = (
    Tool("generate", "Has the served model answer a prompt or a conversation; with json_schema the answer is JSON of that schema.", Generate),
    Tool("embed", "Turns texts into vectors, where an embedding model is served.", Embed),
    Tool("rerank", "Orders documents by how well they answer a query, where an embedding or ranking model is served.", Rerank),
    Tool("count_tokens", "Counts the tokens of a text as the served model sees them.", CountTokens),
    Tool("fit", "Tells whether a text and an answer fit the served model's context, how much room is left, and how many such requests run at once.", Fit),
    Tool("list_models", "Lists the served model with its context length and how it is held in memory.", ListModels),
)


def schema_of(kind: type) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    (root,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    found: dict[str, Any] = parts.pop(root["$ref"].rsplit("/", 1)[-1])
    return {**found, "$defs": parts} if parts else found


async def call(front: Front, exchange: Exchange, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's result. exchange: the request that the call came with; when its client leaves the call ends, for the SDK does not look. Raises: UsageError for an unknown tool or wrong arguments; what the turn raises."""
    tool = next((t for t in TOOLS if t.name == name), None)
    if tool is None:
        raise UsageError(f"there is no tool {name[:100]!r}", f"the tools are {', '.join(t.name for t in TOOLS)}")
    try:
        given: Any = msgspec.convert(arguments, tool.kind)
    except msgspec.ValidationError as error:
        raise misfit.of(error, arguments, name) from None
    front.require_ready()
    whose = caller(exchange, exchange.client)
    if isinstance(given, Generate):
        front.require_text()
        return await _generate(front, exchange, given, whose)
    if isinstance(given, Embed):
        form = front.require_vectors("embed")
        prompts = await prompts_of(front, form, inputs_of([*given.texts]), given.input_type)
        rows = finished(form, await run_alone(exchange, vectors(front.desk, prompts, whose)), form.width)
        account_vectors(front, exchange, len(prompts), n_tokens := sum(map(len, prompts)))
        return {"vectors": rows.tolist(), "width": form.width, "prompt_tokens": n_tokens}
    if isinstance(given, Rerank):
        if not 1 <= len(given.documents) <= MAX_DOCUMENTS or (given.top_n or 1) < 1:
            raise UsageError(f"rerank: send 1 to {MAX_DOCUMENTS} documents, and a top_n of at least 1")
        scores, n_tokens = await run_alone(exchange, scores_of(front, [(given.query, text) for text in given.documents], None, whose))
        account_vectors(front, exchange, len(scores), n_tokens)
        order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))[: given.top_n]
        return {"results": [{"index": i, "score": float(scores[i])} for i in order], "prompt_tokens": n_tokens}
    if isinstance(given, CountTokens):
        return {"tokens": len(await front.served.text_prompt(given.text))}
    if isinstance(given, Fit):
        return await _fit(front, given)
    served = front.served
    return {"models": [{"name": served.name, "max_ctx_tokens": served.max_ctx_tokens, **served.facts}]}


async def _generate(front: Front, exchange: Exchange, given: Generate, whose: Caller) -> dict[str, Any]:
    if (given.prompt is None) == (given.messages is None):
        raise UsageError("generate: send either prompt or messages")
    messages = given.messages if given.messages is not None else [{"role": "user", "content": given.prompt}]
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UsageError("generate: every message has a role and a content, both text")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise UsageError("generate: a message's tool_calls are a list of objects")
    if given.system:
        messages = [{"role": "system", "content": given.system}, *messages]
    if given.max_tokens is not None and given.max_tokens < 1:
        raise UsageError("generate: max_tokens must be at least 1")
    prompt, text = await front.served.chat_prompt(messages, None, {})
    room = max(1, front.served.max_ctx_tokens - len(prompt))
    wish = Wish(max_tokens=min(MAX_TOKENS, room) if given.max_tokens is None else given.max_tokens, temperature=given.temperature, seed=given.seed)
    reading = Reading.of(front.served, text, {})
    if given.json_schema is not None:
        held = Held(of_schema(given.json_schema), param="json_schema")
        reading = replace(reading, guide=await held.guide(front, wish, text))
    collector = Collector(1)
    turn = Turn(front.desk, front.served, [prompt], wish, collector, whose, reading)
    await run_turn(front, exchange, turn)
    (answer,) = collector.answers
    usage = turn.usage
    found: dict[str, Any] = {"text": answer.text, "finish_reason": answer.end.reason}
    if answer.reasoning:
        found["reasoning"] = answer.reasoning
    return {**found, "prompt_tokens": usage.prompt_tokens, "output_tokens": usage.output_tokens}


async def _fit(front: Front, given: Fit) -> dict[str, Any]:
    if (given.text is None) == (given.prompt_tokens is None):
        raise UsageError("fit: send either text or prompt_tokens")
    n_prompt = given.prompt_tokens if given.text is None else len(await front.served.text_prompt(given.text))
    if n_prompt is None or n_prompt < 0 or given.max_tokens < 1:
        raise UsageError("fit: prompt_tokens must be at least 0 and max_tokens at least 1")
    served, facts = front.served, front.served.facts
    needed = n_prompt + given.max_tokens
    found: dict[str, Any] = {
        "fits": needed <= served.max_ctx_tokens, "prompt_tokens": n_prompt, "needed_tokens": needed, "max_ctx_tokens": served.max_ctx_tokens,
        "room_tokens": max(0, served.max_ctx_tokens - n_prompt),
    }  # fmt: skip
    if isinstance(facts.get("pool_tokens"), int) and isinstance(facts.get("max_batch"), int):
        found["at_once"] = min(facts["max_batch"], facts["pool_tokens"] // needed) if found["fits"] else 0
    return found
