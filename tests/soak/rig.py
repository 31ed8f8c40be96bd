"""A front, a channel, an engine and a fake device in one process, turned by hand."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic_ns
from typing import Any

import pytest
from paddock_runner.engine.loop import Engine
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.process import Runner
from paddock_runner.memory.state import StateSizes
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.guesses import Guessed
from paddock_runner.wire.messages import Ask, Done, Reason, Refused, Started, State, StepResult, Vector
from paddock_runner.wire.port import EnginePort, FrontPort

from tests.soak.fake_device import FakeDevice, alone

SIZES = StateSizes(n_slots=4, max_ctx_tokens=64, page_tokens=4, n_pages=65, n_vocab=1000, max_step_tokens=32, max_step_rows=8, max_bias=4, max_top=3, n_results=6)
AT_ONCE = Policy(lead_ms=0.0, gather_ms=0.0)
"""Nothing waits for what may come: steps are launched in the turn in which they can be."""


@dataclass
class Answer:
    """What a client saw of one ask."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    tops: list[tuple] = field(default_factory=list)
    started: Started | None = None
    end: Done | Refused | None = None
    vector: bytes = b""

    @property
    def done(self) -> Done:
        assert isinstance(self.end, Done), self.end
        return self.end

    @property
    def refused(self) -> Refused:
        assert isinstance(self.end, Refused), self.end
        return self.end


class Rig:
    def __init__(self, sizes: StateSizes = SIZES, run_ahead: int = 0, policy: Policy | None = None, seed: int = 0, n_fronts: int = 1, device: Any = None, read_vectors: Any = None, part_tokens: int = 0) -> None:
        if part_tokens:
            sizes = replace(sizes, part_processors=1, part_tokens=part_tokens)
        self.device: Any = device or FakeDevice(sizes, run_ahead, seed)
        self.sizes = sizes
        self.part = self.device.part(part_tokens) if part_tokens else None
        self.channels = [Channel.create(1 << 20, 1 << 20) for _ in range(n_fronts)]
        self.fronts = [FrontPort(c, True) for c in self.channels]
        self.engine = Engine(sizes, self.device, [EnginePort(c, True) for c in self.channels], policy or AT_ONCE, getattr(self.device, "clock", monotonic_ns), read_vectors)
        self.runner = Runner(self.engine)
        self.answers: dict[int, Answer] = {}
        self.states: list[State] = []
        self.order: list[int] = []
        """Ask ids in the order in which they started."""
        self._next_id = 0
        self.on_token: Callable[[Answer], None] | None = None
        self.on_guess: Callable[[FrontPort, Guessed], None] = lambda front, guess: None
        """What a front does with guesses for answers that wait for masks: nothing, as one that is late."""

    def ask(self, prompt: list[int], max_tokens: int = 8, front: int = 0, **more: object) -> Answer:
        self._next_id += 1
        ask = Ask(self._next_id, array("i", prompt), max_tokens=max_tokens, **more)  # type: ignore[arg-type]
        answer = self.answers[ask.ask_id] = Answer(ask)
        self.fronts[front].ask(ask)
        return answer

    def abort(self, answer: Answer, front: int = 0) -> None:
        self.fronts[front].abort(answer.ask.ask_id)

    def turn(self) -> bool:
        """One round of the engine and of every front. False when nothing moved."""
        moved = self.runner.turn()
        if not moved and self.engine.masking.is_waiting:
            moved = self.engine.masking.until_ns > 0
            if isinstance(self.device, FakeDevice):
                self.device.now_ns = max(self.device.now_ns, self.engine.masking.until_ns)
        elif not moved and self.engine.in_flight:
            self.engine.wait()
            moved = True
        elif not moved and self.engine.aside.in_flight:
            self.engine.aside.wait()
            moved = True
        elif not moved and self.engine.hold_until_ns:
            self.device.now_ns = max(self.device.now_ns, self.engine.hold_until_ns)
            moved = True
        for front in self.fronts:
            if not front.is_dead:
                self.listen(front)
        return moved

    def listen(self, front: FrontPort) -> None:
        for event in front.poll():
            if isinstance(event, StepResult):
                for ask_id, token, flags, _, top in event.rows:
                    answer = self.answers[ask_id]
                    assert answer.end is None and answer.started is not None
                    answer.tokens.append(token)
                    answer.flags.append(flags)
                    answer.tops.append(top)
                    if self.on_token is not None:
                        self.on_token(answer)
            elif isinstance(event, Guessed):
                self.on_guess(front, event)
            elif isinstance(event, Vector):
                assert self.answers[event.ask_id].end is None
                self.answers[event.ask_id].vector = event.values
            elif isinstance(event, State):
                self.states.append(event)
            elif isinstance(event, Started):
                assert self.answers[event.ask_id].started is None
                self.answers[event.ask_id].started = event
                self.order.append(event.ask_id)
            else:
                assert self.answers[event.ask_id].end is None
                self.answers[event.ask_id].end = event

    def run(self, max_turns: int = 100_000, check: bool = True) -> None:
        """Turns until everything asked has ended."""
        for _ in range(max_turns):
            moved = self.turn()
            if check:
                self.engine.check()
            if not self.engine.n_open and not moved and not self.engine.in_flight and all(a.end for a in self.answers.values()):
                return
            if not moved:  # a file thread is at work; it has a clock of its own
                time.sleep(0.0005)
                self.device.now_ns += 1_000_000
        raise AssertionError("it does not end")

    def assert_empty(self) -> None:
        """Slots and pages are all back, but for what the prefix tree knows and could forget."""
        engine = self.engine
        assert engine.slots.n_free == self.sizes.n_slots and not engine.retiring
        tree, pool = engine.ledger.tree, engine.ledger.pool
        states, windows = engine.ledger.states, engine.ledger.windows
        assert windows is None or windows.n_free + windows.n_kept == windows.n_pages - 1
        assert states is None or states.n_free + states.n_kept == states.n_places
        assert tree.n_evictable == tree.n_pages and pool.n_free + tree.n_pages == pool.n_attached - 1
        assert not engine.scheduler.has_prefill and not engine.scheduler.aside and not engine.aside.in_flight and not engine.masked and not engine.slots.decode
        assert all(c.n_open == c.n_waiting == 0 for c in engine.scheduler.queue.clients.values())
        keeper = self.runner.keeper
        assert keeper is None or not any(tiers is not None and tiers._pins for tiers in (keeper.tiers, keeper.others))
        engine.check()

    def close(self) -> None:
        for front in self.fronts:
            if not front.is_dead:
                front.close()
        self.runner.close()
        for channel in self.channels:
            channel.close()


def ended_well(answer: Answer) -> bool:
    return isinstance(answer.end, Done) and answer.end.reason in (Reason.STOP, Reason.LENGTH)


def right(answer: Answer, sizes: StateSizes = SIZES) -> bool:
    """The answer is what its prompt gives alone."""
    ask = answer.ask
    return answer.tokens == alone(list(memoryview(ask.prompt)), ask.max_tokens, sizes.n_vocab, sizes.max_ctx_tokens, ask.seed, ask.stop, ask.min_tokens)


def turns(rig: Rig, n: int) -> None:
    """So many turns, one after the other."""
    for _ in range(n):
        rig.turn()


@pytest.fixture(name="run_ahead", params=[0, 1, 2, 3], ids=lambda n: f"run_ahead_{n}")
def every_run_ahead(request: pytest.FixtureRequest) -> int:
    """How many steps a device is given before the first is read: a test file that takes this fixture runs its tests for each."""
    return int(request.param)
