"""Tools of MCP servers for a chat: started or reached by the official SDK (an optional package), listed, and called one by one.

Knows nothing of consent: whoever calls has asked the user. What a server says is text of a stranger.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paddock_runner.errors import FileError, PaddockError, UnsupportedError, UsageError

from paddock_manager import paths

MAX_TOOLS = 128
MAX_RESULT_CHARACTERS = 64 << 10
START_S, CALL_S = 60.0, 300.0
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


class McpError(PaddockError):
    """A server of tools cannot be used (facts: server)."""

    code = "mcp_error"


@dataclass(frozen=True, slots=True)
class ToolServer:
    """One server: a command that is started and spoken to over its standard streams, or a URL (streamable HTTP)."""

    name: str
    command: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def read_servers(told: str) -> list[ToolServer]:
    """The servers of a configuration file ({"mcpServers": {name: {command, args, env, cwd} or {url, headers}}}), or of a URL.

    Raises: FileError when the file cannot be read, UsageError naming what is wrong in it.
    """
    if told.startswith(("http://", "https://")):
        return [ToolServer("mcp", url=told)]
    path = paths.expanded(told)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise FileError(f"{path}: {why}", "--mcp takes a JSON file with mcpServers, or a URL") from None
    found = body.get("mcpServers", body.get("servers")) if isinstance(body, dict) else None
    if not isinstance(found, dict) or not found:
        raise UsageError(f"{path} names no servers", 'write {"mcpServers": {"NAME": {"command": ..., "args": [...]}}}')
    return [
        _server(path, name, spec)
        for name, spec in found.items()
        if not (isinstance(spec, dict) and spec.get("disabled"))
    ]


def _server(path: Path, name: str, spec: Any) -> ToolServer:
    spec = spec if isinstance(spec, dict) else {}
    command, url, arguments = spec.get("command"), spec.get("url"), spec.get("args", [])
    if isinstance(command, str) == isinstance(url, str):
        raise UsageError(f"{path}: the server {name!r} needs either a command or a url")
    if not isinstance(arguments, list) or not all(isinstance(a, str) for a in arguments):
        raise UsageError(f"{path}: args of the server {name!r} must be a list of texts")
    tables = {key: spec.get(key) or {} for key in ("env", "headers")}
    for key, table in tables.items():
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            raise UsageError(f"{path}: {key} of the server {name!r} must hold texts")
    return ToolServer(
        name, command or "", tuple(arguments), tables["env"], spec.get("cwd"), url or "", tables["headers"]
    )


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. name: as the model knows it; `known` as its server does."""

    name: str
    server: str
    known: str
    description: str
    schema: dict[str, Any]

    @property
    def as_function(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.schema},
        }


class Toolbox:
    """Open servers and their tools. A thread of its own lets the SDK live in an event loop."""

    def __init__(self, servers: list[ToolServer]) -> None:
        """Raises: UnsupportedError without the SDK, McpError naming the server that does not answer."""
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise UnsupportedError(
                "the package mcp is not installed", "pip install 'paddock[mcp]'", what="mcp", supported=[]
            ) from None
        self.tools: dict[str, Tool] = {}
        self._servers = servers
        self._clients: dict[str, Any] = {}
        self._ready: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="mcp")
        self._thread.start()
        try:
            self._ready.result(START_S)
        except Late:
            self.close()
            raise McpError(f"the tools were not there within {START_S:.0f} s") from None

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """A tool's result as text, and whether it is an error. Raises: McpError when the server has gone or takes too long."""
        tool = self.tools.get(name)
        if tool is None:
            return f"There is no tool {name}.", True
        client = self._clients[tool.server]
        running = asyncio.run_coroutine_threadsafe(client.call_tool(tool.known, dict(arguments)), self._loop)
        try:
            found = running.result(CALL_S)
        except Late:
            raise McpError(f"{name} took longer than {CALL_S:.0f} s", server=tool.server) from None
        except Exception as error:
            raise McpError(f"{name} failed: {_words(error)}", server=tool.server) from None
        finally:
            running.cancel()
        return _text_of(found), bool(found.is_error)

    def close(self) -> None:
        """Ends the servers that were started."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(10)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except PaddockError as error:
            self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _live(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                for server in self._servers:
                    await self._open(server, stack)
                self._ready.set_result(None)
                await self._end.wait()
        except* PaddockError as group:
            if not self._ready.done():
                raise _first(group) from None

    async def _open(self, server: ToolServer, stack: AsyncExitStack) -> None:
        said = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))  # noqa: SIM115
        try:
            client = await stack.enter_async_context(_client(server, said, stack))
            cursor: str | None = None
            while True:
                listed = await client.list_tools(cursor=cursor)
                for tool in listed.tools:
                    self._add(server.name, tool)
                cursor = listed.next_cursor
                if not cursor:
                    break
        except PaddockError:
            raise
        except Exception as error:
            said.seek(0)
            last = said.read()[-500:].strip()
            raise McpError(
                f"the MCP server {server.name!r} cannot be used: {_words(error)}", last, server=server.name
            ) from None
        self._clients[server.name] = client

    def _add(self, server: str, tool: Any) -> None:
        if len(self.tools) >= MAX_TOOLS:
            raise McpError(f"the servers have more than {MAX_TOOLS} tools", "name fewer servers", server=server)
        plain = "".join(c if c in _NAME else "_" for c in tool.name)[:64]
        name = (
            plain if plain not in self.tools else "".join(c if c in _NAME else "_" for c in f"{server}_{plain}")[-64:]
        )
        self.tools[name] = Tool(name, server, tool.name, tool.description or "", dict(tool.input_schema))


def _client(server: ToolServer, said: IO[str], stack: AsyncExitStack) -> Any:
    import httpx2
    from mcp import Client, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if server.url:
        http = httpx2.AsyncClient(headers=dict(server.headers), timeout=httpx2.Timeout(30.0, read=CALL_S))
        stack.push_async_callback(http.aclose)
        return Client(streamable_http_client(server.url, http_client=http))
    told = StdioServerParameters(
        command=server.command, args=list(server.arguments), env=dict(server.environment), cwd=server.folder
    )
    return Client(stdio_client(told, errlog=said))  # type: ignore[arg-type]


def _text_of(result: Any) -> str:
    """A result's text; what is no text is named. Long results are cut, and say so."""
    parts = [
        part.text if getattr(part, "type", "") == "text" else f"({getattr(part, 'type', 'something')}, not shown)"
        for part in result.content
    ]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if len(text) > MAX_RESULT_CHARACTERS:
        return f"{text[:MAX_RESULT_CHARACTERS]}\n(cut: the result has {len(text)} characters)"
    return text


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _words(error: BaseException) -> str:
    found = _first(error)
    return " ".join(str(found).split())[:300] or type(found).__name__
