"""The two ports: what one sends the other gets, a full ring and a dead peer are noticed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from array import array
from collections.abc import Iterator

import pytest
from paddock_runner.errors import Busy, PackError
from paddock_runner.wire import messages as m
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.port import EnginePort, FrontPort

IDS = array("i", range(10))


def pair(ask_bytes: int = 4096, result_bytes: int = 4096, **engine: int) -> tuple[FrontPort, EnginePort, Channel]:
    channel = Channel.create(ask_bytes, result_bytes)
    return FrontPort(channel, True), EnginePort(channel, True, **engine), channel


@pytest.fixture
def ports() -> Iterator[tuple[FrontPort, EnginePort]]:
    front, engine, channel = pair()
    yield front, engine
    front.close()
    engine.close()
    channel.close()


def take(engine: EnginePort) -> list[tuple[int, bytes]]:
    records = []
    while (payload := engine.reader.next()) is not None:
        records.append((engine.reader.kind, bytes(payload)))
    engine.reader.done()
    return records


def rows(*values: tuple[int, int, int, int, float, int]) -> memoryview:
    return memoryview(b"".join(m.ROW.pack(*v) for v in values))


def test_requests_reach_the_engine_and_answers_the_front(ports: tuple[FrontPort, EnginePort]) -> None:
    front, engine = ports
    front.ask(m.Ask(1, IDS))
    front.ask(m.Ask(2, IDS))
    front.masks([m.MaskUpdate(1, 0, b"\xff" * 12)])
    front.abort(2)
    front.abort(99)
    assert front.query() == 1
    kinds = [kind for kind, _ in take(engine)]
    assert kinds == [m.Kind.ASK, m.Kind.ASK, m.Kind.MASK, m.Kind.ABORT, m.Kind.QUERY]
    engine.send(m.Kind.BIND, m.BIND.pack(1, 3, 0))
    engine.send(m.Kind.STARTED, m.Started(1, 4, 10, 5).encode())
    engine.send_rows(9, 8, rows((3, 50, 0, 11, -0.5, 0), (4, 60, 0, 7, 0, 0), (3, -1, m.ROW_DEAD, 11, 0, 0)))
    engine.send_rows(10, 8, rows((2, 9, 0, 1, 0, 1), (3, 51, m.ROW_STOP, 12, -0.25, 2)), m.TOP.pack(9, 0) + m.TOP.pack(51, -0.25) + m.TOP.pack(7, -2))
    engine.send(m.Kind.DONE, m.Done(1, m.Reason.STOP).encode())
    engine.send_rows(11, 8, rows((3, 52, 0, 13, 0, 0)))
    engine.send(m.Kind.REFUSED, m.Refused(2, m.RefusedCode.QUEUE_FULL, 9).encode())
    engine.send(m.Kind.STATE, m.State(1, {"a": 1}).encode())
    assert front.poll() == []
    engine.publish()
    assert front.n_open == 2
    assert front.poll() == [
        m.Started(1, 4, 10, 5),
        m.StepResult(9, [(1, 50, 0, -0.5, ())]),
        m.StepResult(10, [(1, 51, m.ROW_STOP, -0.25, ((51, -0.25), (7, -2.0)))]),
        m.Done(1, m.Reason.STOP),
        m.StepResult(11, []),
        m.Refused(2, m.RefusedCode.QUEUE_FULL, 9),
        m.State(1, {"a": 1}),
    ]
    assert front.n_open == 0


def test_an_ask_and_its_first_masks_are_seen_together() -> None:
    front, engine, _ = pair(ask_bytes=1 << 16)
    front.ask(m.Ask(1, IDS, use_mask=True), [m.MaskUpdate(1, 0, b"\xff" * 12, (7, 8)), m.MaskUpdate(2, 0, b"\xff" * 12)])
    kinds = [kind for kind, _ in take(engine)]
    assert kinds == [m.Kind.ASK, m.Kind.MASK], "and nobody's who has not asked"


def test_an_ask_that_moves_to_another_slot_is_followed(ports: tuple[FrontPort, EnginePort]) -> None:
    front, engine = ports
    front.ask(m.Ask(1, IDS))
    engine.send(m.Kind.BIND, m.BIND.pack(1, 3, 0))
    engine.send(m.Kind.BIND, m.BIND.pack(1, 300, 0))
    engine.send_rows(1, 400, rows((3, 50, 0, 11, 0, 0), (300, 51, 0, 11, 0, 0), (399, 51, 0, 11, 0, 0)))
    engine.publish()
    assert front.poll() == [m.StepResult(1, [(1, 51, 0, 0.0, ())])]
    engine.send(m.Kind.BIND, m.BIND.pack(1, -1, 0))
    engine.send_rows(2, 400, rows((300, 52, 0, 12, 0, 0), (399, 52, 0, 12, 0, 0)))
    engine.send(m.Kind.BIND, m.BIND.pack(1, 2, 0))
    engine.send_rows(3, 400, rows((2, 53, 0, 12, 0, 0)))
    engine.publish()
    assert front.poll() == [m.StepResult(2, []), m.StepResult(3, [(1, 53, 0, 0.0, ())])], "its old slot may be another front's by now"


def test_a_full_ask_ring_is_busy_but_aborts_wait_their_turn() -> None:
    front, engine, channel = pair(ask_bytes=4096)
    sent = 0
    with pytest.raises(Busy):
        for i in range(1, 100):
            front.ask(m.Ask(i, IDS))
            sent = i
    assert sent == front.n_open == 4096 // 248
    for i in range(1, 13):
        front.abort(i)
    assert len(take(engine)) + len(front._waiting) == sent + 12
    assert front._waiting
    front.poll()
    take(engine)
    assert not front._waiting
    front.ask(m.Ask(1000, IDS))
    front.close(), engine.close(), channel.close()


def test_a_lagging_front_delays_nothing_and_gets_everything_in_order() -> None:
    front, engine, channel = pair(result_bytes=4096)
    front.ask(m.Ask(1, IDS))
    engine.send(m.Kind.BIND, m.BIND.pack(1, 0, 0))
    for i in range(500):
        engine.send_rows(i, 8, rows((0, i, 0, 1, 0, 0)))
        engine.publish()
    assert engine.overflow_bytes > 0 and not engine.is_dead
    seen: list[int] = []
    while len(seen) < 500:
        seen.extend(row[1] for event in front.poll() if isinstance(event, m.StepResult) for row in event.rows)
        engine.publish()
    assert seen == list(range(500)) and engine.overflow_bytes == 0
    front.close(), engine.close(), channel.close()


def test_a_front_that_never_reads_is_given_up() -> None:
    front, engine, channel = pair(result_bytes=4096, max_overflow_bytes=10_000)
    for i in range(400):
        engine.send_rows(i, 8, rows((0, i, 0, 1, 0, 0)))
        engine.publish()
    assert engine.is_dead
    front.close(), engine.close(), channel.close()


def test_under_asyncio_events_come_by_themselves_and_death_ends_every_ask() -> None:
    async def scene() -> None:
        front, engine, channel = pair()
        got: list[m.Event] = []
        woken = asyncio.Event()

        def on_events(events: list[m.Event]) -> None:
            got.extend(events)
            woken.set()

        front.listen(asyncio.get_running_loop(), on_events)
        front.ask(m.Ask(1, IDS))
        front.ask(m.Ask(2, IDS))
        for i in range(3):
            engine.send(m.Kind.STARTED, m.Started(1, i, 0, 0).encode())
            engine.publish()
            await asyncio.wait_for(woken.wait(), 5)
            woken.clear()
        assert [e.cached_tokens for e in got if isinstance(e, m.Started)] == [0, 1, 2]
        engine.send(m.Kind.DONE, m.Done(1, m.Reason.STOP).encode())
        engine.publish()
        engine.close()
        while not front.is_dead:
            await asyncio.wait_for(woken.wait(), 5)
            woken.clear()
        assert got[-2:] == [m.Done(1, m.Reason.STOP), m.Done(2, m.Reason.ERROR, m.ErrorCode.GONE)]
        with pytest.raises(PackError):
            front.ask(m.Ask(3, IDS))
        front.close(), channel.close()

    asyncio.run(scene())


CHILD = """
import os, sys
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.port import EnginePort
from paddock_runner.wire import messages as m
port = EnginePort(Channel.parse(sys.argv[1]))
while (payload := port.reader.next()) is None:
    port.reader.park() and os.read(0, 0)
ask = m.AskView(payload)
port.send(m.Kind.STARTED, m.Started(ask.ask_id, 0, ask.prompt_tokens, 0).encode())
port.publish()
sys.stdin.read(1)
os._exit(9)
"""


def test_a_killed_engine_process_is_noticed_and_leaves_nothing_behind() -> None:
    channel = Channel.create(4096, 4096)
    child = subprocess.Popen([sys.executable, "-c", CHILD, channel.text], pass_fds=channel.fds, stdin=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)})
    front = FrontPort(channel)
    front.ask(m.Ask(5, IDS))

    async def scene() -> list[m.Event]:
        got: list[m.Event] = []
        ended = asyncio.Event()

        def on_events(events: list[m.Event]) -> None:
            got.extend(events)
            if front.is_dead:
                ended.set()
            elif child.stdin is not None:
                child.stdin.close()

        front.listen(asyncio.get_running_loop(), on_events)
        await asyncio.wait_for(ended.wait(), 20)
        return got

    assert asyncio.run(scene()) == [m.Started(5, 0, 10, 0), m.Done(5, m.Reason.ERROR, m.ErrorCode.GONE)]
    assert child.wait(10) == 9
    front.close()
