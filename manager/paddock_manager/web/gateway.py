"""One port for several models: checks who calls, finds the runner of the request's model (starting it), and passes bytes through.

An ASGI application. Management is not on this port: only what runners answer for a model, lists of models and health.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from paddock_runner.errors import Forbidden, PaddockError, ShuttingDown, TooLarge, Unauthorized, UsageError

from paddock_manager.fleet.client import Unreachable
from paddock_manager.fleet.keys import Ring
from paddock_manager.fleet.state import Server
from paddock_manager.web import problem
from paddock_manager.web.own import LISTS, OPEN, Own
from paddock_manager.web.pool import Pool

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
MAX_BODY_BYTES = 32 << 20
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
}
PASSED = {
    "/api/chat", "/api/generate", "/api/show", "/api/pull", "/api/embed", "/api/embeddings",
    "/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score",
}  # fmt: skip
"""What runners answer beside /v1/*."""
POSTED = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/messages"}
LOCAL_NAMES = ("localhost", "ip6-localhost", "host.docker.internal")
DESCRIPTION = "/openapi.json"
KEY_HEADERS = ("authorization", "x-api-key", "api-key")


class Gateway:
    """The application. key: what runners are asked with; "": everybody who reaches the port may use it. ring: whose keys are let in.

    hosts, origins: further ones that requests may name.
    """

    def __init__(self, pool: Pool, key: str, ring: Ring, hosts: Iterable[str] = (), origins: Iterable[str] = ()):
        self.pool, self._key, self._ring = pool, key, ring
        self._own = Own(pool, int(time.time()))
        self._names = {*LOCAL_NAMES, socket.gethostname().lower(), *(name.lower() for name in hosts)}
        self._origins = {origin.rstrip("/").lower() for origin in origins}
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
        started = False
        origin = ""

        async def guarded(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *_allowing(origin)]
            if scope["method"] != "HEAD" or message["type"] != "http.response.body":
                await send(message)
            elif not message.get("more_body"):
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
            origin = self._check_origin(headers)
            await self._route(scope, headers, receive, guarded)
        except PaddockError as error:
            if not started:
                body = problem.body_of(error, str(scope["path"]))
                await _answer(guarded, error.http_status, body, problem.headers_of(error))

    async def _route(self, scope: Scope, headers: dict[str, str], receive: Receive, send: Send) -> None:
        path, method = str(scope["path"]), str(scope["method"])
        if method == "OPTIONS":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        is_read = method in ("GET", "HEAD")
        if path in OPEN and is_read:
            await _answer(send, 200, self._own.open(path))
            return
        if path == DESCRIPTION and is_read:
            await _answer(send, 200, await self._description())
            return
        self._check_key(headers)
        if path in LISTS and is_read:
            await _answer(send, 200, self._own.listed(path))
        elif path.startswith("/v1/models/") and is_read:
            await _answer(send, 200, self._own.model(path))
        elif method == "POST" and (path in PASSED or (path.startswith("/v1/") and not path.startswith("/v1/models"))):
            body = await _read_body(receive, headers)
            if path == "/api/show":
                await _answer(send, 200, await asyncio.to_thread(self._own.show, self._model_of(body)))
            else:
                await self._forward(scope, headers, body, receive, send)
        elif path in OPEN | LISTS | PASSED | POSTED:
            raise problem.WrongMethod(f"{path[:200]} does not take {method[:20]}")
        else:
            raise problem.UnknownPath(f"there is nothing at {path[:200]}", "POST /v1/chat/completions and its like, GET /v1/models")

    async def _description(self) -> dict[str, Any]:
        """What a runner says of its API: all say the same. Raises: UnknownPath while none is loaded, Unreachable."""
        server = next((e.server for e in self.pool.entries.values() if e.server is not None), None)
        if server is None:
            raise problem.UnknownPath("no model is loaded, and a loaded one describes the API", "ask one first: POST /v1/chat/completions")
        try:
            answer = await self._client.get(f"{server.url}{DESCRIPTION}", headers={"authorization": f"Bearer {self._key}"} if self._key else {})
            body: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unreachable(f"the runner of {server.name} does not answer: {error}", f"`paddock logs {server.name}` shows why") from None
        return body

    def _check_origin(self, headers: dict[str, str]) -> str:
        """Host and Origin must be addresses or names of this machine: a web page elsewhere cannot be either. Returns Origin. Raises: Forbidden."""
        host = _host_of("//" + headers.get("host", ""))
        if not (host in self._names or _is_address(host)):
            hint = "use its address, or localhost; `paddock serve --runner allow-host=NAME` allows another name"
            raise Forbidden(f"the host {host[:80]!r} is not this machine", hint)
        origin = headers.get("origin", "")
        is_ours = _host_of(origin) in self._names or _is_loopback(_host_of(origin)) or origin.rstrip("/").lower() in self._origins
        if origin and not is_ours:
            raise Forbidden(f"the origin {origin[:80]!r} may not call this server", "`paddock serve --runner allow-origin=ORIGIN` lets it")
        return origin

    def _check_key(self, headers: dict[str, str]) -> None:
        """Raises: Unauthorized."""
        if not self._key:
            return
        if not self._ring.lets_in([key for h in KEY_HEADERS if (key := _bare(headers.get(h, "").strip()))]):
            raise Unauthorized("no key, or a wrong one", "send `Authorization: Bearer KEY`; `paddock key` prints it")

    def _model_of(self, body: bytes) -> str:
        """The model that a request names; the only one where there is one and none is named. Raises: UsageError."""
        try:
            asked = json.loads(body)
        except RecursionError:
            raise UsageError("the body is nested too deeply") from None
        except ValueError as error:
            raise UsageError(f"the body is not JSON: {error}") from None
        if not isinstance(asked, dict):
            raise UsageError("the body is not a JSON object")
        name = asked.get("model") or asked.get("name") or (next(iter(self.pool.entries)) if len(self.pool.entries) == 1 else "")
        if not isinstance(name, str) or not name:
            raise UsageError("the body names no model", 'send "model"; GET /v1/models lists them', param="model")
        return name if name in self.pool.entries else name.removesuffix(":latest")  # Ollama's clients append it

    async def _forward(self, scope: Scope, headers: dict[str, str], body: bytes, receive: Receive, send: Send) -> None:
        """Find the runner, pass the request on, stream the answer; hang up on the runner when the client has gone."""
        if self.is_closing:
            raise ShuttingDown("this server is being stopped")
        name = self._model_of(body)
        server = await _unless_gone(self.pool.acquire(name), receive)
        if server is None:
            return
        try:
            work = asyncio.ensure_future(self._pass(server, scope, headers, body, send))
            gone = asyncio.ensure_future(_until_gone(receive))
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not work.done():
                work.cancel()
            try:
                await work
            except asyncio.CancelledError:
                if not gone.done():
                    raise
        finally:
            await self.pool.release(name)

    async def _pass(self, server: Server, scope: Scope, headers: dict[str, str], body: bytes, send: Send) -> None:
        """One exchange with a runner. Raises: Unreachable."""
        kept = {k: v for k, v in headers.items() if k not in HOP and k not in (*KEY_HEADERS, "origin")}
        if self._key:
            kept["authorization"] = f"Bearer {self._key}"  # however the client spelt it
        query = scope.get("query_string", b"").decode("latin-1")
        url = f"{server.url}{scope['path']}" + (f"?{query}" if query else "")
        is_begun = False
        try:
            async with self._client.stream("POST", url, headers=kept, content=body) as answer:
                out = [
                    (k.lower().encode(), v.encode())
                    for k, v in answer.headers.multi_items()
                    if k.lower() not in HOP or k.lower() == "content-length"
                ]
                await send({"type": "http.response.start", "status": answer.status_code, "headers": out})
                is_begun = True
                async for chunk in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.HTTPError as error:
            if is_begun:
                raise ConnectionResetError(f"{server.name} broke off its answer") from error
            raise Unreachable(
                f"the runner of {server.name} does not answer: {error}", f"`paddock logs {server.name}` shows why"
            ) from None

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


async def _unless_gone(wanted: Any, receive: Receive) -> Server | None:
    """A runner, or None when the client hung up while it was waited for (the runner is then not counted as used)."""
    work = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(_until_gone(receive))
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


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(receive: Receive, headers: dict[str, str]) -> bytes:
    """The whole body. Raises: TooLarge, UsageError when the client hangs up."""
    told = headers.get("content-length", "0")
    if told.isdigit() and int(told) > MAX_BODY_BYTES:
        raise TooLarge(
            f"the body has {told} bytes, at most {MAX_BODY_BYTES} are taken",
            size_bytes=int(told),
            max_bytes=MAX_BODY_BYTES,
        )
    out = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise UsageError("the client hung up")
        out += message.get("body", b"")
        if len(out) > MAX_BODY_BYTES:
            raise TooLarge(f"the body is over {MAX_BODY_BYTES} bytes", size_bytes=len(out), max_bytes=MAX_BODY_BYTES)
        if not message.get("more_body"):
            return bytes(out)


async def _answer(send: Send, status: int, body: dict[str, Any] | str, extra: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    raw = body.encode() if isinstance(body, str) else json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    kind = b"text/plain; charset=utf-8" if isinstance(body, str) else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(raw)).encode()), *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw, "more_body": False})


def _allowing(origin: str) -> list[tuple[bytes, bytes]]:
    """The headers that let a page of this machine read the answer."""
    if not origin:
        return []
    return [
        (b"access-control-allow-origin", origin.encode()),
        (b"access-control-allow-headers", b"authorization, content-type, x-api-key, api-key, x-session-id, anthropic-version, anthropic-beta"),
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-expose-headers", b"x-request-id, x-paddock-ignored-fields, x-paddock-cache, retry-after-ms"),
        (b"vary", b"origin"),
    ]


def _bare(value: str) -> str:
    """A key without the word Bearer."""
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else value


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def stamp() -> str:
    """The time, for log lines."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
