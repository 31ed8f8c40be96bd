"""A server of tools over standard streams, by the official SDK: add, shout (says a thing that drives terminals) and fail. Run as a script."""

from __future__ import annotations

import asyncio
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


async def list_tools(context: Any, params: Any) -> Any:
    """The tools."""
    names = {"add": "Adds two numbers", "shout": "Says \x1b[31mred", "fail": "Fails"}
    return types.ListToolsResult(tools=[types.Tool(name=n, description=d, input_schema=NUMBERS) for n, d in names.items()])


async def call_tool(context: Any, params: Any) -> Any:
    """A result, or an error."""
    given = params.arguments or {}
    text = str(given["a"] + given["b"]) if params.name == "add" else "x" * 100_000 if params.name == "shout" else "it broke"
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=params.name == "fail")


async def main() -> None:
    """Serves until standard input closes."""
    server: Any = Server("adder", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


asyncio.run(main())
