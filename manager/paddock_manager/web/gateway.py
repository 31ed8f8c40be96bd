"""One port for several models: checks who calls, finds the runner of the request's model (starting it), and passes bytes through.

An ASGI application. Management is not on this port: only what runners answer for a model, lists of models, health and metrics.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, quote

import httpx
from paddock_runner.edge import lists, problem
from paddock_runner.edge.auth import ADMIN, INFERENCE, KEY_HEADERS, Caller, Guard, allowing
from paddock_runner.edge.body import Receive, Scope, Send
from paddock_runner.edge.counts import CONTENT_TYPE
from paddock_runner.edge.ids import ANTHROPICS, HEADER
from paddock_runner.edge.problem import UnknownResponse
from paddock_runner.errors import PaddockError, ShuttingDown, UsageError

from paddock_manager.fleet.client import Unreachable
from paddock_manager.fleet.spawn import RunnerDied
from paddock_manager.fleet.state import Server
from paddock_manager.web import exchange
from paddock_manager.web.call import LEFT, Call
from paddock_manager.web.metrics import Metrics
from paddock_manager.web.own import LISTS, OPEN, Own
from paddock_manager.web.pool import Pool

HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
    "content-length",
    "expect",
}
PASSED = {
    "/api/chat", "/api/generate", "/api/show", "/api/pull", "/api/embed", "/api/embeddings",
    "/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/mcp",
}  # fmt: skip
"""What runners answer beside /v1/*."""
POSTED = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/messages", "/v1/messages/count_tokens",
}  # fmt: skip
DESCRIPTION, METRICS, MODEL, RESPONSES, MCP = "/openapi.json", "/metrics", "/v1/models/", "/v1/responses/", "/mcp"
KNOWN = OPEN | LISTS | PASSED | POSTED | {DESCRIPTION, METRICS}
OURS = {HEADER.decode(), ANTHROPICS.decode()}
"""Headers that call and runner have alike."""
KEEP, IGNORED = "keep_alive", "x-paddock-ignored-fields"
EMPTY = {"/api/chat": "messages", "/api/generate": "prompt"}
"""Where requests without this ask for a model to be loaded, or unloaded."""
STATE_S = 2.0
"""Within this a runner tells its numbers, or they are left out."""


class Gateway:
    """The application. key: tells what runners are asked with where the caller has none; "": everybody who reaches the port may use it."""

    def __init__(self, pool: Pool, key: Callable[[], str], guard: Guard, max_body_bytes: int):
        self.pool, self._key, self._guard, self._max_body_bytes = pool, key, guard, max_body_bytes
        self._own = Own(pool, int(time.time()))
        self._metrics = Metrics(pool)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._idle: asyncio.Task[None] | None = None
        self.is_closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the server's own start and end."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        call, begun = Call(scope, receive, send), time.monotonic()
        self._metrics.in_flight += 1
        try:
            origin = self._guard.check_origin(call.all_of("host"), call.header("origin"))
            call.extra += allowing(origin, call.header("access-control-request-headers"))
            await self._route(call)
        except PaddockError as error:
            if isinstance(error, RunnerDied):
                error.hint = ""  # it quotes the log, which is for the owner of this machine
            await _refuse(call, error)
        except Exception as fault:
            self.pool.log(f"fault in {call.request_id}: {''.join(traceback.format_exception(fault))}")
            await _refuse(call, PaddockError(problem.INTERNAL))
        finally:
            self._metrics.in_flight -= 1
            route = call.path if call.path in KNOWN else next((r for r in (MODEL, RESPONSES) if call.path.startswith(r)), "unknown")
            self._metrics.on_request(route, call.status or LEFT, time.monotonic() - begun, call.has_left)

    async def _route(self, call: Call) -> None:
        path = call.path
        if call.method == "OPTIONS":
            await call.answer(204, b"")
        elif path in OPEN and call.is_read:
            await call.answer(200, self._own.open(path))
        elif path == DESCRIPTION and call.is_read:
            await call.answer(200, await self._own.description())
        else:
            caller = self._guard.check_key([call.header(name) for name in KEY_HEADERS], ADMIN if path == METRICS else INFERENCE)
            await self._route_known(call, caller)

    async def _route_known(self, call: Call, caller: Caller) -> None:
        """A request of somebody who may ask."""
        path = call.path
        if path in LISTS and call.is_read:
            await call.answer(200, self._own.listed(path))
        elif path.startswith(MODEL) and path != MODEL and call.is_read:
            await call.answer(200, self._own.model(path))
        elif path == METRICS and call.is_read:
            await call.answer(200, self._metrics.text(await self._runners_metrics()).encode(), CONTENT_TYPE)
        elif path.startswith(RESPONSES) and call.method in ("GET", "DELETE"):
            await self._stored(call, caller)
        elif call.method == "POST" and path in PASSED | POSTED:
            raw = await call.body(self._max_body_bytes)
            if path == "/api/show":
                await call.answer(200, await asyncio.to_thread(self._own.show, self._asked(call, raw)[0]))
            else:
                await self._forward(call, caller, raw)
        elif path in KNOWN:
            raise problem.wrong_method(path, call.method, ["POST"] if path in PASSED | POSTED else ["GET"])
        else:
            raise problem.unknown_path(path, KNOWN)

    async def _runners_metrics(self) -> dict[str, str]:
        """What each loaded runner counts, by model; without those that do not say so in time."""

        async def of(server: Server) -> str:
            try:
                answer = await self._client.get(f"{server.url}{METRICS}", headers=self._bearer(self._key()), timeout=STATE_S)
            except httpx.HTTPError:
                return ""
            return answer.text if answer.status_code == 200 else ""

        servers = self.pool.loaded()
        return dict(zip(servers, await asyncio.gather(*map(of, servers.values())), strict=True))

    async def _stored(self, call: Call, caller: Caller) -> None:
        """A stored response: asked of each loaded runner, since its id tells of no model. Raises: UnknownResponse."""
        path = RESPONSES + quote(call.path.removeprefix(RESPONSES), safe="") + (f"?{call.query}" if call.query else "")
        headers = self._bearer(caller.key or self._key()) | {HEADER.decode(): call.request_id}
        for server in self.pool.loaded().values():
            try:
                answer = await self._client.request(call.method, server.url + path, headers=headers, timeout=STATE_S)
            except (httpx.HTTPError, httpx.InvalidURL):
                continue
            if answer.status_code != 404:
                await call.answer(answer.status_code, answer.content)
                return
        raise UnknownResponse(f"no loaded model has the response {call.path.removeprefix(RESPONSES)[:80]!r}", "responses are kept in memory, by the model that wrote them")

    def _asked(self, call: Call, raw: bytes) -> tuple[str, dict[str, Any]]:
        """The model that a request names (the only one where there is one and none is named), and its body. Raises: UsageError.

        Messages of the Model Context Protocol have no place for it: the path has.
        """
        try:
            asked = json.loads(raw)
        except RecursionError:
            raise UsageError("the body is nested too deeply") from None
        except ValueError as error:
            raise UsageError(f"the body is not JSON: {error}") from None
        if not isinstance(asked, dict):
            raise UsageError("the body is not a JSON object")
        named = dict(parse_qsl(call.query)).get("model") if call.path == MCP else asked.get("model") or asked.get("name")
        name = named or (next(iter(self.pool.entries)) if len(self.pool.entries) == 1 else "")
        if not isinstance(name, str) or not name:
            where, how = ("path", "ask /mcp?model=NAME") if call.path == MCP else ("body", 'send "model"')
            raise UsageError(f"the {where} names no model", f"{how}; GET /v1/models lists them", param="model")
        return name if name in self.pool.entries else lists.plain_name(name), asked

    async def _forward(self, call: Call, caller: Caller, raw: bytes) -> None:
        """Find the runner, pass the request on, stream the answer; hang up on the runner when the client has gone."""
        if self.is_closing:
            raise ShuttingDown("this server is being stopped")
        name, asked = self._asked(call, raw)
        keep_s = lists.keep_s(asked.get(KEEP))
        if keep_s == 0 and call.path in EMPTY and not asked.get(EMPTY[call.path]):
            await self._unload(call, name)
            return
        server = await _unless_gone(self.pool.acquire(name), call)
        if server is None:
            call.has_left = True
            return
        try:
            work = asyncio.ensure_future(self._pass(server, call, caller, raw))
            gone = asyncio.ensure_future(call.until_gone())
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not work.done():
                call.has_left = True
                work.cancel()
            try:
                await work
            except asyncio.CancelledError:
                if not gone.done():
                    raise
        finally:
            self.pool.entries[name].keep_s = keep_s
            await self.pool.release(name)

    async def _unload(self, call: Call, name: str) -> None:
        """Ollama's way to have a model unloaded: a request without a prompt that keeps it for no time. One that is in use is unloaded after that."""
        self.pool.entry(name).keep_s = 0
        await self.pool.stop_idle()
        part = {"message": {"role": "assistant", "content": ""}} if call.path == "/api/chat" else {"response": ""}
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        await call.answer(200, {"model": name, "created_at": now, **part, "done": True, "done_reason": "unload"})

    async def _pass(self, server: Server, call: Call, caller: Caller, raw: bytes) -> None:
        """One exchange with a runner. Raises: Unreachable.

        The runner gets the caller's own key, as a bearer token however it was spelt: by it, it shares its time fairly.
        """
        kept = {k: v for k, v in call.headers.items() if k not in HOP and k not in (*KEY_HEADERS, "origin")}
        kept |= self._bearer(caller.key or self._key()) | {HEADER.decode(): call.request_id}
        path = call.target + (f"?{call.query}" if call.query else "")
        tail, kind = b"", ""
        try:
            async with exchange.post(server.host, server.port, path, kept, raw) as answer:
                out = [
                    (name.encode(), value.encode("latin-1"))
                    for name, told in answer.headers
                    if (name not in HOP or name == "content-length") and name not in OURS and (value := _obeyed(told) if name == IGNORED else told)
                ]
                await call.send({"type": "http.response.start", "status": answer.status, "headers": out})
                kind = answer.header("content-type").partition(";")[0]
                async for part in answer.parts():
                    tail = (tail + part)[-2:]
                    await call.send({"type": "http.response.body", "body": part, "more_body": True})
                await call.send({"type": "http.response.body", "body": b"", "more_body": False})
        except exchange.Broken as error:
            if not call.status:
                raise _silent(server, error) from None
            self.pool.log(f"{server.name} broke off an answer: {error}")
            await _break_off(call, kind, tail, Unreachable(f"{server.name} broke off the answer", f"`paddock logs {server.name}` shows why"))

    @staticmethod
    def _bearer(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"} if key else {}

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._idle = asyncio.create_task(self._watch())
                await send({"type": "lifespan.startup.complete"})
            else:
                self.is_closing = True
                if self._idle is not None:
                    self._idle.cancel()
                await self.pool.stop_all()
                await self._client.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _watch(self) -> None:
        """Look for idle runners."""
        pause = min(5.0, max(0.05, self.pool.idle_s / 4)) if self.pool.idle_s > 0 else 5.0
        while True:
            await asyncio.sleep(pause)
            await self.pool.stop_idle()


async def _refuse(call: Call, error: PaddockError) -> None:
    """The error as the answer, where none has begun."""
    if not call.status:
        await call.answer(error.http_status, problem.body_of(error, problem.vendor_of(call.path), call.request_id), headers=problem.headers_of(error))


async def _unless_gone(wanted: Any, call: Call) -> Server | None:
    """A runner, or None when the client hung up while it was waited for (the runner is then not counted as used)."""
    work = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(call.until_gone())
    await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        gone.cancel()
        found: Server = work.result()
        return found
    work.cancel()
    try:
        await work
    except (asyncio.CancelledError, PaddockError):
        pass
    return None


def _silent(server: Server, error: Exception) -> Unreachable:
    """What is said of a runner that does not answer."""
    return Unreachable(f"the runner of {server.name} does not answer: {error}", f"`paddock logs {server.name}` shows why")


async def _break_off(call: Call, kind: str, tail: bytes, error: PaddockError) -> None:
    """The error as the end of a stream whose events are whole so far; any other answer stays incomplete, so that its connection is cut."""
    vendor = problem.vendor_of(call.path)
    raw = json.dumps(problem.body_of(error, vendor, call.request_id)).encode()
    if kind == "application/x-ndjson" and tail[-1:] in (b"", b"\n"):
        raw += b"\n"
    elif kind == "text/event-stream" and tail in (b"", b"\n\n"):
        raw = (b"event: error\n" if vendor == problem.ANTHROPIC else b"") + b"data: " + raw + b"\n\n"
    else:
        return
    await call.send({"type": "http.response.body", "body": raw, "more_body": False})


def _obeyed(ignored: str) -> str:
    """Fields without effect on a runner, without the one that has one here."""
    return ",".join(name for name in ignored.split(",") if name != KEEP)


def stamp() -> str:
    """The time, for log lines."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
