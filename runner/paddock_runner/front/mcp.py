"""/mcp: the runner as a server of the Model Context Protocol, over streamable HTTP by the official SDK (an optional package).

The tools are in mcp_tools.py. Each request stands for itself: no sessions are kept, and no stream of the server's own is offered (GET is a 405, as the protocol has it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import Cancelled, PaddockError, UnsupportedError
from ..version import our_version
from .http import ENCODER, Exchange
from .mcp_tools import TOOLS, call, schema_of
from .problem import LEFT
from .service import Front

EXCHANGE = "paddock.exchange"
MAX_BODY_BYTES = 4 << 20
"""The SDK makes objects of all of a message, several times over: of 15 MB for 3 s, in which nobody is served."""


class McpRequest(msgspec.Struct, kw_only=True):
    """A JSON-RPC message of the Model Context Protocol."""

    jsonrpc: str
    method: str
    id: str | int | None = None
    params: dict[str, Any] | None = None


SHAPES = {"post_mcp": McpRequest}


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
        server: Any = Server("paddock", version=our_version(), on_list_tools=self._list, on_call_tool=self._call)
        self._manager = StreamableHTTPSessionManager(server, stateless=True, json_response=True, max_request_body_size=min(front.max_body_bytes, MAX_BODY_BYTES))
        loop = asyncio.get_running_loop()
        self._is_running: asyncio.Future[None] = loop.create_future()
        self._task = loop.create_task(self._live())

    async def serve(self, exchange: Exchange) -> None:
        """One HTTP request."""
        await asyncio.shield(self._is_running)
        await exchange.hand_over(self._manager.handle_request, {EXCHANGE: exchange})

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
        exchange: Exchange = context.request.scope[EXCHANGE]
        try:
            found = await call(self._front, exchange, params.name, params.arguments or {})
        except PaddockError as error:
            if isinstance(error, Cancelled):
                exchange.log["end"] = LEFT
            return self._result(str(error), None, True)
        return self._result(ENCODER.encode(found).decode() if not isinstance(found.get("text"), str) else found["text"], found, False)

    def _result(self, text: str, value: Mapping[str, Any] | None, is_error: bool) -> Any:
        content: list[Any] = [self._types.TextContent(type="text", text=text)]
        return self._types.CallToolResult(content=content, structured_content=value, is_error=is_error)


async def post_mcp(front: Front, exchange: Exchange) -> None:
    """POST /mcp: messages of the Model Context Protocol."""
    if front.mcp is None:
        front.mcp = Mcp(front)
    await front.mcp.serve(exchange)
