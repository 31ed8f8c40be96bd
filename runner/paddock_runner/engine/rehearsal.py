"""Made-up requests before the first real one: what steps take is known then, and what happens at a first time has happened.

They go through engines of their own on the device that is about to serve; what these knew of pages, slots and prefixes goes with them. For devices
with run-ahead: what is decided there is decided before it can be measured.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from time import monotonic_ns

from ..memory.state import StateSizes
from ..wire.channel import Channel
from ..wire.messages import Ask
from ..wire.port import EnginePort, FrontPort
from .cost import CONTEXT_SCALE, CostModel
from .device import StepDevice
from .intake import Intake
from .loop import Engine
from .policy import Policy

LIMIT_NS = 300_000_000
"""Nothing more is begun after this time."""
PROMPT_TOKENS, LITTLE_TOKENS = 128, 16
"""Prompts whose reading is measured, and those that only make rows."""
ANSWER_TOKENS = 64
"""More than any of them gets."""
RING_BYTES = 1 << 20


class Rehearsal:
    """One engine, turned by hand, and the front that asks it. until_ns: when nothing more is begun."""

    def __init__(self, sizes: StateSizes, device: StepDevice, policy: Policy, clock: Callable[[], int], until_ns: int) -> None:
        channel = Channel.create(RING_BYTES, RING_BYTES)
        self._front, self._sizes, self._until_ns = FrontPort(channel, True), sizes, until_ns
        self.engine = Engine(sizes, device, [EnginePort(channel, True)], policy, clock)
        self._intake = Intake(self.engine)
        self._random = random.Random(0)
        self._n_asked = 0

    @property
    def has_time(self) -> bool:
        """Something more may be begun."""
        return self.engine.clock() < self._until_ns

    def read(self, n: int, n_tokens: int) -> None:
        """n prompts come together and are read, beside those who decode already; as many as there is room for."""
        sizes = self._sizes
        n_pages = -(-(n_tokens + ANSWER_TOKENS) // sizes.page_tokens)
        n = min(n, self.engine.slots.n_free, self.engine.ledger.pool.n_free // n_pages)
        if n <= 0 or n_tokens + ANSWER_TOKENS > sizes.max_ctx_tokens or not self.has_time:
            return
        for _ in range(n):
            self._n_asked += 1
            prompt = array("i", [self._random.randrange(sizes.n_vocab) for _ in range(n_tokens)])
            self._front.ask(Ask(self._n_asked, memoryview(prompt), max_tokens=ANSWER_TOKENS, temperature=0.0))
        self._turn()
        while self.engine.scheduler.has_prefill and self.has_time:
            self._turn()

    def decode(self) -> None:
        """A step of those who decode; then nothing is in flight."""
        if self.has_time:
            self._turn()
        while self.engine.in_flight:
            self.engine.wait()
            self.engine.read_results()

    def leave(self) -> None:
        """Everybody leaves."""
        for ask_id in range(1, self._n_asked + 1):
            self._front.abort(ask_id)
        self._intake.read()
        while self.engine.in_flight:
            self._turn()
        self._front.poll()

    def close(self) -> None:
        """Nothing of it runs any more."""
        self.leave()
        self._front.close()
        for port in self.engine.ports:
            port.close()

    def _turn(self) -> None:
        engine = self.engine
        has_read = engine.read_results()
        self._intake.read()
        has_launched = engine.launch()
        engine.publish()
        if engine.in_flight and (engine.is_full or not (has_read or has_launched)):
            engine.wait()


def rehearse(sizes: StateSizes, device: StepDevice, policy: Policy, clock: Callable[[], int] = monotonic_ns, row_bytes: int = 0) -> CostModel:
    """What steps take on a device on which nothing runs. row_bytes: of weights that a step of one row reads; 0: not known. Raises: PackError."""
    at_once = replace(policy, gather_ms=0.0, lead_ms=0.0, burst_step_ms=1e9, draft_rows=0)
    until_ns = clock() + LIMIT_NS
    with closing(Rehearsal(sizes, device, at_once, clock, until_ns)) as first:
        first.read(2, LITTLE_TOKENS)
        first.decode()
        first.read(1, PROMPT_TOKENS)
    with closing(Rehearsal(sizes, device, at_once, clock, until_ns)) as measured:
        measured.read(1, PROMPT_TOKENS)
        measured.decode()
        measured.leave()
        measured.read(sizes.max_step_tokens // PROMPT_TOKENS, PROMPT_TOKENS)
        measured.decode()
        measured.read(1, PROMPT_TOKENS)
        measured.read(4, PROMPT_TOKENS)
        measured.decode()
        measured.read(8, PROMPT_TOKENS)
        measured.read(sizes.n_slots, LITTLE_TOKENS)
        measured.decode()
        cost = measured.engine.scheduler.cost
    if row_bytes:  # contexts are read as quickly as weights are, of which a step of one row is full
        cost.believe(cost.quiet_us(1) / row_bytes * device.kv_page_bytes / sizes.page_tokens * CONTEXT_SCALE)
    return cost
