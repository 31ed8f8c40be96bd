"""Load cells on a modelled device: the engine and scheduler as they are, steps priced by a table, virtual time. No GPU, seconds a cell.

Usage: python -m bench.modelled [--cost 8b.fp8 8b.bf16] [--cells 128/128c32x128 ...] [--long 65000] [--pauses 0.08] [--parted 1.35 1.5]
A cell is PROMPT/ANSWERcSTREAMSxREQUESTS in a closed loop; those of one call go to one engine, one after the other, as they go to a server: what it has learned of
prices in one decides how the next is read. What lies around the engine is a model, too: a client and a front that take a while for each
request, one after the other (COMING_US, with --pauses of a few ms before that share of them), and FRONT_US each way. It answers how a policy behaves, not how fast a machine is.
With --parted the long prompt is read by a part of the device: beside it a step of the rest takes the first number times as long as on the whole, and a step of the part the second.
"""

from __future__ import annotations

import argparse
import ctypes
import heapq
import random
import statistics
import sys
from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field, replace
from struct import Struct

from paddock_runner.engine.loop import Engine
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.process import Runner
from paddock_runner.engine.rehearsal import rehearse
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack.abi import PK_ROW_DEAD, PK_ROW_LENGTH, PK_ROW_SAMPLE
from paddock_runner.wire.channel import Channel
from paddock_runner.wire.messages import Ask, Done, StepResult
from paddock_runner.wire.port import EnginePort, FrontPort

HEAD, NEW, ROW, RESULT = Struct("<Qiiiiiiii"), Struct("<iiii"), Struct("<iiii"), Struct("<iiiifi")
NEW_BYTES, MAX_LENGTH_AT = 152, 16 + 48
TURN_US, FRONT_US, COMING_US, AGAIN_US = 60, 300, 350, 900
"""A turn of the engine; a record's way to or from the client; between two requests of the client; from an answer's end to the next request."""
TOKEN_BYTES = 36 * 2 * 8 * 128 * 2
"""Keys and values of a token in the 8B's shape."""
PAUSE_US = (1000, 4000)
"""What else the client's or the front's processor does now and then."""


@dataclass(frozen=True)
class Cost:
    """Prices of steps: (tokens of the step, ms), straight between them. decode: of steps of decode rows; prompts: of prompts alone; mixed: of those with decode rows beside them.

    row_ns: of a decode row per token before it; weight_bytes: of the checkpoint, from which the engine guesses it. work_ns: of a prefill token per token before it, a chunk counting as least_tokens at least: attention's tiles.
    parted: how many times as long steps take on what a part leaves, and on the part; None: the device has none.
    """

    decode: tuple[tuple[int, float], ...]
    prompts: tuple[tuple[int, float], ...]
    mixed: tuple[tuple[int, float], ...]
    row_ns: float
    work_ns: float
    least_tokens: int
    weight_bytes: int
    parted: tuple[float, float] | None = None

    def step_us(self, rows: list[tuple[int, int]]) -> float:
        """What a step takes. rows: tokens, and tokens before them."""
        n_tokens, n_decode = sum(n for n, _ in rows), sum(n == 1 for n, _ in rows)
        points = self.decode if n_tokens == len(rows) else self.mixed if n_decode else self.prompts
        i = min(max(1, bisect_left(points, (n_tokens, 0.0))), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        context = sum(before for n, before in rows if n == 1)
        work = sum(max(n, self.least_tokens if before else 0) * (before + n / 2) for n, before in rows if n > 1)
        return 1000 * (y0 + (y1 - y0) * (n_tokens - x0) / (x1 - x0)) + (context * self.row_ns + work * self.work_ns) / 1000

    def times(self, factor: float) -> Cost:
        """The same where everything takes so many times as long."""
        decode, prompts, mixed = (tuple((n, factor * ms) for n, ms in points) for points in (self.decode, self.prompts, self.mixed))
        return Cost(decode, prompts, mixed, factor * self.row_ns, factor * self.work_ns, self.least_tokens, self.weight_bytes)

    def packed_ms(self, n_tokens: int) -> float:
        """A step of prompts of 128 tokens alone."""
        return self.step_us([(128, 0)] * (n_tokens // 128)) / 1000


COSTS = {
    "8b.fp8": Cost(
        ((1, 2.2), (2, 3.94), (4, 2.72), (8, 2.69), (16, 2.8), (32, 3.41), (48, 3.44), (64, 3.47), (96, 3.9), (128, 4.02)),
        ((2, 4.0), (128, 4.2), (144, 5.6), (256, 6.3), (272, 7.0), (384, 7.65), (512, 9.15), (528, 11.0), (768, 13.13), (1024, 17.41), (1040, 19.0), (1536, 25.03), (2048, 31.1), (2064, 34.5),
         (2176, 36.4), (2304, 38.63), (2560, 40.79)),
        ((2, 4.5), (128, 5.4), (144, 6.8), (160, 6.92), (256, 8.33), (288, 8.34), (384, 9.23), (416, 9.35), (512, 10.08), (544, 11.38), (640, 12.67), (800, 15.6), (896, 17.18), (1056, 19.76),
         (1152, 20.86), (1568, 27.96), (1664, 28.5), (2080, 36.6), (2176, 38.67), (2208, 38.86), (2304, 40.2), (2336, 40.3), (2432, 41.0), (2560, 42.5)),
        34.0, 1.02, 32, 9_440_000_000,
    ),
    "8b.bf16": Cost(
        ((1, 3.68), (2, 5.02), (4, 3.91), (8, 3.88), (16, 3.88), (32, 4.13), (48, 4.41), (64, 4.46), (96, 5.11), (128, 5.37)),
        ((2, 5.2), (128, 5.51), (144, 8.0), (256, 8.43), (272, 10.4), (384, 10.97), (512, 13.3), (528, 15.5), (640, 16.0), (768, 18.09), (1024, 23.27), (1040, 26.5), (1536, 34.72), (2048, 45.3),
         (2064, 54.5), (2176, 56.65), (2304, 58.72), (2560, 60.9)),
        ((2, 5.3), (128, 5.9), (144, 6.9), (160, 7.06), (256, 9.28), (288, 10.36), (384, 11.85), (416, 12.35), (512, 14.02), (544, 15.46), (640, 16.9), (800, 21.2), (896, 23.8), (1056, 27.8),
         (1152, 30.26), (1568, 40.8), (1664, 41.94), (2080, 55.8), (2176, 56.3), (2208, 59.1), (2304, 59.65), (2336, 60.0), (2432, 60.55), (2560, 61.5)),
        34.0, 1.02, 32, 16_380_000_000,
    ),
}  # fmt: skip
"""An H200, Qwen3-8B's shape, by `python -m bench.gpu_steps --beside 32 128` on 2026-11-30, FP8 at 48f72b7, BF16 at ca36687, decode rows without their context. Products come in tiles of 128 tokens and in waves
of the device, which the points show."""


@dataclass(frozen=True)
class Facts:
    """Of the modelled device."""

    run_ahead: int = 2
    has_drafts: bool = False


class ModelledDevice:
    """Steps take what `cost` says, one after the other, in virtual time. Every answer has its full length."""

    def __init__(self, sizes: StateSizes, cost: Cost, run_ahead: int = 2) -> None:
        self.sizes, self.cost, self.facts = sizes, cost, Facts(run_ahead)
        self.aside = ModelledPart(self, cost.times(cost.parted[1])) if cost.parted else None
        self._rest = cost.times(cost.parted[0]) if cost.parted else cost
        self._gives_way = False
        self.whole_end_ns = 0
        """When the last step ends that has the whole device."""
        self.now_ns = self._free_ns = 1_000_000_000
        self._length, self._max, self._alive = [0] * sizes.n_slots, [0] * sizes.n_slots, [False] * sizes.n_slots
        self.results = memoryview(bytearray(24 * sizes.n_results * sizes.max_step_rows))
        self.top = memoryview(bytearray(8))
        self.allocated: dict[str, int] = {}
        self.kv_page_bytes = TOKEN_BYTES * sizes.page_tokens
        self.done = memoryview(bytearray(8)).cast("Q")
        self._pending: deque[tuple[int, int, list[tuple[int, int, int, int]], bytes]] = deque()
        self.steps: list[tuple[int, int, int, int]] = []
        """Of every step: begin and end in ns, decode rows, prefill tokens."""

    def clock(self) -> int:
        """Virtual time."""
        return self.now_ns

    def advance(self, to_ns: int) -> None:
        """Time passes; steps that end until then are done."""
        self.now_ns = max(self.now_ns, to_ns)
        while self._pending and self._pending[0][0] <= self.now_ns:
            _, seq, rows, new = self._pending.popleft()
            self._run(seq, rows, new)
        if self.aside is not None:
            self.aside.land()

    @property
    def next_end_ns(self) -> int:
        """When the next of the running steps ends; 0: none runs."""
        ends = [queue[0][0] for queue in (self._pending, self.aside.pending if self.aside is not None else ()) if queue]
        return min(ends, default=0)

    def read(self, slot: int, n: int) -> None:
        """The part has read n tokens of a slot's prompt."""
        self._length[slot] += n

    def length_of(self, slot: int) -> int:
        """Tokens of a slot by the steps that are done."""
        return self._length[slot]

    def step(self, input_address: int) -> None:
        """Enqueues a step."""
        seq, n_tokens, n_rows, _, n_new, *_ = HEAD.unpack(ctypes.string_at(input_address, HEAD.size))
        data = ctypes.string_at(input_address + HEAD.size, NEW_BYTES * n_new + ROW.size * n_rows)
        new, rows = data[: NEW_BYTES * n_new], list(ROW.iter_unpack(data[NEW_BYTES * n_new :]))
        length = dict(enumerate(self._length))
        for _, _, rows_before, new_before in (*self._pending, (0, 0, [], new)):
            length.update({slot: n for slot, n, *_ in (NEW.unpack_from(new_before, i) for i in range(0, len(new_before), NEW_BYTES))})
            for slot, n, *_ in rows_before:
                length[slot] += n
        begin = max(self.now_ns, self._free_ns, 0 if self._gives_way or self.aside is None else self.aside.free_ns)
        cost = self._rest if self._gives_way else self.cost
        self._free_ns = begin + int(1000 * cost.step_us([(n, length[slot]) for slot, n, *_ in rows]))
        self.whole_end_ns = self.whole_end_ns if self._gives_way else self._free_ns
        self._pending.append((self._free_ns, seq, rows, new))
        n_decode = sum(n == 1 for _, n, *_ in rows)
        self.steps.append((begin, self._free_ns, n_decode, n_tokens - n_decode))

    def _run(self, seq: int, rows: list[tuple[int, int, int, int]], new: bytes) -> None:
        for at in range(0, len(new), NEW_BYTES):
            slot, self._length[slot], *_ = NEW.unpack_from(new, at)
            self._max[slot] = int.from_bytes(new[at + MAX_LENGTH_AT : at + MAX_LENGTH_AT + 4], "little")
            self._alive[slot] = True
        at = 24 * (seq % self.sizes.n_results) * self.sizes.max_step_rows
        for i, (slot, n, flags, _) in enumerate(rows):
            token, out = -1, PK_ROW_DEAD
            if self._alive[slot]:
                self._length[slot] += n
                token, out = (7, 0) if flags & PK_ROW_SAMPLE else (-1, 0)
                if token >= 0 and self._length[slot] + 1 >= self._max[slot]:
                    out, self._alive[slot] = PK_ROW_LENGTH, False
            RESULT.pack_into(self.results, at + 24 * i, slot, token, out, self._length[slot] + (token >= 0), 0.0, 0)
        self.done[0] = seq

    def give_way(self, is_on: bool) -> None:
        """Steps run on what the part leaves, or on all."""
        self._gives_way = is_on

    def wait(self, seq: int, timeout_us: int) -> bool:
        """Time passes until the step is done, or the time is up."""
        end = next(end for end, at, *_ in self._pending if at == seq) if self.done[0] < seq else self.now_ns
        self.advance(min(end, self.now_ns + 1000 * timeout_us))
        return self.done[0] >= seq

    def times(self, n: int) -> list[tuple[int, int]]:
        """None are kept."""
        return []

    def save_state(self, slot: int, place: int) -> None:
        """There are none."""

    def load_state(self, slot: int, place: int) -> None:
        """There are none."""

    def text_token(self, slot: int, position: int) -> int:
        """There is no text."""
        return 0

    def shrink_pages(self, n_pages: int) -> int:
        """All pages stay."""
        return self.sizes.n_pages

    def copy_page(self, source: int, to: int) -> None:
        """Pages hold nothing."""

    def grow_pages(self, n_pages: int) -> int:
        """All pages are there."""
        return self.sizes.n_pages


class ModelledPart:
    """The part of a modelled device: its steps read one prompt each, one after the other, beside those of the rest. Steps of the whole device and these take turns."""

    def __init__(self, whole: ModelledDevice, cost: Cost) -> None:
        self._whole, self._cost, self.facts, self.free_ns = whole, cost, Facts(1), 0
        self.done = memoryview(bytearray(8)).cast("Q")
        self.pending: deque[tuple[int, int, int, int]] = deque()

    def step(self, input_address: int) -> None:
        """Enqueues a step."""
        data = ctypes.string_at(input_address, HEAD.size + ROW.size)
        slot, n, *_ = ROW.unpack_from(data, HEAD.size)
        before = self._whole.length_of(slot) + sum(more for _, _, at, more in self.pending if at == slot)
        self.free_ns = max(self._whole.now_ns, self.free_ns, self._whole.whole_end_ns) + int(1000 * self._cost.step_us([(n, before)]))
        self.pending.append((self.free_ns, HEAD.unpack_from(data)[0], slot, n))

    def land(self) -> None:
        """Steps that have ended by now are done."""
        while self.pending and self.pending[0][0] <= self._whole.now_ns:
            _, seq, slot, n = self.pending.popleft()
            self._whole.read(slot, n)
            self.done[0] = seq

    def wait(self, seq: int, timeout_us: int) -> bool:
        """Time passes until the step is done, or the time is up."""
        if timeout_us and self.done[0] < seq:
            self._whole.advance(min(self.pending[0][0], self._whole.now_ns + 1000 * timeout_us))
        return self.done[0] >= seq


@dataclass
class Seen:
    """What a client saw of one request, in ns."""

    sent: int
    times: list[int] = field(default_factory=list)


class Scene:
    """An engine on a modelled device, and what happens around it, by virtual time. pauses: the share of requests before which the client makes one; seed: which."""

    def __init__(self, cost: Cost, n_slots: int = 128, max_step_tokens: int = 0, policy: Policy | None = None, ctx: int = 8448, pauses: float = 0.0, seed: int = 1) -> None:
        from paddock_runner.memory.part import BESIDE_TOKENS, PART_TOKENS
        from paddock_runner.memory.plan import STEP_TOKENS

        self.sizes = StateSizes(
            n_slots=n_slots, max_ctx_tokens=-(-ctx // 32) * 32, page_tokens=32, n_pages=n_slots * 300 + 1 + ctx // 32, n_vocab=32000,
            max_step_tokens=max_step_tokens or STEP_TOKENS["cuda"], max_step_rows=n_slots, max_bias=4, max_top=1, part_tokens=PART_TOKENS["cuda"] if cost.parted else 0,
            beside_tokens=BESIDE_TOKENS["cuda"] if cost.parted else 0,
        )  # fmt: skip
        self.device = ModelledDevice(self.sizes, cost)
        channel, known = Channel.create(), rehearse(self.sizes, self.device, policy or Policy(), self.device.clock, cost.weight_bytes)
        self.device.steps.clear()
        self.front = FrontPort(channel, True)
        self.engine = Engine(self.sizes, self.device, [EnginePort(channel, True)], policy, self.device.clock, cost=known)
        self.runner = Runner(self.engine)
        self.seen: dict[int, Seen] = {}
        self.ended: dict[int, int] = {}
        self._coming: list[tuple[int, int, int, int]] = []
        self._client_of: dict[int, int] = {}
        self._n_asked = 0
        self._last_ns = 0
        self._pauses = pauses
        self._random = random.Random(seed)

    def send(self, at_ns: int, n_prompt: int, n_tokens: int, client: int = 0) -> int:
        """A request leaves the client at about that time; its id."""
        self._client_of[self._n_asked + 1] = client
        self._n_asked += 1
        pause_us = self._random.uniform(*PAUSE_US) if self._random.random() < self._pauses else 0.0
        self._last_ns = at_ns = max(at_ns, self._last_ns + int(1000 * (COMING_US + pause_us)))
        heapq.heappush(self._coming, (at_ns + 1000 * FRONT_US, self._n_asked, n_prompt, n_tokens))
        self.seen[self._n_asked] = Seen(at_ns)
        return self._n_asked

    def turn(self) -> list[int]:
        """One turn of the engine; who ended. Time passes by what the turn takes, or to the next thing that happens."""
        device = self.device
        while self._coming and self._coming[0][0] <= device.now_ns:
            came_ns, ask_id, n_prompt, n_tokens = heapq.heappop(self._coming)
            prompt = array("i", [self._random.randrange(300, 32000) for _ in range(n_prompt)])
            self.front.ask(Ask(ask_id, prompt, max_tokens=n_tokens, temperature=0.0, client=self._client_of[ask_id], received_ns=came_ns))
        begun = device.now_ns
        has_moved = self.runner.turn()
        if has_moved:
            device.advance(device.now_ns + 1000 * TURN_US)
        if self.engine.in_flight and (self.engine.is_full or not has_moved):
            self.engine.wait()
        elif self.engine.aside.in_flight and not has_moved:
            self.engine.aside.wait()
        ended = self._listen()
        if not has_moved and device.now_ns == begun:
            events = [t for t in (device.next_end_ns, self._coming[0][0] if self._coming else 0, self.engine.hold_until_ns) if t > begun]
            device.advance(min(events))
        return ended

    def finish(self) -> None:
        """Ends everything that runs or is on its way."""
        self._coming.clear()
        for ask_id in self.seen:
            if ask_id not in self.ended:
                self.front.abort(ask_id)
                self.ended[ask_id] = self.device.now_ns
        while self.engine.n_open or self.engine.in_flight:
            if not self.runner.turn() and self.engine.in_flight:
                self.engine.wait()
            self._listen()
        self._last_ns = self.device.now_ns

    def _listen(self) -> list[int]:
        ended = []
        now = self.device.now_ns + 1000 * FRONT_US
        for event in self.front.poll():
            if isinstance(event, StepResult):
                for row in event.rows:
                    self.seen[row[0]].times.append(now)
            elif isinstance(event, Done):
                self.ended[event.ask_id] = now
                ended.append(event.ask_id)
        return ended


def percentile(values: list[float], share: float) -> float:
    """Between the ranks, linearly."""
    return statistics.quantiles(values, n=1000, method="inclusive")[min(998, max(0, round(share * 1000) - 1))] if len(values) > 1 else (values or [0.0])[0]


def run_cell(scene: Scene, n_prompt: int, n_tokens: int, streams: int, requests: int) -> dict[str, float]:
    """A closed loop; times in ms, tokens per second."""
    begun = scene.device.now_ns
    ids = [scene.send(begun, n_prompt, n_tokens) for _ in range(min(streams, requests))]
    left = requests - len(ids)
    while not all(i in scene.ended for i in ids):
        for ask_id in scene.turn():
            if left:
                left -= 1
                ids.append(scene.send(scene.ended[ask_id] + 1000 * AGAIN_US, n_prompt, n_tokens))
    first = [(scene.seen[i].times[0] - scene.seen[i].sent) / 1e6 for i in ids]
    gaps = [(b - a) / 1e6 for i in ids for a, b in zip(scene.seen[i].times, scene.seen[i].times[1:], strict=False)]
    wall = (max(scene.ended[i] for i in ids) - begun) / 1e9
    busy = sum(min(end, scene.device.now_ns) - begin for begin, end, *_ in scene.device.steps if begin >= begun) / 1e9
    return {
        "ttft_p50_ms": percentile(first, 0.5), "ttft_p99_ms": percentile(first, 0.99), "itl_p50_ms": percentile(gaps, 0.5), "itl_p99_ms": percentile(gaps, 0.99),
        "out_tok_s": requests * n_tokens / wall, "busy": busy / wall,
    }  # fmt: skip


def run_long(cost: Cost, n_prompt: int, streams: int = 16, policy: Policy | None = None) -> dict[str, float]:
    """Streams that decode while a long prompt arrives: gaps and time to first token as ratios of those alone."""
    alone = Scene(cost, ctx=max(8448, n_prompt + 64), policy=policy)
    first = run_cell(alone, n_prompt, 4, 1, 2)["ttft_p50_ms"]
    scene = Scene(cost, ctx=max(8448, n_prompt + 64), policy=policy)
    ids = [scene.send(scene.device.now_ns, 128, 7000) for _ in range(streams)]
    while not all(len(scene.seen[i].times) > 200 for i in ids):
        scene.turn()
    begun = scene.device.now_ns
    long = scene.send(begun, n_prompt, 4)
    while not scene.seen[long].times:
        scene.turn()
    before = [(b - a) / 1e6 for i in ids for a, b in zip(scene.seen[i].times, scene.seen[i].times[1:], strict=False) if b < begun][-100 * streams :]
    during = [(b - a) / 1e6 for i in ids for a, b in zip(scene.seen[i].times, scene.seen[i].times[1:], strict=False) if a >= begun]
    ratio = {f"itl_p{round(100 * q)}": percentile(during, q) / percentile(before, q) for q in (0.5, 0.99)}
    return ratio | {"ttft": (scene.seen[long].times[0] - scene.seen[long].sent) / 1e6 / first, "alone_ms": first}


def run_guest(cost: Cost, n_prompt: int, n_slots: int, n_many: int = 64, policy: Policy | None = None, before: tuple[int, ...] = ()) -> dict[str, float]:
    """One client with many requests queued, another that comes with one: the other's time to first token, by when it comes, in ms and as a ratio of alone.

    before: one engine for all moments, as on a server, which has had guests with prompts of so many tokens, as often.
    """
    by_itself = run_cell(Scene(cost, n_slots, policy=policy), n_prompt, 8, 1, 2)["ttft_p50_ms"]
    found: list[float] = []
    scene = Scene(cost, n_slots, policy=policy)
    for length in (*before, n_prompt):
        found.clear()
        for after_us in range(30_000, 500_000, 18_700):
            scene = scene if before else Scene(cost, n_slots, policy=policy)
            begun = scene.device.now_ns
            for _ in range(n_many):
                scene.send(begun, length, 128, client=1)
            guest = scene.send(begun + 1000 * after_us, length, 128, client=2)
            while not scene.seen[guest].times:
                scene.turn()
            found.append((scene.seen[guest].times[0] - scene.seen[guest].sent) / 1e6)
            scene.finish()
    return {"alone_ms": by_itself, "p50_ms": statistics.median(found), "most_ms": max(found), "p50": statistics.median(found) / by_itself, "most": max(found) / by_itself}


def main() -> None:
    """Runs the cells and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", nargs="*", default=list(COSTS), choices=list(COSTS))
    parser.add_argument("--cells", nargs="*", default=["128/128c1x8", "128/128c8x32", "128/128c32x96", "128/128c32x128", "128/128c128x256", "2048/128c32x96"])
    parser.add_argument("--long", type=int, default=65000)
    parser.add_argument("--max-step-tokens", type=int, default=0)
    parser.add_argument("--pauses", type=float, default=0.0)
    parser.add_argument("--parted", type=float, nargs=2, metavar=("REST", "PART"))
    options = parser.parse_args()
    for name in options.cost:
        scene = Scene(COSTS[name], max_step_tokens=options.max_step_tokens, pauses=options.pauses)
        run_cell(scene, 128, 2, 1, 1)
        for cell in options.cells:
            shape, requests = cell.split("x")
            n_in, rest = shape.split("/")
            n_out, streams = rest.split("c")
            found = run_cell(scene, int(n_in), int(n_out), int(streams), int(requests))
            ratio = found["ttft_p99_ms"] / found["ttft_p50_ms"]
            sys.stdout.write(f"{name} {cell}: " + "  ".join(f"{k} {v:.2f}" for k, v in found.items()) + f"  p99/p50 {ratio:.2f}\n")
        if options.long:
            sys.stdout.write(f"{name} long: " + "  ".join(f"{k} {v:.2f}" for k, v in run_long(replace(COSTS[name], parted=options.parted), options.long).items()) + "\n")


if __name__ == "__main__":
    main()
