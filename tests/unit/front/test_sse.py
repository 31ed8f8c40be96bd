"""The event stream over a fake server: never waits on a client, merges for one that lags, one write per flush."""

from __future__ import annotations

import asyncio
from typing import Any

from paddock_runner.front.http import Exchange
from paddock_runner.front.openai.chunks import ChatChunks, Head
from paddock_runner.front.sse import EventStream
from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf
from paddock_runner.turns.choice import End
from paddock_runner.turns.usage import Usage

from tests.unit.text.small import byte_level_metadata


class Wire:
    """An ASGI server whose client can stop reading."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body"]


def made(n_choices: int = 2) -> tuple[Wire, EventStream, ChatChunks]:
    wire = Wire()
    exchange = Exchange({"type": "http", "method": "POST", "path": "/", "headers": []}, wire.receive, wire.send)
    stream = EventStream(exchange)
    tokenizer = tokenizer_from_gguf(byte_level_metadata(), None)
    return wire, stream, ChatChunks(stream, Head("id", 1, "m", n_choices, False, False), tokenizer)


def contents(wire: Wire) -> list[bytes]:
    return [e.split(b'"content":"')[1].split(b'"')[0] for e in b"".join(wire.bodies).split(b"\n\n") if b'"content":"' in e]


def test_one_write_per_flush_and_headers_before_the_first() -> None:
    async def run() -> None:
        wire, stream, chunks = made()
        chunks.text(0, "a", ())
        chunks.text(1, "b", ())
        assert not wire.sent
        stream.flush()
        assert [m["type"] for m in wire.sent] == ["http.response.start", "http.response.body"] and contents(wire) == [b"a", b"b"]
        stream.flush()
        assert len(wire.sent) == 2, "nothing to write, no write"

    asyncio.run(run())


def test_client_that_lags_gets_one_chunk_for_what_piled_up_in_order() -> None:
    async def run() -> None:
        wire, stream, chunks = made()
        chunks.text(0, "a", ())
        stream.flush()
        wire.reads.clear()
        for piece in "bcd":
            chunks.text(0, piece, ())
            chunks.text(1, piece.upper(), ())
            stream.flush()
        assert stream.is_behind and contents(wire) == [b"a"]
        wire.reads.set()
        for _ in range(4):
            await asyncio.sleep(0)
        assert not stream.is_behind
        assert contents(wire) == [b"a", b"b", b"B", b"cd", b"CD"]
        chunks.text(0, "e", ())
        stream.flush()
        assert contents(wire)[-1] == b"e"

    asyncio.run(run())


def test_end_of_a_lagging_stream_comes_after_all_its_text() -> None:
    async def run() -> None:
        wire, stream, chunks = made()
        wire.reads.clear()
        for piece in "abcd":
            chunks.text(0, piece, ())
            stream.flush()
        chunks.ended(0, End("stop"))
        chunks.close(Usage())
        finishing = asyncio.create_task(stream.finish())
        await asyncio.sleep(0)
        assert not finishing.done()
        wire.reads.set()
        await finishing
        assert b"".join(contents(wire)) == b"abcd" and b"".join(wire.bodies).endswith(b'"finish_reason":"stop","stop_reason":null}]}\n\ndata: [DONE]\n\n')
        assert wire.sent[-1]["more_body"] is False

    asyncio.run(run())


def test_silent_stream_gets_a_comment_and_a_busy_one_none() -> None:
    async def run() -> None:
        wire, stream, chunks = made()
        stream.tick()
        assert not wire.sent
        stream.tick()
        assert wire.bodies == [b": keep-alive\n\n"]
        chunks.text(0, "a", ())
        stream.flush()
        stream.tick()
        assert len(wire.bodies) == 2

    asyncio.run(run())


def test_a_text_that_is_json_already_is_the_event_that_the_text_is() -> None:
    async def run() -> None:
        wire, stream, chunks = made(1)
        lane = chunks.lane(0)
        assert lane is stream and made(2)[2].lane(0) is None, "with several choices an event says whose it is"
        chunks.text(0, 'a"', ())
        lane.say(b'"a\\""')
        lane.say_now(b'"b"')
        lane.say(b'"c"')
        lane.flush()
        first, second, *rest = b"".join(wire.bodies).split(b"\n\n")
        assert first == second and contents(wire)[2:] == [b"b", b"c"] and len(rest) == 3

    asyncio.run(run())
