"""Agent replay: sessions of many turns with a shared system prompt and tools, on the engine, without a front.

Usage: python -m bench.agents MODEL [--pack PACK] [--sessions 16] [--turns 40] [--system 700] [--snapshots N] [--kv f32] [--machine NAME]
Every session begins with the same system prompt (instructions and tools). A turn sends all that was said so far and something new (a question,
or a tool's result), and the answer becomes part of the next turn. Sessions run at once, each its own client. Told: the share of prompt tokens that were
cached after the first turn, and times to the first token.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.engine.loop import Engine
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.process import Runner
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.state import StateSizes, state_layout
from paddock_runner.pack.library import find_pack
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.messages import Ask, Done, Started, StepResult
from paddock_runner.wire.port import EnginePort, FrontPort

from bench import board


@dataclass
class Plan:
    """What is replayed. said: tokens of a question or tool result, answer: of an answer, fewest and most."""

    sessions: int = 16
    turns: int = 40
    system: int = 700
    said: tuple[int, int] = (20, 90)
    answer: tuple[int, int] = (8, 40)
    seed: int = 1


@dataclass
class Session:
    """One conversation."""

    tokens: list[int]
    turn: int = 0
    asked: float = 0.0
    answer: list[int] = field(default_factory=list)


@dataclass
class Turn:
    """What came of one turn."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    first_s: float


class Replay:
    """Sessions on an engine. device: with a loaded program; n_vocab: ids are below it."""

    def __init__(self, plan: Plan, sizes: StateSizes, device: Any, n_vocab: int, policy: Policy | None = None) -> None:
        self.plan, self.n_vocab, self.random = plan, n_vocab, random.Random(plan.seed)
        channel = Channel.create()
        self.front = FrontPort(channel, True)
        self.engine = Engine(sizes, device, [EnginePort(channel, True)], policy)
        self.engine.launched_seq = self.engine.read_seq = self.engine.slots.seq = int(device.done[0])
        self.runner = Runner(self.engine)
        system = self.words(plan.system)
        self.sessions = [Session(list(system)) for _ in range(plan.sessions)]
        self.of_ask: dict[int, Session] = {}
        self.found: list[Turn] = []
        self._n_asked = 0
        self._started: dict[int, Started] = {}

    def words(self, n: int) -> list[int]:
        """n random tokens."""
        return [self.random.randrange(3, self.n_vocab) for _ in range(n)]

    def ask(self, session: Session) -> None:
        """The session's next turn."""
        self._n_asked += 1
        session.tokens += self.words(self.random.randint(*self.plan.said))
        session.answer, session.asked = [], perf_counter()
        self.of_ask[self._n_asked] = session
        n = self.random.randint(*self.plan.answer)
        self.front.ask(Ask(self._n_asked, array("i", session.tokens), client=id(session) & 0xFFFF, max_tokens=n, temperature=0.0))

    def run(self) -> list[Turn]:
        """All turns of all sessions."""
        for session in self.sessions:
            self.ask(session)
        while self.of_ask:
            if not self.runner.turn() and self.engine.in_flight:
                self.engine.wait()
            for event in self.front.poll():
                self.take(event)
        return self.found

    def take(self, event: object) -> None:
        """One event of the engine."""
        if isinstance(event, Started):
            self._started[event.ask_id] = event
        elif isinstance(event, StepResult):
            for ask_id, token, *_ in event.rows:
                session = self.of_ask[ask_id]
                if not session.answer:
                    started = self._started[ask_id]
                    self.found.append(Turn(session.turn, started.prompt_tokens, started.cached_tokens, perf_counter() - session.asked))
                session.answer.append(token)
        elif isinstance(event, Done):
            session = self.of_ask.pop(event.ask_id)
            session.tokens += session.answer
            session.turn += 1
            if session.turn < self.plan.turns:
                self.ask(session)


def cached_share(turns: list[Turn]) -> float:
    """Prompt tokens that were cached, of all after the first turn."""
    later = [t for t in turns if t.number]
    return sum(t.cached_tokens for t in later) / sum(t.prompt_tokens for t in later)


def main() -> None:
    """Replays and prints; with --machine writes the board."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pack", default="")
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--system", type=int, default=700)
    parser.add_argument("--snapshots", type=int, default=0)
    parser.add_argument("--machine", default="")
    parser.add_argument("--commit", default="", help="of this tree, where it is no git checkout")
    options = parser.parse_args()
    plan = Plan(options.sessions, options.turns, options.system)
    checkpoint = open_checkpoint(Path(options.model))
    blueprint = read_blueprint(checkpoint)
    page, longest = 16, plan.system + plan.turns * (plan.said[1] + plan.answer[1])
    ctx = -(-longest // page) * page
    states = state_layout(blueprint).slot_bytes
    n = options.snapshots or 2 * plan.sessions + 8
    sizes = StateSizes(
        plan.sessions, ctx, page, plan.sessions * ctx // page + 1, blueprint.n_vocab, 512, plan.sessions,
        recurrent_bytes=states, n_snapshots=n if states else 0,
    )  # fmt: skip
    pack = Path(options.pack) if options.pack else find_pack("cpu")
    device = build_device(Assembly(pack, sizes, options.kv), blueprint, tensors_by_name(checkpoint, blueprint))
    replay = Replay(plan, sizes, device, blueprint.n_vocab)
    begun = perf_counter()
    turns = replay.run()
    share, first = cached_share(turns), sorted(1e3 * t.first_s for t in turns if t.number)
    model = Path(options.model)
    name = f"agents.{model.name if model.is_dir() else model.stem}.{plan.sessions}x{plan.turns}"
    sys.stdout.write(
        f"{name}: {len(turns)} turns, prompts to {max(t.prompt_tokens for t in turns)} tokens, {100 * share:.2f} % cached after the first turn, "
        f"first token p50 {statistics.median(first):.1f} ms p99 {first[int(0.99 * (len(first) - 1))]:.1f} ms, {perf_counter() - begun:.1f} s\n"
    )
    if options.machine:
        kind = f"{options.machine}.agent.{'hybrid' if states else 'dense'}"
        rows = [board.row(f"{i}.cached_share", [share], "share") for i in (kind, f"{options.machine}.{name}")]
        rows += [board.row(f"{i}.ttft_ms", first, "ms", "lower") for i in (kind, f"{options.machine}.{name}")]
        board.write(options.machine, "agents", rows, options.commit, load_average=round(os.getloadavg()[0], 2))
    device.close()


if __name__ == "__main__":
    main()
