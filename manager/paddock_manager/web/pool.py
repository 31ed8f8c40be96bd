"""Which runners live: started when asked for, evicted by bytes when room is needed, stopped when idle. Knows no HTTP.

Invariants: the bytes of all loaded and loading models stay within the budget; a runner with a request in flight is never stopped;
a model that waits for room gets it after a short grace, since requests for loaded models that come later then wait behind it; a model
that was just loaded serves those who waited for it before it can be evicted.
"""

from __future__ import annotations

import asyncio
import difflib
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from paddock_runner.errors import Busy, PaddockError, UnknownModel

from paddock_manager.fleet import spawn, state
from paddock_manager.fleet.spawn import Launch
from paddock_manager.fleet.state import Server
from paddock_manager.paths import Places

GRACE_S = 2.0
MAX_BACKOFF_S = 60.0


@dataclass(slots=True)
class Entry:
    """One model that may be served. need_bytes: what its plan says. max_ctx_tokens: what it will be started with. facts: what its files say. keep_s: how long it may be idle,
    where its last request said so. counts: of what happened to it."""

    launch: Launch
    need_bytes: int
    max_ctx_tokens: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    server: Server | None = None
    in_flight: int = 0
    last_used: float = 0.0
    is_changing: bool = False
    is_fresh: bool = False
    failures: int = 0
    not_before: float = 0.0
    error: PaddockError | None = None
    keep_s: float | None = None
    n_waiting: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def state(self) -> str:
        """changing, loaded or on demand."""
        return "changing" if self.is_changing else "loaded" if self.server is not None else "on demand"

    @property
    def ctx_tokens(self) -> int | None:
        """The context of a request, as far as it is known."""
        return self.server.max_ctx_tokens if self.server else self.max_ctx_tokens or None

    @property
    def holds_bytes(self) -> int:
        """Bytes that count against the budget."""
        return self.need_bytes if self.server is not None or self.is_changing else 0


class Pool:
    """The models of one gateway. All methods run on one event loop; starting and stopping run in threads."""

    def __init__(self, places: Places, entries: list[Entry], budget_bytes: int, idle_s: float, start_s: float):
        self.places, self.budget_bytes, self.idle_s, self.start_s = places, budget_bytes, idle_s, start_s
        self.entries = {e.launch.name: e for e in entries}
        self._changed = asyncio.Condition()
        self._waiting: dict[str, float] = {}
        self.log: Callable[[str], None] = lambda text: None

    def adopt(self) -> None:
        """Take over runners that a gateway before us left running."""
        for server in state.servers(self.places):
            entry = self.entries.get(server.name)
            if entry is not None and server.path == str(entry.launch.path) and server.asked == entry.launch.asked:
                entry.server, entry.last_used = server, time.monotonic()

    def entry(self, name: str) -> Entry:
        """The model of that name. Raises: UnknownModel."""
        found = self.entries.get(name)
        if found is None:
            near = difflib.get_close_matches(name[:200], self.entries, 1, 0.7)  # its time grows with the square of a name
            hint = f"did you mean {near[0]}?" if near else "there are " + ", ".join(self.entries)
            raise UnknownModel(f"no model {name[:200]!r} is served here", hint, name=name[:200], known=list(self.entries), param="model")
        return found

    def loaded(self) -> dict[str, Server]:
        """The runners that are there and stay, by model."""
        return {e.launch.name: e.server for e in self.entries.values() if e.server is not None and not e.is_changing}

    async def acquire(self, name: str) -> Server:
        """A running server of a model, counted as in use until `release`.

        Raises: UnknownModel, Busy (it failed lately), what starting it raises.
        """
        entry = self.entry(name)
        entry.n_waiting += 1
        try:
            return await self._acquire(entry)
        finally:
            entry.n_waiting -= 1

    async def _acquire(self, entry: Entry) -> Server:
        arrived, name = time.monotonic(), entry.launch.name
        while True:
            async with self._changed:
                found = self._try(entry, arrived)
                if found is not None:
                    return found
                victim = self._choose(entry)
                if victim is None:
                    await self._wait()
                    continue
                victim.is_changing = True
            if victim is entry:
                await _to_its_end(self._start(entry))
            else:
                self.log(f"evicting {victim.launch.name} for {name}")
                victim.counts["evictions"] += 1
                await _to_its_end(self._stop(victim))

    def _try(self, entry: Entry, arrived: float) -> Server | None:
        """The server, when a request that arrived then can use it now. Raises: Busy while it backs off."""
        name, now = entry.launch.name, time.monotonic()
        if entry.server is not None and not entry.is_changing and not entry.server.is_alive:
            self.log(f"{name} died; it is started again")
            entry.counts["deaths"] += 1
            spawn.reap(entry.server)
            entry.server = None
        held_up = any(n != name and arrived - since > GRACE_S for n, since in self._waiting.items())
        if entry.server is not None and not entry.is_changing and not held_up:
            entry.in_flight += 1
            entry.last_used, entry.is_fresh = now, False
            return entry.server
        if entry.server is None and not entry.is_changing and now < entry.not_before:
            wait_ms = int(1000 * (entry.not_before - now)) + 1
            said = entry.error.message if entry.error else f"{name} failed to start"
            raise Busy(
                f"{said}; the next try is in {wait_ms / 1000:.0f} s",
                f"`paddock logs {name}` shows why",
                retry_after_ms=wait_ms,
            )
        return None

    def _choose(self, entry: Entry) -> Entry | None:
        """What to change so that the entry can be served: itself (start), another (stop), or None (wait)."""
        if entry.is_changing or entry.server is not None:
            return None
        if sum(e.holds_bytes for e in self.entries.values()) + entry.need_bytes <= self.budget_bytes:
            self._waiting.pop(entry.launch.name, None)
            return entry
        self._waiting.setdefault(entry.launch.name, time.monotonic())
        if next(iter(self._waiting)) != entry.launch.name or any(e.is_changing for e in self.entries.values()):
            return None
        now = time.monotonic()
        idle = [
            e
            for e in self.entries.values()
            if e.server is not None
            and e.in_flight == 0
            and not e.is_changing
            and not (e.is_fresh and now - e.last_used < GRACE_S)
        ]
        lacking = sum(e.holds_bytes for e in self.entries.values()) + entry.need_bytes - self.budget_bytes
        return _victim(sorted(idle, key=lambda e: e.last_used), lacking)

    async def _wait(self) -> None:
        """Until something changed, or the grace may be over."""
        try:
            await asyncio.wait_for(self._changed.wait(), GRACE_S / 2)
        except TimeoutError:
            pass

    async def _start(self, entry: Entry) -> None:
        server: Server | None = None
        entry.counts["starts"] += 1
        try:
            server = await asyncio.to_thread(spawn.start, self.places, entry.launch, self.start_s)
            entry.failures, entry.error = 0, None
        except PaddockError as error:
            entry.failures += 1
            entry.counts["failed_starts"] += 1
            entry.error = error
            entry.not_before = time.monotonic() + min(MAX_BACKOFF_S, 0.5 * 2**entry.failures)
            self.log(f"{entry.launch.name} did not start: {error.message}")
            raise
        finally:
            async with self._changed:
                entry.server, entry.is_changing, entry.last_used = server, False, time.monotonic()
                entry.is_fresh = server is not None
                self._changed.notify_all()

    async def _stop(self, entry: Entry) -> None:
        """Stop a runner that is marked as changing."""
        try:
            if entry.server is not None:
                await asyncio.to_thread(spawn.stop, self.places, entry.server)
        except OSError as error:
            self.log(f"{entry.launch.name} was stopped, but: {error}")
        finally:
            async with self._changed:
                entry.server, entry.is_changing = None, False
                self._changed.notify_all()

    async def release(self, name: str) -> None:
        """A request of this model is over."""
        async with self._changed:
            entry = self.entries[name]
            entry.in_flight -= 1
            entry.last_used = time.monotonic()
            self._changed.notify_all()

    async def stop_idle(self) -> None:
        """Stop runners that nobody has used for as long as they may be idle."""
        now = time.monotonic()
        async with self._changed:
            idle = [e for e in self.entries.values() if e.server is not None and not e.is_changing and e.in_flight == 0]
            old = [e for e in idle if now - e.last_used > self.may_idle_s(e)]
            for entry in old:
                entry.is_changing = True
        for entry in old:
            entry.counts["idle_stops"] += 1
            self.log(f"stopping {entry.launch.name}: idle for {now - entry.last_used:.0f} s")
        await asyncio.shield(asyncio.gather(*(self._stop(entry) for entry in old)))

    def may_idle_s(self, entry: Entry) -> float:
        """How long a model may be idle before it is unloaded."""
        if entry.keep_s is not None:
            return entry.keep_s if entry.keep_s >= 0 else math.inf
        return self.idle_s if self.idle_s > 0 else math.inf

    async def stop_all(self) -> None:
        """Stop every runner, whatever it does."""
        await asyncio.gather(*(self._stop(e) for e in self.entries.values() if e.server is not None))


def _victim(idle: list[Entry], lacking_bytes: int) -> Entry | None:
    """Who goes first: the least recently used, but for those without whom the others who must go give room enough. idle: the least recently used first."""
    chosen: list[Entry] = []
    for entry in idle:
        if sum(e.holds_bytes for e in chosen) < lacking_bytes:
            chosen.append(entry)
    for entry in list(chosen):
        if sum(e.holds_bytes for e in chosen) - entry.holds_bytes >= lacking_bytes:
            chosen.remove(entry)
    return chosen[0] if chosen else None


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that goes on for others when this client has gone."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # its trouble is kept in the entry
    await asyncio.shield(task)


@dataclass(slots=True)
class Plan:
    """What a gateway process is told, as the JSON file that `paddock serve` writes for it. hosts, origins: further ones that requests may name."""

    host: str
    key_file: str
    budget_bytes: int
    idle_s: float
    start_s: float
    runner: list[str]
    models: list[dict[str, Any]] = field(default_factory=list)
    tls: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    max_body_bytes: int = 32 << 20
    keep_alive_s: float = 75.0
