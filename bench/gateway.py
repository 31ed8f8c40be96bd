"""What a part of a stream costs a gateway: processor time a part, between runners and clients that cost it nothing.

Usage: python -m bench.gateway [--streams 64] [--parts 200] [--rounds 5] [--machine NAME] [--dry]
Every stream's parts are 5 ms apart, as tokens are. One process plays runners and clients; the gateway is another, whose time is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

import uvicorn
from paddock_manager.disk import born
from paddock_manager.fleet.spawn import Launch
from paddock_manager.fleet.state import Server
from paddock_manager.paths import Places
from paddock_manager.web.gateway import Gateway
from paddock_manager.web.pool import Entry, Pool
from paddock_runner.edge.auth import Guard
from paddock_runner.edge.listen import bind
from paddock_runner.edge.protocol import Protocol

from bench import board
from bench.front import cpu_s

APART_S = 0.005
PART = b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk","created":1796074786,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
FRAMED = b"%x\r\n%s\r\n" % (len(PART), PART)
BODY = b'{"model":"m","stream":true}'
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)


def serve(runner_port: int) -> None:
    """A gateway of one model whose runner is at that port; says where it listens."""
    pid = os.getpid()
    server = Server("m", "", "", pid, born(pid), "127.0.0.1", runner_port, "cpu", 1, 1, "", 0.0)
    pool = Pool(Places(Path()), [Entry(Launch("m", "", Path()), 1, server=server)], 1, 0, 1)
    listener = bind("127.0.0.1", 0)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(Gateway(pool, "", Guard(()), 1 << 20), http=Protocol, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


async def measure(n_streams: int, n_parts: int) -> float:
    """Microseconds of the gateway's processor time for a part."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(n_parts):
            writer.write(FRAMED)
            await asyncio.sleep(APART_S)
        writer.write(b"0\r\n\r\n")
        writer.close()

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        while not (part := await reader.read(1 << 16)).endswith(b"0\r\n\r\n"):
            if not part:
                raise RuntimeError("the gateway has hung up")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as runner:
        words = [sys.executable, "-m", "bench.gateway", "--serve", str(runner.sockets[0].getsockname()[1])]
        gateway = subprocess.Popen(words, cwd=board.ROOT, stdout=subprocess.PIPE)
        assert gateway.stdout is not None
        port = int(await asyncio.to_thread(gateway.stdout.readline))
        await client(port)
        before = cpu_s(gateway.pid)
        await asyncio.gather(*(client(port) for _ in range(n_streams)))
        spent = cpu_s(gateway.pid) - before
        gateway.kill()
        gateway.wait()
    return 1e6 * spent / (n_streams * n_parts)


def main() -> None:
    """Measures and writes the board."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--parts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default="cpu2")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    samples = [asyncio.run(measure(arguments.streams, arguments.parts)) for _ in range(arguments.rounds)]
    rows = [board.row(f"gateway.part.c{arguments.streams}.cpu_us", samples, "us", better="lower")]
    if arguments.dry:
        sys.stdout.write(f"{rows}\n")
        return
    board.write(arguments.machine, "gateway", rows, streams=arguments.streams, parts=arguments.parts, apart_ms=1e3 * APART_S)


if __name__ == "__main__":
    main()
