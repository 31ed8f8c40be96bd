"""Parts of answers past the event loop: in order, whole, whatever the client reads; never into a descriptor that is not theirs."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest
from paddock_runner.front import outbox as module
from paddock_runner.front.outbox import FEW, Outbox, Pipe

SMALL_BYTES = 4096


class Protocol(asyncio.Protocol):
    """A server's end of one connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.pipe, self.lost = transport, Pipe(transport), asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipe.close()
        self.lost.set()


async def connected() -> tuple[Protocol, socket.socket]:
    """A connection with small buffers."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
    ours.setblocking(False)
    theirs.setblocking(False)
    _, protocol = await asyncio.get_running_loop().connect_accepted_socket(Protocol, ours)
    return protocol, theirs


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def read(client: socket.socket, n_bytes: int) -> bytes:
    found = b""
    while len(found) < n_bytes:
        found += await asyncio.get_running_loop().sock_recv(client, 1 << 16)
    return found


def test_parts_come_whole_and_in_order_through_whichever_way_they_went() -> None:
    async def run() -> None:
        protocol, client = await connected()
        outbox, pipe, said = Outbox(), protocol.pipe, []
        protocol.transport.write(b"head")
        for step in range(60):
            outbox.hold()
            said.append(bytes([65 + step % 26]) * (37 * step))
            outbox.put(pipe, said[-1])
            outbox.release()
            if step == 30:
                assert not pipe.is_direct, "the client reads nothing: the event loop keeps the rest"
                await read_and_check(client, said)
                said.clear()
        await read_and_check(client, said, b"")
        protocol.transport.close()
        await protocol.lost.wait()
        client.close()

    async def read_and_check(client: socket.socket, said: list[bytes], head: bytes = b"head") -> None:
        expected = head + b"".join(map(chunk, said))
        assert await read(client, len(expected)) == expected

    asyncio.run(run())


def test_what_others_wrote_before_is_not_overtaken() -> None:
    async def run() -> None:
        protocol, client = await connected()
        outbox, pipe = Outbox(), protocol.pipe
        for i in range(4):
            protocol.transport.write(b"x" * (SMALL_BYTES * i))
            pipe.is_direct = False
            outbox.hold()
            outbox.put(pipe, b"y")
            outbox.release()
        expected = b"".join(b"x" * (SMALL_BYTES * i) + chunk(b"y") for i in range(4))
        assert await read(client, len(expected)) == expected
        protocol.transport.abort()
        await protocol.lost.wait()
        client.close()

    asyncio.run(run())


def test_a_connection_that_has_gone_leaves_its_descriptor_alone() -> None:
    async def run() -> None:
        protocol, client = await connected()
        outbox, pipe = Outbox(), protocol.pipe
        outbox.hold()
        outbox.put(pipe, b"a")
        outbox.release()
        assert pipe.is_direct
        client.close()
        outbox.hold()
        outbox.put(pipe, b"b" * (SMALL_BYTES * 64))
        outbox.release()
        await protocol.lost.wait()
        assert not pipe.is_open and pipe.send is None
        reader, writer = os.pipe()
        del pipe, protocol
        os.write(writer, b"still ours")
        assert os.read(reader, 64) == b"still ours"
        os.close(reader)
        os.close(writer)

    asyncio.run(run())


@pytest.mark.parametrize("late", [2, 1])
def test_writes_that_wait_time_and_again_go_through_the_event_loop_for_a_while(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    class Counted:
        is_direct = True

        def __init__(self) -> None:
            self.ways: list[str] = []

        def send(self, data: bytes) -> int:
            self.ways.append("direct")
            return len(data)

        def write(self, data: bytes) -> None:
            self.ways.append("loop")

    now = iter([0, *(1_000_000 * min(late, i + 1) for i in range(9))])
    monkeypatch.setattr(module, "monotonic_ns", lambda: next(now))
    outbox, pipe = Outbox(), Counted()
    some: Any = pipe
    for _ in range(2):
        outbox.hold()
        for _ in range(2 * FEW):
            outbox.put(some, b"a")
        outbox.release()
    assert pipe.ways == ["direct"] * (2 * FEW) + ["loop" if late > 1 else "direct"] * (2 * FEW), "once may be the processor's doing"
