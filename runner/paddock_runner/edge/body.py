"""Bodies of requests over ASGI: whole, no larger than they may be, and no slower than anybody sends them who means it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any, Generic, TypeVar

from ..errors import Cancelled, SlowBody, TooLarge, UsageError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")

BODY_GRACE_S = 30.0
MIN_BODY_BYTES_PER_S = 16 << 10
"""A body has the grace, and as long more as it would take at this rate."""


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


async def whole(receive: Receive, said: str, max_bytes: int, encoding: str = "") -> bytes:
    """The whole body. said, encoding: its length and its encoding as the request's head says them, or "".

    Raises: UsageError when it is encoded, TooLarge as soon as it is, SlowBody when it comes too slowly (then the connection is to be closed behind the
    answer), Cancelled when the client left while sending.
    """
    if encoding.lower() not in ("", "identity"):
        raise UsageError(f"the request's body is encoded as {encoding[:40]!r}", "send it as it is, without content-encoding")
    if said.isdigit() and int(said) > max_bytes:
        raise _too_large(int(said), max_bytes)
    message = begin(receive())
    if not isinstance(message, Rest) and not message.get("more_body", False):
        _require_client(message)
        body: bytes = message.get("body", b"")  # it came with the head
        if len(body) > max_bytes:
            raise _too_large(len(body), max_bytes)
        return body
    return await _parts(receive, message, max_bytes)


async def _parts(receive: Receive, message: Message | Rest[Message], max_bytes: int) -> bytes:
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
                message = await receive()
    except TimeoutError:
        waited_s = loop.time() - begun
        raise SlowBody(
            f"only {size} bytes of the request's body came within {waited_s:.0f} s", "send the body in one go",
            size_bytes=size, waited_s=round(waited_s),
        ) from None  # fmt: skip


def _require_client(message: Message) -> None:
    if message["type"] == "http.disconnect":
        raise Cancelled("the client left before its request was complete")


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(
        f"the request's body has {size} bytes or more, the limit is {limit}", "`paddock serve --runner max-body-mib=N` (`paddock-runner --max-body-mib N`) raises it",
        size_bytes=size, max_bytes=limit,
    )  # fmt: skip
