"""Bytes to a request, an answer to bytes: one Exchange per HTTP request, over raw ASGI. Knows no vendor and no route."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from ..edge.body import Message, Receive, Scope, Send, whole
from ..edge.ids import HEADER, id_headers, request_id
from ..errors import SlowBody, TooLarge
from .outbox import Outbox, Pipe

Headers = list[tuple[bytes, bytes]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]

JSON = b"application/json"
PIPE = "paddock.pipe"
"""In a request's scope: see Exchange.pipe."""
IGNORED = b"x-paddock-ignored-fields"
NO_CONTENT = 204
"""Such an answer has no length (RFC 9110, 8.6)."""
MAX_IGNORED = 32
"""Fields that the header names: clients take no head of any length."""
SSE = b"text/event-stream; charset=utf-8"
ENCODER = msgspec.json.Encoder()
NO_OUTBOX = Outbox()
"""For exchanges that nobody gave one: it is never told to hold."""


class Exchange:
    """One request and its answer.

    client: the caller's number, once the key was checked. received_ns: time.monotonic_ns() of arrival. log: facts for this request's one log line.
    large_bytes: of its body, where that is large. ignored: fields of the request that have no effect; the answer names them. extra: headers of the answer, whatever it is.
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
        "large_bytes",
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
        self.request_id = request_id(self._headers.get(HEADER, b"").decode("latin-1"))
        self.extra: Headers = id_headers(self.request_id, self.path)
        self.ignored: list[str] = []
        self.log: dict[str, Any] = {}
        self.large_bytes = 0
        self.client = 0
        self.weight = 1
        self.status = 0
        self.is_started = False
        self.is_complete = False

    def header(self, name: bytes) -> str:
        """A header's value ("" when it is not there), by its lower-case name."""
        return self._headers.get(name, b"").decode("latin-1").strip()

    def all_of(self, name: bytes) -> list[str]:
        """The values of a header that may have been sent more than once."""
        return [value.decode("latin-1").strip() for key, value in self._scope["headers"] if key == name]

    @property
    def query(self) -> dict[str, str]:
        """The query string's fields, last one wins."""
        return dict(parse_qsl(self._scope.get("query_string", b"").decode("latin-1"), max_num_fields=64))

    async def body(self, max_bytes: int) -> bytes:
        """The whole body; where it is refused, the connection is closed behind the answer.

        Raises: TooLarge as soon as it is, SlowBody when it comes too slowly, Cancelled when the client left while sending.
        """
        try:
            return await whole(self._receive, self.header(b"content-length"), max_bytes, self.header(b"content-encoding"))
        except (TooLarge, SlowBody):
            self.extra.append((b"connection", b"close"))
            raise

    async def until_gone(self) -> None:
        """Returns when the client has left (or the answer is complete). Only after `body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers | None = None
    ) -> None:
        """Sends a whole answer."""
        length = [] if status == NO_CONTENT else [(b"content-length", str(len(body)).encode())]
        await self.start(status, content_type, [*length, *(headers or [])])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.is_complete = True

    async def answer_json(self, value: object, status: int = 200) -> None:
        """Sends a value (dicts, lists, msgspec structs) as JSON."""
        await self.answer(status, ENCODER.encode(value))

    async def start(self, status: int, content_type: bytes, headers: Headers) -> None:
        """Sends status and headers."""
        self.is_started, self.status = True, status
        if self.ignored:
            n_more = len(self.ignored) - MAX_IGNORED
            named = self.ignored[:MAX_IGNORED] + [f"and {n_more} more"] * (n_more > 0)
            self.extra.append((IGNORED, ",".join(named).encode()))
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
