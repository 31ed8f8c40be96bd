"""Streamed tokens a second through the real front (HTTP, SSE, detokenizer, ring), with an engine that does nothing.

Usage: python -m bench.front [--streams 64] [--seconds 4] [--rounds 5] [--machine cpu2]
Front on one core, the engine's process and the client on the others. The client reads raw bytes and counts deltas. `value` is tokens per
second of the front's processor time, so that other work on the machine does not count; the wall clock's figure is a row of its own.
Saturated: the engine makes tokens as fast as the front reads. Paced: one token per stream every 20 ms, as a real engine would.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path

from paddock_runner.wire.channel import Channel

from bench import board

DELTA = {"chat": b'"delta":{"content":"', "completions": b'"text":"'}
PACE_MS = 20.0
ROOT = Path(__file__).resolve().parent.parent


def serve(channel: str) -> None:
    """The front's process: prints its port, serves until its standard input closes."""
    import gc
    import threading

    import uvloop
    from paddock_runner.edge.auth import Guard
    from paddock_runner.edge.listen import bind
    from paddock_runner.front.server import Server
    from paddock_runner.front.service import Front
    from paddock_runner.text.answer import AnswerFormat
    from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf
    from paddock_runner.text.template import ChatTemplate
    from paddock_runner.turns.desk import Desk
    from paddock_runner.turns.served import Served
    from paddock_runner.wire.port import FrontPort

    from tests.conformance.live import CHATML
    from tests.unit.text.small import byte_level_metadata

    async def run() -> None:
        tokenizer = tokenizer_from_gguf(byte_level_metadata(), None)
        served = Served("fake", tokenizer, ChatTemplate(CHATML), AnswerFormat(CHATML, tokenizer), 1 << 30, tokenizer.n_vocab)
        desk = Desk(FrontPort(Channel.parse(channel)))
        front = Front(served, desk, Guard(()))
        desk.listen(asyncio.get_running_loop())
        await desk.state()
        front.phase = "ready"
        gc.collect()
        gc.freeze()  # as a runner does
        listener = bind("127.0.0.1", 0)
        server = Server(front, 75, 1)
        loop = asyncio.get_running_loop()

        def until_closed() -> None:
            sys.stdin.read()
            loop.call_soon_threadsafe(server.stop, True)

        threading.Thread(target=until_closed, daemon=True).start()
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        await server.serve(listener)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_for(port: int, api: str, n_streams: int, seconds: float, pid: int) -> tuple[int, float, float]:
    """Tokens that n_streams clients got in a while, after a warm-up; wall seconds; the front's processor seconds."""
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "stream": True, "max_tokens": 1 << 29}).encode()
    request = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    poll, mark, clients = selectors.DefaultSelector(), DELTA[api], []
    for _ in range(n_streams):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(request)
        client.setblocking(False)
        poll.register(client, selectors.EVENT_READ)
        clients.append(client)
    n_tokens, begun, cpu, ends = 0, 0.0, 0.0, time.perf_counter() + 1.0
    while (now := time.perf_counter()) < ends or not begun:
        if not begun and now >= ends:
            begun, cpu, n_tokens, ends = now, cpu_s(pid), 0, now + seconds
        for key, _ in poll.select(0.1):
            n_tokens += key.fileobj.recv(1 << 18).count(mark)  # type: ignore[union-attr]
    wall, spent = time.perf_counter() - begun, cpu_s(pid) - cpu
    for client in clients:
        client.close()
    poll.close()
    return n_tokens, wall, spent


def measure(api: str, n_streams: int, seconds: float, every_ms: float) -> tuple[int, float, float]:
    """One run: tokens, wall seconds, the front's processor seconds."""
    cores = sorted(os.sched_getaffinity(0))
    channel = Channel.create()
    other = ",".join(map(str, cores[1:] or cores))
    engine_command = ["taskset", "-c", other, sys.executable, "-m", "tests.fakes.engine", channel.text, "--every", str(every_ms)]
    engine = subprocess.Popen(engine_command, cwd=ROOT, pass_fds=channel.fds)
    front = subprocess.Popen(
        ["taskset", "-c", str(cores[0]), sys.executable, "-m", "bench.front", "--serve", channel.text],
        cwd=ROOT, pass_fds=channel.fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    channel.close()
    try:
        assert front.stdout is not None
        return read_for(int(front.stdout.readline()), api, n_streams, seconds, front.pid)
    finally:
        front.stdin.close()  # type: ignore[union-attr]
        front.wait(20)
        engine.wait(20)


def main() -> None:
    """Measures and writes the board."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default="cpu2")
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    found: dict[str, list[float]] = {"tokens_per_s": [], "wall_tokens_per_s": [], "completions_tokens_per_s": [], "paced_us_per_token": []}
    for _ in range(arguments.rounds):
        n, wall, cpu = measure("chat", arguments.streams, arguments.seconds, 0.0)
        found["tokens_per_s"].append(n / cpu)
        found["wall_tokens_per_s"].append(n / wall)
        n, _, cpu = measure("completions", arguments.streams, arguments.seconds, 0.0)
        found["completions_tokens_per_s"].append(n / cpu)
        n, _, cpu = measure("chat", 128, arguments.seconds, PACE_MS)
        found["paced_us_per_token"].append(cpu / max(1, n) * 1e6)
    if arguments.dry:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    units = {"paced_us_per_token": ("us", "lower")}
    rows = [board.row(f"front.{k}", v, *units.get(k, ("tok/s", "higher"))) for k, v in found.items()]
    board.write(arguments.machine, "front", rows, streams=arguments.streams, paced_streams=128, pace_ms=PACE_MS)


if __name__ == "__main__":
    main()
