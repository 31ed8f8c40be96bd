"""One request to the gateway, and its answer."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from paddock_runner.edge import body
from paddock_runner.edge.body import Receive, Scope, Send
from paddock_runner.edge.ids import id_headers, request_id
from paddock_runner.errors import SlowBody, TooLarge

Headers = list[tuple[bytes, bytes]]
LEFT = 499
"""The status of a request whose client went away before there was an answer."""


class Call:
    """The request. target: its path as it was sent. extra: headers of the answer, whatever it is. status: of the answer, 0 before it. has_left: its client went away."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.path, self.method = str(scope["path"]), str(scope["method"])
        self.target: str = (scope.get("raw_path") or self.path.encode()).decode("latin-1").partition("?")[0]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self._pairs = [(k.decode("latin-1").lower(), v.decode("latin-1")) for k, v in scope["headers"]]
        self.headers: dict[str, str] = dict(self._pairs)
        self.receive, self._send = receive, send
        self.request_id = request_id(self.header("x-request-id"))
        self.extra: Headers = id_headers(self.request_id, self.path)
        self.status = 0
        self.has_left = False

    @property
    def is_read(self) -> bool:
        """Whether it asks to be told something."""
        return self.method in ("GET", "HEAD")

    def header(self, name: str) -> str:
        """A header's value, "" where it was not sent."""
        return self.headers.get(name, "").strip()

    def all_of(self, name: str) -> list[str]:
        """The values of a header that may have been sent more than once."""
        return [value.strip() for key, value in self._pairs if key == name]

    async def body(self, max_bytes: int) -> bytes:
        """The whole body; where it is refused, the connection is closed behind the answer. Raises: as edge.body.whole."""
        try:
            return await body.whole(self.receive, self.header("content-length"), max_bytes, self.header("content-encoding"))
        except (TooLarge, SlowBody):
            self.extra.append((b"connection", b"close"))
            raise

    async def until_gone(self) -> None:
        """Returns when the client has left (or the answer is complete). Only after `body`."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """A part of the answer; to HEAD, without what is in it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self.extra]
        elif self.method == "HEAD":
            if message.get("more_body"):
                return
            message = {**message, "body": b""}
        await self._send(message)

    async def answer(self, status: int, told: dict[str, Any] | str | bytes, kind: bytes = b"application/json", headers: Headers | None = None) -> None:
        """A whole answer: JSON of a dict, plain text of words."""
        if isinstance(told, str):
            kind = b"text/plain; charset=utf-8"
        raw = told if isinstance(told, bytes) else told.encode() if isinstance(told, str) else json.dumps(told, ensure_ascii=False).encode("utf-8", "replace")
        length = (b"content-length", str(len(raw)).encode())
        await self.send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), length, *(headers or [])]})
        await self.send({"type": "http.response.body", "body": raw, "more_body": False})
