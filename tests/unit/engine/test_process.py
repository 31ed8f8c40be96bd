"""The engine as a process: it parks, wakes, ends when its fronts are gone, and reports a failed device."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable

import msgspec
import psutil
import pytest
from paddock_runner.engine.order import Opening, Order
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.messages import Ask, Done, ErrorCode, Event, Reason, State, StepResult
from paddock_runner.wire.port import FrontPort

from tests.conftest import CHECKOUT
from tests.soak.fake_device import alone
from tests.soak.rig import SIZES

CHILD = """
import sys
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.process import EngineConfig, engine_main
from paddock_runner.errors import PaddockError
from paddock_runner.wire.channel import Channel
from tests.soak.fake_device import FakeDevice
from tests.soak.rig import SIZES
device = FakeDevice(SIZES, run_ahead=int(sys.argv[2]))
device.fails_at = int(sys.argv[3])
try:
    engine_main(EngineConfig(SIZES, Policy(idle_release_s=float(sys.argv[4]))), device, [Channel.parse(sys.argv[1])])
except PaddockError as error:
    print(error.message)
    sys.exit(error.exit_code)
"""


class Engine:
    """A child process with a fake device, and the front that talks to it."""

    def __init__(self, run_ahead: int = 1, fails_at: int = 0, idle_release_s: float = 300.0) -> None:
        channel = Channel.create(1 << 20, 1 << 20)
        environment = {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])}
        command = [sys.executable, "-c", CHILD, channel.text, str(run_ahead), str(fails_at), str(idle_release_s)]
        self.child = subprocess.Popen(command, pass_fds=channel.fds, env=environment, stdout=subprocess.PIPE, cwd=CHECKOUT)
        self.front = FrontPort(channel)
        self.events: list[Event] = []

    def talk(self, act: Callable[[], None], until: Callable[[list[Event]], bool]) -> list[Event]:
        """Listens under asyncio until the events so far satisfy `until`."""

        async def scene() -> None:
            done = asyncio.Event()

            def on_events(events: list[Event]) -> None:
                self.events.extend(events)
                if until(self.events):
                    done.set()

            self.front.listen(asyncio.get_running_loop(), on_events)
            act()
            await asyncio.wait_for(done.wait(), 30)
            self.front._unlisten()

        asyncio.run(scene())
        return self.events

    def close(self) -> None:
        if not self.front.is_dead:
            self.front.close()
        self.child.kill()
        self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()


def n_done(n: int) -> Callable[[list[Event]], bool]:
    return lambda events: sum(isinstance(e, Done) for e in events) >= n


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_answers_cross_the_process_border_unchanged_and_it_ends_when_the_front_goes(run_ahead: int) -> None:
    engine = Engine(run_ahead)
    prompts = {i: array("i", [i, 2, 3]) for i in range(1, 13)}

    def act() -> None:
        for i, prompt in prompts.items():
            engine.front.ask(Ask(i, prompt, max_tokens=10))

    events = engine.talk(act, n_done(12))
    tokens: dict[int, list[int]] = {i: [] for i in prompts}
    for event in events:
        if isinstance(event, StepResult):
            for ask_id, token, *_ in event.rows:
                tokens[ask_id].append(token)
    assert tokens == {i: alone(p.tolist(), 10, 1000, 64) for i, p in prompts.items()}
    engine.front.close()
    assert engine.child.wait(10) == 0
    engine.close()


@pytest.mark.parametrize("idle_release_s", [300.0, 1e9])
def test_an_idle_engine_sleeps_and_wakes_at_once(idle_release_s: float) -> None:
    engine = Engine(idle_release_s=idle_release_s)
    engine.talk(lambda: engine.front.ask(Ask(1, array("i", [1]), max_tokens=2)), n_done(1))
    process = psutil.Process(engine.child.pid)
    before = process.cpu_times()
    deadline = time.monotonic() + 0.3
    while process.status() != psutil.STATUS_SLEEPING and time.monotonic() < deadline:
        os.sched_yield()
    assert process.status() == psutil.STATUS_SLEEPING
    events = engine.talk(lambda: engine.front.ask(Ask(2, array("i", [1]), max_tokens=2)), n_done(2))
    after = process.cpu_times()
    assert isinstance(events[-1], Done) and after.user - before.user < 0.2
    engine.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_a_whole_session_gets_leave_an_engine_to_what_its_front_still_asks_for(number: signal.Signals) -> None:
    """`paddock stop`, systemd and a terminal send them to both; prompts that are being tokenized come after that."""
    engine = Engine()
    engine.talk(lambda: engine.front.ask(Ask(1, array("i", [1]), max_tokens=2)), n_done(1))
    engine.child.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        engine.child.wait(0.3)
    events = engine.talk(lambda: engine.front.ask(Ask(2, array("i", [1]), max_tokens=60)), n_done(2))
    assert any(isinstance(e, Done) and e.reason == Reason.LENGTH and e.output_tokens == 60 for e in events)
    engine.front.close()
    assert engine.child.wait(10) == 0
    engine.close()


def test_a_failed_device_ends_the_process_with_its_sentence_after_telling_every_client() -> None:
    engine = Engine(fails_at=4)
    events = engine.talk(lambda: engine.front.ask(Ask(1, array("i", [1]), max_tokens=60)), n_done(1))
    assert any(isinstance(e, Done) and e.error == ErrorCode.DEVICE for e in events)
    assert engine.child.wait(10) == 10
    assert engine.child.stdout is not None and engine.child.stdout.read() == b"the device has failed\n"
    engine.close()


HANGING = """
import sys, time, types
from paddock_runner.engine import child
from paddock_runner.errors import PackError
def serve(order, device, stages):
    raise PackError("step 7 has not finished")
device = types.SimpleNamespace(close=lambda: time.sleep(1000))
child._open = lambda opening: device
sys.modules[child.REST] = types.SimpleNamespace(serve=serve)
sys.exit(child.main())
"""


def test_a_device_that_failed_is_not_closed_which_may_take_for_ever() -> None:
    opening = Opening("no pack", "", 1, "info", os.getpid())
    lines = [msgspec.json.encode(words) + b"\n" for words in (opening, Order("no model", "", SIZES, "f16", 1))]
    environment = {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", HANGING], input=b"".join(lines), capture_output=True, env=environment, timeout=60)
    assert ended.returncode == 10 and b"error: step 7 has not finished" in ended.stderr


def test_a_killed_engine_is_noticed_by_its_front() -> None:
    engine = Engine()
    engine.talk(lambda: engine.front.ask(Ask(1, array("i", [1]), max_tokens=5, use_mask=True)), lambda events: bool(events))
    engine.child.kill()
    events = engine.talk(lambda: None, n_done(1))
    assert Done(1, Reason.ERROR, ErrorCode.GONE) in events and engine.front.is_dead
    engine.close()


def test_the_state_answers_across_the_border() -> None:
    engine = Engine()
    asked: list[int] = []
    events = engine.talk(lambda: asked.append(engine.front.query()), lambda events: any(isinstance(e, State) for e in events))
    state = next(e for e in events if isinstance(e, State))
    assert state.query_id == asked[0] and state.facts["slots"]["free"] == 4 and state.facts["run_ahead"] == 1
    engine.close()
