"""Bytes to a request, an answer to bytes: one Exchange per HTTP request, over raw ASGI. Knows no vendor and no route."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from ..errors import Cancelled, SlowBody, TooLarge
from .outbox import Outbox, Pipe

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]
Result = TypeVar("Result")

JSON = b"application/json"
PIPE = "paddock.pipe"
"""In a request's scope: see Exchange.pipe."""
IGNORED = b"x-paddock-ignored-fields"
SSE = b"text/event-stream; charset=utf-8"
BODY_GRACE_S = 30.0
MIN_BODY_BYTES_PER_S = 16 << 10
"""A body has the grace, and as long more as it would take at this rate."""
ENCODER = msgspec.json.Encoder()
NO_OUTBOX = Outbox()
"""For exchanges that nobody gave one: it is never told to hold."""
_REQUEST_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")


class Rest(Generic[Result]):
    """The rest of an awaitable whose first step was taken outside a task."""

    __slots__ = ("_first", "_steps")

    def __init__(self, steps: Generator[Any, Any, Result], first: Any) -> None:
        self._steps, self._first = steps, first

    def __await__(self) -> Generator[Any, Any, Result]:
        yield self._first
        return (yield from self._steps)


def begin(work: Awaitable[Result]) -> Result | Rest[Result]:
    """Takes the first step of some work: what comes of it where that was all, else the rest, to be awaited."""
    steps = work.__await__()
    try:
        return Rest(steps, next(steps))
    except StopIteration as end:
        found: Result = end.value
        return found


class Exchange:
    """One request and its answer.

    client: the caller's number, once the key was checked. received_ns: time.monotonic_ns() of arrival. log: facts for this request's one log line.
    ignored: fields of the request that have no effect; the answer names them. extra: headers of the answer, whatever it is.
    """

    __slots__ = (
        "_headers",
        "_receive",
        "_scope",
        "_send",
        "client",
        "extra",
        "ignored",
        "is_complete",
        "is_started",
        "log",
        "method",
        "outbox",
        "path",
        "received_ns",
        "request_id",
        "status",
        "weight",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.received_ns = time.monotonic_ns()
        self._scope, self._receive, self._send = scope, receive, send
        self.outbox = NO_OUTBOX
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = _request_id(self._headers.get(b"x-request-id", b""))
        self.extra: Headers = [(b"x-request-id", self.request_id.encode())]
        self.ignored: list[str] = []
        self.log: dict[str, Any] = {}
        self.client = 0
        self.weight = 1
        self.status = 0
        self.is_started = False
        self.is_complete = False

    def header(self, name: bytes) -> str:
        """A header's value ("" when it is not there), by its lower-case name."""
        return self._headers.get(name, b"").decode("latin-1").strip()

    def header_count(self, name: bytes) -> int:
        """How many times a header was sent."""
        return sum(1 for key, _ in self._scope["headers"] if key == name)

    @property
    def query(self) -> dict[str, str]:
        """The query string's fields, last one wins."""
        return dict(parse_qsl(self._scope.get("query_string", b"").decode("latin-1"), max_num_fields=64))

    async def body(self, max_bytes: int) -> bytes:
        """The whole body; where it is refused, the connection is closed behind the answer.

        Raises: TooLarge as soon as it is, SlowBody when it comes too slowly, Cancelled when the client left while sending.
        """
        said = self.header(b"content-length")
        try:
            if said.isdigit() and int(said) > max_bytes:
                raise _too_large(int(said), max_bytes)
            message = begin(self._receive())
            if not isinstance(message, Rest) and not message.get("more_body", False):
                _require_client(message)
                body: bytes = message.get("body", b"")  # it came with the head
                if len(body) > max_bytes:
                    raise _too_large(len(body), max_bytes)
                return body
            return await self._parts(message, max_bytes)
        except (TooLarge, SlowBody):
            self.extra.append((b"connection", b"close"))
            raise

    async def _parts(self, message: Message | Rest[Message], max_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        begun, size, parts = loop.time(), 0, list[bytes]()
        try:
            async with asyncio.timeout(BODY_GRACE_S) as limit:
                while True:
                    if isinstance(message, Rest):
                        message = await message
                    _require_client(message)
                    part = message.get("body", b"")
                    size += len(part)
                    if size > max_bytes:
                        raise _too_large(size, max_bytes)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
                    limit.reschedule(begun + BODY_GRACE_S + size / MIN_BODY_BYTES_PER_S)
                    message = await self._receive()
        except TimeoutError:
            waited_s = loop.time() - begun
            raise SlowBody(
                f"only {size} bytes of the request's body came within {waited_s:.0f} s", "send the body in one go",
                size_bytes=size, waited_s=round(waited_s),
            ) from None  # fmt: skip

    async def until_gone(self) -> None:
        """Returns when the client has left (or the answer is complete). Only after `body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers | None = None
    ) -> None:
        """Sends a whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, content_type, [length, *(headers or [])])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.is_complete = True

    async def answer_json(self, value: object, status: int = 200) -> None:
        """Sends a value (dicts, lists, msgspec structs) as JSON."""
        await self.answer(status, ENCODER.encode(value))

    async def start(self, status: int, content_type: bytes, headers: Headers) -> None:
        """Sends status and headers."""
        self.is_started, self.status = True, status
        if self.ignored:
            self.extra.append((IGNORED, ",".join(self.ignored).encode()))
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", content_type), *headers, *self.extra],
            }
        )

    async def hand_over(self, application: Application, facts: dict[str, Any]) -> None:
        """Has an ASGI application answer. facts: what it finds in its scope."""

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.is_started, self.status = True, message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *self.extra]}
            elif not message.get("more_body", False):
                self.is_complete = True
            await self._send(message)

        await application({**self._scope, **facts}, self._receive, send)

    def pipe(self) -> Pipe | None:
        """The way for parts of a started answer past `send_part`, where the server has one and the answer is in chunks."""
        found: Callable[[], Pipe | None] | None = self._scope.get(PIPE)
        return found() if found is not None and self.method != "HEAD" else None

    def send_part(self, data: bytes, is_last: bool = False) -> Awaitable[None]:
        """The coroutine that sends a part of a started answer; it waits while the client does not read."""
        self.is_complete = is_last
        return self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _request_id(given: bytes) -> str:
    """The client's own request id where it is harmless, else a new one."""
    text = given.decode("latin-1")
    if 0 < len(text) <= 128 and _REQUEST_ID_CHARACTERS.issuperset(text):
        return text
    return "req_" + secrets.token_hex(12)


def _require_client(message: Message) -> None:
    if message["type"] == "http.disconnect":
        raise Cancelled("the client left before its request was complete")


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(
        f"the request's body has {size} bytes or more, the limit is {limit}", "raise --max-body-mib",
        size_bytes=size, max_bytes=limit,
    )  # fmt: skip
