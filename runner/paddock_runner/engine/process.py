"""The engine process: joins device and channels, turns the loop, parks when there is nothing to do, ends when it should."""

from __future__ import annotations

import gc
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .. import log
from ..cache.tiers import HostPages, Tiers
from ..errors import PaddockError
from ..memory.state import StateSizes
from ..wire.channel import Channel
from ..wire.port import EnginePort
from .device import StepDevice
from .giving import Giver
from .intake import Intake
from .loop import Engine
from .policy import Policy
from .rehearsal import rehearse
from .tiering import STAGING_STATES, HostStates, HostWindows, StateDevice, TierConfig, TierKeeper, WindowDevice
from .vectors import ReadVectors

OVERFLOW_RETRY_MS = 5
LONGEST_WAIT_MS = 3_600_000
"""poll takes no more than 24 days."""
HELD_RETRY_MS = 20
"""How often it is looked, while nothing runs, whether who waits for the disk still should, or may no longer wait at all."""
GATHER_S = 0.0001
"""How often it is looked for more prompts while a burst comes in."""
COLLECT_EVERY = 1000
"""Ended requests between two collections of garbage, which happen only while nothing runs."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine process needs to know: sizes of the device state, the scheduler's constants, where vectors are read (if any),
    pages below the device (if any), what its start took, what is told of experts in host memory (if any are there),
    and how many bytes of weights a step of one row reads (0: not known).
    """

    sizes: StateSizes
    policy: Policy = field(default_factory=Policy)
    read_vectors: ReadVectors | None = None
    tiers: TierConfig | None = None
    stages: log.Stages | None = None
    experts: Callable[[], dict[str, float]] | None = None
    row_bytes: int = 0


class TierDevice(StepDevice, HostPages, StateDevice, WindowDevice, Protocol):
    """A device whose pages can be copied to host memory. page_facts: what a page's bytes depend on."""

    @property
    def page_facts(self) -> tuple[str, ...]:
        """The pack, its build, the machine, the KV format."""
        ...

    def alloc_host_pages(self, n: int) -> None:
        """Memory for n places."""


class Runner:
    """Turns one engine until all fronts have gone, or the device fails."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.keeper: TierKeeper | None = None
        self.has_failed = False
        self.intake = Intake(engine)
        self.giver = Giver(engine)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._collected_at = 0

    def wake(self) -> None:
        """Ends a sleep of `run`. Safe in another thread."""
        os.eventfd_write(self._wake_fd, 1)

    def use_tiers(self, device: TierDevice, config: TierConfig) -> None:
        """Pages that are forgotten go to host memory and disk from now on. Raises: Locked, UsageError.

        Says so when they cannot: pages of a model with recurrent layers are of no use without its states, nor those of one that reads whole prompts.
        """
        if not self.engine.ledger.is_shared:
            log.warning(
                "note",
                text="--host-cache-gib and --disk-cache-gib have no effect for this model: its pages alone cannot be gone on from",
            )
            return
        sizes = self.engine.sizes
        other_bytes = device.state_bytes if sizes.recurrent_bytes else device.window_bytes if sizes.n_window_pages else 0
        n = config.host_pages(device.kv_page_bytes, other_bytes)
        n_others = config.host_others(other_bytes, STAGING_STATES + 2 * sizes.window_back) if other_bytes else 1
        if not n or not n_others:
            return
        device.alloc_host_pages(n)
        store = config.store(sizes, device.kv_page_bytes, device.page_facts)
        others = None
        if other_bytes:
            host: HostPages = HostWindows(device, n_others) if sizes.n_window_pages else HostStates(device, n_others)
            others = Tiers(host, config.store(sizes, device.kv_page_bytes, device.page_facts, other_bytes), self.wake)
        self.keeper = TierKeeper(self.engine, device, Tiers(device, store, self.wake, device.facts.run_ahead > 0), others)

    def close(self) -> None:
        """Lets go of every front."""
        if self.keeper is not None:
            self.keeper.close(self.has_failed)
        for port in self.engine.ports:
            port.close()
        os.close(self._wake_fd)

    def turn(self) -> bool:
        """One round: read, publish, take in, decide, launch. True when something moved or is in flight."""
        engine = self.engine
        has_read = engine.read_results()
        if has_read and not (engine.drafter.requests and engine.run_ahead):  # with guesses the device waits for the launch
            engine.publish()
        self.intake.read()
        if self.keeper is not None:
            self.keeper.turn()
        has_landed = engine.aside.turn()
        has_launched = engine.launch()
        engine.publish()
        return has_read or has_landed or has_launched

    def run(self) -> None:
        """Returns when no front is left. Raises: PaddockError (every request has been told)."""
        engine = self.engine
        try:
            while True:
                has_moved = self.turn()
                if engine.in_flight and not engine.masking.is_waiting and (engine.is_full or not has_moved):
                    engine.wait()
                    continue
                if has_moved:
                    continue
                if engine.aside.in_flight:
                    engine.aside.wait()
                    continue
                if engine.hold_until_ns:
                    time.sleep(GATHER_S)
                    continue
                if not engine.n_open and all(port.is_closed for port in engine.ports):
                    engine.publish()
                    if not any(port.overflow_bytes for port in engine.ports):
                        return
                self._park()
        except PaddockError:
            self.has_failed = True
            engine.fail()
            raise

    def _park(self) -> None:
        """Sleeps until a front writes, dies, or a deadline passes."""
        engine = self.engine
        ports = [port for port in engine.ports if not port.is_closed]
        parked = []
        for port in ports:
            if not port.reader.park():
                break
            parked.append(port)
        else:
            if engine.counters.n_ended - self._collected_at >= COLLECT_EVERY:
                self._collected_at = engine.counters.n_ended
                gc.collect()
            fds = [fd for port in ports for fd in (port.reader.event_fd, port.life_fd)]
            for fd in fds:
                self._poll.register(fd, select.POLLIN)
            has_more = self.keeper is not None and self.keeper.idle()
            waits = [ms for ms in (self.giver.turn(), self._timeout_ms(ports)) if ms is not None]
            self._poll.poll(0 if has_more else min([*waits, LONGEST_WAIT_MS]))
            for fd in fds:
                self._poll.unregister(fd)
            try:
                os.eventfd_read(self._wake_fd)
            except BlockingIOError:
                pass
        for port in parked:
            port.reader.unpark()
        self.intake.check_fronts()

    def _timeout_ms(self, ports: Sequence[EnginePort]) -> int | None:
        if any(port.overflow_bytes for port in ports):
            return OVERFLOW_RETRY_MS
        if self.engine.masking.until_ns:
            return -(min(0, self.engine.clock() - self.engine.masking.until_ns) // 1_000_000)
        if self.engine.scheduler.held:
            return HELD_RETRY_MS
        due_ns = self.engine.scheduler.queue.next_deadline_ns
        return None if due_ns is None else max(0, (due_ns - self.engine.clock()) // 1_000_000 + 1)


def engine_main(config: EngineConfig, device: TierDevice, channels: Sequence[Channel]) -> None:
    """Serves these channels with this device until left alone. The device stays open.

    Signals that a whole session gets are the parent's business: it lets go of us when its requests, which may have more to ask, have ended.
    Raises: PaddockError when the device fails.
    """
    ports, cost = [EnginePort(channel) for channel in channels], None
    if device.facts.run_ahead and config.read_vectors is None:
        cost = rehearse(config.sizes, device, config.policy, row_bytes=config.row_bytes)
        if config.stages is not None:
            config.stages.end("rehearsal")
    runner = Runner(Engine(config.sizes, device, ports, config.policy, read_vectors=config.read_vectors, cost=cost))
    if config.experts is not None:
        runner.engine.experts = config.experts
    if config.tiers is not None:
        runner.use_tiers(device, config.tiers)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    freeze()
    if config.stages is not None:
        config.stages.end("loop")
        runner.engine.start = config.stages.rows
    try:
        runner.run()
    finally:
        runner.close()


def freeze() -> None:
    """No garbage collection from now on: what exists stays, and nothing on the step path makes cycles."""
    gc.collect()
    gc.freeze()
    gc.disable()
