"""Streams that decode while a long prompt arrives: gaps between their tokens before and meanwhile, and the prompt's time to first token.

Usage: python -m bench.longprefill MODEL [--pack PACK] [--streams 16] [--prompt 4000] [--rounds 3] [--threads N] [--machine NAME]
       [--policy long_delay=1.2 long_delay=2,deep_chunk_tokens=128 ...] [--guests 128 2048] [--share 0 0.5] [--beside 200 1000]
MODEL is a checkpoint, or a size and format of bench.gpu_models (8b.bf16), whose weights are random.
The engine runs in this process, without a front: gaps are times between steps that gave every stream a token. Each round measures the prompt
alone, the streams alone, and both, so that what else the machine does falls on all three. Goals: gap p50 at most 1.25 and p99 at most 1.5 times
of before, time to first token at most 1.4 times alone. The last two cannot both be had where decoding leaves no arithmetic unused (a CPU).
With --share the prompt is read aside by that part of the device's processors (0: steps take turns), one after the other.
With --policy each of these changes to the scheduler's policy is measured, one after the other on one device: the price of one goal in the other's coin.
With --beside, for each length: a prompt of so many tokens comes while the streams decode and the long one is read, a third of its time alone apart; their times to first token, against alone.
With --guests, for each length: a client with one prompt of so many tokens comes at random while another has 64 of them; its time to first token, against alone.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from array import array
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from time import monotonic_ns, perf_counter

from paddock_runner.blueprint.blueprint import Blueprint
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.engine.cost import CostModel
from paddock_runner.engine.loop import Engine
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.process import Runner, freeze
from paddock_runner.engine.rehearsal import rehearse
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.files.view import TensorView
from paddock_runner.memory.part import SHARE, parted
from paddock_runner.memory.plan import PlanRequest, cpu_facts, cuda_facts, state_sizes
from paddock_runner.pack.library import find_pack
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.messages import Ask, Done, StepResult
from paddock_runner.wire.port import EnginePort, FrontPort

from bench import board
from bench.gpu_models import SHAPES, blueprint, views

STREAM_TOKENS = 4096
RATIOS = ("itl_p50", "itl_p99", "ttft")


Model = tuple[Blueprint, Mapping[str, TensorView]]


def opened(name: str, ctx_tokens: int, folder: Path) -> Model:
    """A model's shape and tensors: a checkpoint's, or made-up ones in that folder, for a context of so many tokens."""
    size, _, format = name.rpartition(".")
    if size in SHAPES:
        plan = blueprint(size)
        return replace(plan, max_ctx_tokens=max(plan.max_ctx_tokens, ctx_tokens)), views(plan, format, folder)
    checkpoint = open_checkpoint(Path(name))
    read = read_blueprint(checkpoint)
    return read, tensors_by_name(checkpoint, read)


class Scene:
    """One engine on one device, turned by hand."""

    def __init__(self, model: Model, options: argparse.Namespace, part: float) -> None:
        plan, tensors = model
        pack = Path(options.pack) if options.pack else find_pack("cpu")
        facts = cuda_facts(132) if "cuda" in pack.name else cpu_facts(options.threads or os.cpu_count() or 1)
        ctx = min(plan.max_ctx_tokens, options.prompt + 64)
        n_more = bool(options.beside)
        request = PlanRequest(ctx, options.streams + 1 + n_more, facts, n_pages=(1 + n_more) * ctx // 32 + options.streams * (min(ctx, STREAM_TOKENS) // 32) + 2)
        sizes = parted(plan, state_sizes(plan, request), facts.kind, facts.n_processors, part, False)
        self.device = build_device(Assembly(pack, sizes, request.kv_format, n_threads=options.threads), plan, tensors)
        self.n_vocab, self.sizes = plan.n_vocab, sizes
        self.random = random.Random(1)
        self.begin(Policy())

    def begin(self, policy: Policy) -> None:
        """A new engine with that policy on the same device; nothing is running on it."""
        channel = Channel.create()
        self.front = FrontPort(channel, True)
        cost = rehearse(self.sizes, self.device, policy, row_bytes=self.device.allocated["weights"]) if self.device.facts.run_ahead else None
        self.engine = Engine(self.sizes, self.device, [EnginePort(channel, True)], policy, cost=cost)
        self.engine.drafter.is_on = False  # answers of made-up weights go round in circles, and would be guessed too well
        self.runner = Runner(self.engine)
        self.engine.scheduler.cost.__class__ = Seeing
        self.n_asked = 0
        self.ended: set[int] = set()
        self.first: dict[int, float] = {}
        self.counts: dict[int, int] = {}

    def ask(self, n_prompt: int, n_tokens: int, client: int = 0) -> int:
        """One more request, of a client of its own where none is named; its id."""
        self.n_asked += 1
        prompt = array("i", [self.random.randrange(min(300, self.n_vocab // 2), self.n_vocab) for _ in range(n_prompt)])
        self.front.ask(Ask(self.n_asked, prompt, max_tokens=n_tokens, temperature=0.0, client=client or 1000 + self.n_asked, received_ns=monotonic_ns()))
        return self.n_asked

    def turn(self) -> set[int]:
        """One turn; who got a token."""
        if not self.runner.turn():
            if self.engine.in_flight:
                self.engine.wait()
            elif self.engine.aside.in_flight:
                self.engine.aside.wait()
        got: set[int] = set()
        for event in self.front.poll():
            if isinstance(event, StepResult):
                got |= {row[0] for row in event.rows}
            elif isinstance(event, Done):
                self.ended.add(event.ask_id)
        now = perf_counter()
        for ask_id in got:
            self.first.setdefault(ask_id, now)
            self.counts[ask_id] = self.counts.get(ask_id, 0) + 1
        return got

    def finish(self) -> None:
        """Ends everything that runs."""
        for ask_id in range(1, self.n_asked + 1):
            if ask_id not in self.ended:
                self.front.abort(ask_id)
        while self.engine.n_open or self.engine.in_flight or self.engine.aside.in_flight:
            self.turn()

    def first_token_s(self, n_prompt: int, client: int = 0) -> float:
        """Time to the first token of a new prompt."""
        begun = perf_counter()
        ask_id = self.ask(n_prompt, 1, client)
        while ask_id not in self.first:
            self.turn()
        return self.first[ask_id] - begun

    def streams(self, n: int, n_tokens: int) -> list[int]:
        """n streams that have all begun."""
        ids = [self.ask(24, n_tokens) for _ in range(n)]
        while not all(self.counts.get(i, 0) > 4 for i in ids):
            self.turn()
        return ids

    def gaps(self, ids: list[int], until: int, n: int) -> list[float]:
        """Gaps between steps that gave the streams a token, in ms: n of them, or until an ask has its first token."""
        found: list[float] = []
        last = perf_counter()
        while (until not in self.first) if until else len(found) < n:
            if self.turn() & set(ids):
                now = perf_counter()
                found.append(1e3 * (now - last))
                last = now
        return found


Figure = tuple[str, str, list[float], int]
"""Of a guest: the end of its row's id, unit, values, and of how many guests they are."""


PRICES: dict[tuple[int, int, int], list[float]] = {}
"""Milliseconds of steps with prefill beside decode rows, by rows, tokens of prefill, and thousands of tokens before them."""


class Seeing(CostModel):
    """The engine's cost model, whose measurements are kept."""

    __slots__ = ()

    def see(self, n_decode: int, n_tokens: int, work: float, us: float, context: int = 0) -> None:
        """As the model does."""
        super().see(n_decode, n_tokens, work, us, context)
        if n_decode and n_tokens:
            PRICES.setdefault((n_decode, n_tokens, round((work / n_tokens - n_tokens / 2) / 8192) * 8), []).append(us / 1000)


def share(values: list[float], q: float) -> float:
    """A quantile."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def guests(scene: Scene, n_prompt: int, rounds: int, n_many: int = 64) -> list[Figure]:
    """A client with one prompt beside one with many; its time to first token, alone and by when it comes."""
    alone = statistics.median(scene.first_token_s(n_prompt) for _ in range(5))
    found = []
    for _ in range(rounds):
        for _ in range(n_many):
            scene.ask(n_prompt, 128, client=1)
        until = perf_counter() + scene.random.uniform(0.05, 0.6)
        while perf_counter() < until:
            scene.turn()
        found.append(scene.first_token_s(n_prompt, client=2))
        scene.finish()
    found.sort()
    sys.stdout.write(
        f"{n_prompt} tokens alone {1e3 * alone:.1f} ms; beside {n_many}: p50 {1e3 * found[rounds // 2]:.1f} ms {found[rounds // 2] / alone:.2f}x, most {1e3 * found[-1]:.1f} ms {found[-1] / alone:.2f}x\n"
    )
    sys.stdout.flush()
    ratios = [first / alone for first in found]
    return [(f"{n_prompt}.ttft_p50", "x of alone", [found[rounds // 2] / alone], rounds), (f"{n_prompt}.ttft_most", "x of alone", ratios[-1:], rounds), (f"{n_prompt}.alone_ms", "ms", [1e3 * alone], rounds)]


def beside(scene: Scene, options: argparse.Namespace) -> list[Figure]:
    """Short prompts while a long one is read beside the streams; their times to first token."""
    told = list[Figure]()
    alone = {n: statistics.median(scene.first_token_s(n) for _ in range(5)) for n in options.beside}
    apart = scene.first_token_s(options.prompt) / 3
    for n, first in alone.items():
        ids = scene.streams(options.streams, min(options.prompt, STREAM_TOKENS) - 32)
        quiet = scene.gaps(ids, 0, 60)
        long, found, busy = scene.ask(options.prompt, 1), list[float](), list[float]()
        begun = last = perf_counter()
        while long not in scene.first:
            until, guest = perf_counter() + apart, 0
            while perf_counter() < until and long not in scene.first:
                busy += scene.gaps(ids, 0, 1)
            if long not in scene.first:
                last, guest = perf_counter(), scene.ask(n, 1)
                busy += scene.gaps(ids, guest, 0)
                found.append(scene.first[guest] - last)
        scene.finish()
        sys.stdout.write(
            f"{n} tokens alone {1e3 * first:.1f} ms; beside {options.streams} streams and {options.prompt} tokens that take {scene.first[long] - begun:.2f} s: "
            f"{' '.join(f'{1e3 * x:.1f}' for x in found)} ms; gaps before p50 {share(quiet, 0.5):.2f}, meanwhile p50 {share(busy, 0.5):.2f} p99 {share(busy, 0.99):.2f} most {max(busy):.2f} ms\n"
        )
        sys.stdout.flush()
        told += [] if not found else [(f"{n}.aside.ttft_ms", "ms", [1e3 * x for x in found], len(found)), (f"{n}.aside.alone_ms", "ms", [1e3 * first], 5), (f"{n}.aside.itl_p99_ms", "ms", [share(busy, 0.99)], len(busy))]
    return told


def policy_of(words: str) -> Policy:
    """The default policy with changes as name=value, separated by commas."""
    kinds = {field.name: type(field.default) for field in fields(Policy)}
    changes = {name: kinds[name](value) for name, value in (word.split("=") for word in words.split(",") if word)}
    return replace(Policy(), **changes)


def measure(scene: Scene, options: argparse.Namespace) -> tuple[float, float, float]:
    """Rounds of the prompt alone, the streams alone, and both; ratios of gaps (p50, p99) and of the time to the first token."""
    scene.first_token_s(options.prompt // 4)
    alone, beside, quiet, busy = [], [], list[float](), list[float]()
    for _ in range(options.rounds):
        alone.append(scene.first_token_s(options.prompt))
        ids = scene.streams(options.streams, min(options.prompt, STREAM_TOKENS) - 32)
        quiet += scene.gaps(ids, 0, 60)
        begun = perf_counter()
        long = scene.ask(options.prompt, 1)
        busy += scene.gaps(ids, long, 0)
        beside.append(scene.first[long] - begun)
        scene.finish()
    p50, p99 = share(busy, 0.5) / share(quiet, 0.5), share(busy, 0.99) / share(quiet, 0.99)
    ttft = statistics.median(beside) / statistics.median(alone)
    sys.stdout.write(
        f"gaps before p50 {share(quiet, 0.5):.2f} p99 {share(quiet, 0.99):.2f} ms; meanwhile p50 {share(busy, 0.5):.2f} p99 {share(busy, 0.99):.2f} ms "
        f"({len(busy)} gaps): {p50:.2f}x, {p99:.2f}x; first token alone {statistics.median(alone):.2f} s, beside {statistics.median(beside):.2f} s: {ttft:.2f}x\n"
    )
    steps = [f"{n}@{at}k {statistics.median(ms):.1f}" for (rows, n, at), ms in sorted(PRICES.items()) if rows == options.streams and len(ms) > 1]
    sys.stdout.write("  steps with prefill, tokens@before ms: " + "  ".join(steps) + "\n")
    sys.stdout.flush()
    PRICES.clear()
    return p50, p99, ttft


def measure_apart(model: Model, options: argparse.Namespace, part: float) -> tuple[float, float, float]:
    """The same on a device of its own, with that part of it for the prompt."""
    scene = Scene(model, options, part)
    sys.stdout.write(f"{part:g} aside: ")
    found = measure(scene, options)
    scene.device.close()
    return found


def main() -> None:
    """Measures and prints; with --machine writes the board."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pack", default="")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, nargs="*", default=[], metavar="PART")
    parser.add_argument("--machine", default="")
    parser.add_argument("--commit", default="", help="of this tree, where it is no git checkout")
    parser.add_argument("--policy", nargs="*", default=[], metavar="CHANGES")
    parser.add_argument("--beside", type=int, nargs="*", default=[], metavar="TOKENS")
    parser.add_argument("--guests", type=int, nargs="*", default=[], metavar="TOKENS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(opened(options.model, options.prompt + 64, Path(folder)), options)


def run(model: Model, options: argparse.Namespace) -> None:
    """What is asked for, on devices with each share."""
    kind = "cuda" if "cuda" in Path(options.pack).name else "cpu"
    *others, part = options.share or [SHARE[kind]]
    found = [(f".aside_{other:g}", measure_apart(model, options, other)) for other in others]
    scene = Scene(model, options, part)
    freeze()
    for changes in options.policy:
        scene.begin(policy_of(changes))
        sys.stdout.write(f"{changes}: ")
        measure(scene, options)
    told = beside(scene, options) if options.beside else list[Figure]()
    if options.guests:
        scene.begin(Policy())
    of = board.model_name(options.model)
    for n_prompt in options.guests:
        told += guests(scene, n_prompt, 4 * options.rounds)
    if told and options.machine:
        rows = [board.row(f"{options.machine}.guest.{of}.{end}", values, unit, "lower") | {"samples": n} for end, unit, values, n in told]
        board.write(options.machine, "aside" if options.beside else "guests", rows, options.commit, streams=options.streams, prompt=options.prompt)
    if options.policy or told:
        return
    sys.stdout.write(f"{part:g} aside: ")
    found.append(("", measure(scene, options)))
    if options.machine:
        names = (f"{options.machine}.longprefill", f"{options.machine}.longprefill.{of}.{options.streams}x{options.prompt}")
        rows = [board.row(f"{name}{how}.{k}", [v], "x", "lower") for name in names for how, ratios in found for k, v in zip(RATIOS, ratios, strict=True)]
        board.write(options.machine, "longprefill", rows, options.commit, load_average=round(os.getloadavg()[0], 2), model=Path(options.model).name)
    scene.device.close()


if __name__ == "__main__":
    main()
