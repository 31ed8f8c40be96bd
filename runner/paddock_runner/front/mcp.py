"""/mcp: the runner as a server of the Model Context Protocol, over streamable HTTP by the official SDK (an optional package).

Tools: generate, count_tokens, list_models. Each request stands for itself; no sessions are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ..errors import PaddockError, UnsupportedError, UsageError
from ..turns.collect import Collector
from ..turns.turn import Caller, Reading, Turn
from ..turns.wish import Wish
from .held import Held, of_schema
from .http import ENCODER, Exchange
from .service import Front

CLIENT = "paddock.caller"
MAX_TOKENS = 1024
"""Of an answer whose length the caller leaves open."""


class McpRequest(msgspec.Struct, kw_only=True):
    """A JSON-RPC message of the Model Context Protocol."""

    jsonrpc: str
    method: str
    id: str | int | None = None
    params: dict[str, Any] | None = None


SHAPES = {"post_mcp": McpRequest}


class Generate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the tool generate: a prompt (as a user's message), or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | None = None
    max_tokens: int = MAX_TOKENS
    temperature: float = 1.0
    seed: int | None = None
    json_schema: dict[str, Any] | None = None


class CountTokens(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the tool count_tokens."""

    text: str


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
    Tool("count_tokens", "Counts the tokens of a text as the served model sees them.", CountTokens),
    Tool("list_models", "Lists the served model with its context length and how it is held in memory.", ListModels),
)


def schema_of(kind: type) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    (root,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    found: dict[str, Any] = parts.pop(root["$ref"].rsplit("/", 1)[-1])
    return {**found, "$defs": parts} if parts else found


class Mcp:
    """The SDK's server for one Front, and the task in which it lives. Made at the first request."""

    def __init__(self, front: Front) -> None:
        """Raises: UnsupportedError when the SDK is not installed."""
        try:
            import mcp_types as types
            from mcp.server.lowlevel import Server
            from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
        except ImportError:
            raise UnsupportedError(
                "this runner has no MCP server: the package mcp is not installed", "pip install 'paddock[mcp]'", what="mcp", supported=[]
            ) from None
        self._types, self._front = types, front
        server: Any = Server("paddock", on_list_tools=self._list, on_call_tool=self._call)
        self._manager = StreamableHTTPSessionManager(server, stateless=True, json_response=True, max_request_body_size=front.max_body_bytes)
        loop = asyncio.get_running_loop()
        self._is_running: asyncio.Future[None] = loop.create_future()
        self._task = loop.create_task(self._live())

    async def serve(self, exchange: Exchange) -> None:
        """One HTTP request."""
        await asyncio.shield(self._is_running)
        await exchange.hand_over(self._manager.handle_request, {CLIENT: exchange.client})

    def close(self) -> None:
        """Ends the task."""
        self._task.cancel()

    async def _live(self) -> None:
        async with self._manager.run():
            self._is_running.set_result(None)
            await asyncio.get_running_loop().create_future()

    async def _list(self, context: Any, params: Any) -> Any:
        tools = [self._types.Tool(name=t.name, description=t.description, input_schema=schema_of(t.kind)) for t in TOOLS]
        return self._types.ListToolsResult(tools=tools)

    async def _call(self, context: Any, params: Any) -> Any:
        client = context.request.scope.get(CLIENT, 0) if context.request is not None else 0
        try:
            found = await call(self._front, params.name, params.arguments or {}, Caller(client))
        except PaddockError as error:
            return self._result(str(error), None, True)
        return self._result(ENCODER.encode(found).decode() if not isinstance(found.get("text"), str) else found["text"], found, False)

    def _result(self, text: str, value: Mapping[str, Any] | None, is_error: bool) -> Any:
        content: list[Any] = [self._types.TextContent(type="text", text=text)]
        return self._types.CallToolResult(content=content, structured_content=value, is_error=is_error)


async def call(front: Front, name: str, arguments: Mapping[str, Any], whose: Caller) -> dict[str, Any]:
    """A tool's result. Raises: UsageError for an unknown tool or wrong arguments; what the turn raises."""
    tool = next((t for t in TOOLS if t.name == name), None)
    if tool is None:
        raise UsageError(f"there is no tool {name[:100]!r}", f"the tools are {', '.join(t.name for t in TOOLS)}")
    try:
        given: Any = msgspec.convert(arguments, tool.kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {error}") from None
    front.require_ready()
    if isinstance(given, Generate):
        return await _generate(front, given, whose)
    if isinstance(given, CountTokens):
        return {"tokens": len(await front.served.text_prompt(given.text))}
    served = front.served
    return {"models": [{"name": served.name, "max_ctx_tokens": served.max_ctx_tokens, **served.facts}]}


async def _generate(front: Front, given: Generate, whose: Caller) -> dict[str, Any]:
    if (given.prompt is None) == (given.messages is None):
        raise UsageError("generate: send either prompt or messages")
    messages = given.messages if given.messages is not None else [{"role": "user", "content": given.prompt}]
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UsageError("generate: every message has a role and a content, both text")
    if given.system:
        messages = [{"role": "system", "content": given.system}, *messages]
    if given.max_tokens < 1:
        raise UsageError("generate: max_tokens must be at least 1")
    prompt, text = await front.served.chat_prompt(messages, None, {})
    wish = Wish(max_tokens=min(given.max_tokens, max(1, front.served.max_ctx_tokens - len(prompt))), temperature=given.temperature, seed=given.seed)
    reading = Reading.of(front.served, text, {})
    if given.json_schema is not None:
        held = Held(of_schema(given.json_schema), param="json_schema")
        reading = replace(reading, guide=await held.guide(front, wish, text))
    collector = Collector(1)
    turn = Turn(front.desk, front.served, [prompt], wish, collector, whose, reading)
    try:
        turn.start()
        await turn.ended
    finally:
        turn.abandon()
        front.metrics.on_turn(turn.usage, turn.timing)
    (answer,) = collector.answers
    usage = turn.usage
    found: dict[str, Any] = {"text": answer.text, "finish_reason": answer.end.reason}
    if answer.reasoning:
        found["reasoning"] = answer.reasoning
    return {**found, "prompt_tokens": usage.prompt_tokens, "output_tokens": usage.output_tokens}


async def post_mcp(front: Front, exchange: Exchange) -> None:
    """POST /mcp: messages of the Model Context Protocol."""
    if front.mcp is None:
        front.mcp = Mcp(front)
    await front.mcp.serve(exchange)


async def get_mcp(front: Front, exchange: Exchange) -> None:
    """GET /mcp: no stream of the server's own is offered."""
    await post_mcp(front, exchange)
