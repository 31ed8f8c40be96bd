"""Promises of the scheduler against a model of it, with scripts that hypothesis writes: every ask ends with what it answers alone, whatever
features are on; nothing is lost or shared wrongly after any turn; clients get what their weights say; nobody waits for ever."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paddock_runner.engine import drafts, loop
from paddock_runner.engine.policy import Policy
from paddock_runner.engine.tiering import TierConfig
from paddock_runner.memory.state import StateSizes
from paddock_runner.wire.messages import Done, Reason

from tests.soak.fake_device import FakeDevice, alone
from tests.soak.rig import Answer, Rig
from tests.unit.engine.test_drafts import Oracle

SIZES = StateSizes(n_slots=5, max_ctx_tokens=64, page_tokens=4, n_pages=60, n_vocab=500, max_step_tokens=24, max_step_rows=12, max_bias=4, max_top=3, n_results=6)
POLICY = Policy(max_queue=60, share_tokens=8, min_chunk_tokens=4, oldest_every=5, draft_gain=0.5, draft_gap_us=0.0)
FAMILIES = [[(97 * f + 13 * i) % 480 for i in range(64)] for f in range(3)]


@dataclass(frozen=True)
class Features:
    """What is switched on."""

    run_ahead: int
    n_pages: int
    n_snapshots: int
    tiers: str
    guesses: bool
    is_patient: bool = False
    """Steps are launched late, and prompts wait for company."""
    is_parted: bool = False
    """Prompts of a few tokens are read by a part of the device."""


@dataclass
class Model:
    """What must come of it: the answer of every ask, and how many turns an ask may wait for its end."""

    expected: dict[int, list[int]] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    oracle: Oracle = field(default_factory=lambda: Oracle(1, 0.3))

    def asked(self, answer: Answer) -> None:
        ask = answer.ask
        prompt = list(memoryview(ask.prompt))
        self.expected[ask.ask_id] = alone(prompt, ask.max_tokens, 500, 64, ask.seed, ask.stop)
        self.oracle.learn(prompt, self.expected[ask.ask_id])

    def judge(self, answer: Answer) -> None:
        end, expected = answer.end, self.expected[answer.ask.ask_id]
        assert isinstance(end, Done), end
        assert answer.tokens == expected[: len(answer.tokens)] and end.output_tokens == len(answer.tokens)
        if end.reason == Reason.ABORT:
            assert answer.ask.ask_id in self.aborted
        else:
            assert answer.tokens == expected


features = st.builds(
    Features, st.integers(0, 3), st.sampled_from([24, 40, 60, 120]), st.sampled_from([0, 0, 2, 6, 20]), st.sampled_from(["", "host", "disk"]), st.booleans(), st.booleans(), st.booleans()
)
asks = st.tuples(
    st.just("ask"), st.integers(0, 2), st.integers(0, 48), st.integers(1, 8), st.integers(1, 30), st.integers(0, 2), st.integers(1, 3), st.integers(-1, 1)
)
actions = st.one_of(asks, asks, asks, st.tuples(st.just("turn"), st.integers(1, 12)), st.tuples(st.just("abort"), st.integers(0, 40)))


def play(rig: Rig, model: Model, script: list[tuple]) -> None:
    """The script, turn by turn."""
    for action, *words in script:
        if action == "ask":
            family, shared, tail, n, client, weight, priority = words
            prompt = (FAMILIES[family][:shared] + [(31 * shared + 7 * i + n) % 480 for i in range(tail)])[:56]
            n = min(n, 64 - len(prompt))
            model.asked(rig.ask(prompt, n, client=client, weight=weight, priority=priority, seed=n % 3))
        elif action == "turn":
            for _ in range(words[0]):
                rig.turn()
                rig.engine.check()
        else:
            running = [a for a in rig.answers.values() if a.end is None]
            if running:
                answer = running[words[0] % len(running)]
                model.aborted.add(answer.ask.ask_id)
                rig.abort(answer)


def finish(rig: Rig, folder: Path) -> None:
    """Turns until all have ended; nobody may take for ever."""
    for _ in range(20_000):
        moved = rig.turn()
        rig.engine.check()
        if not moved:
            if all(a.end for a in rig.answers.values()):
                return
            rig.device.now_ns += 1_000_000
    raise AssertionError("somebody starves")


def check_promises(on: Features, script: list[tuple]) -> None:
    model = Model()
    sizes = replace(SIZES, n_pages=on.n_pages, n_snapshots=on.n_snapshots, recurrent_bytes=64 * (on.n_snapshots > 0), part_tokens=6 * on.is_parted)
    policy = replace(POLICY, burst_ms=0.5 if on.is_parted else POLICY.burst_ms)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(drafts, "look_up", model.oracle), mock.patch.object(loop, "CONSIDER_EVERY", 1):
        device = FakeDevice(sizes, on.run_ahead, seed=len(script), n_attached=10)
        if on.is_parted:
            device.part(sizes.part_tokens)
        rig = Rig(sizes, policy=policy if on.is_patient else replace(policy, lead_ms=0.0, gather_ms=0.0), device=device)
        rig.engine.drafter.is_on = on.guesses and not on.n_snapshots
        if on.tiers:
            disk = (1 << 15) * (on.tiers == "disk")
            rig.runner.use_tiers(device, TierConfig(30 * device.page_bytes, disk, Path(folder), ("m",)))
        play(rig, model, script)
        finish(rig, Path(folder))
        for answer in rig.answers.values():
            model.judge(answer)
        rig.assert_empty()
        rig.close()


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(features, st.lists(actions, min_size=5, max_size=50))
def test_every_ask_ends_with_what_it_answers_alone(on: Features, script: list[tuple]) -> None:
    check_promises(on, script)


def of_client(client: int, least: int) -> st.SearchStrategy[tuple]:
    """An ask of that client, of some length and with an answer of at least so many tokens."""
    return st.tuples(st.just("ask"), st.integers(0, 2), st.integers(0, 40), st.integers(2, 8), st.integers(least, 30), st.just(client), st.just(1), st.just(0))


many = st.lists(of_client(1, 16), min_size=9, max_size=16)
guests = st.lists(st.one_of(of_client(2, 1), st.tuples(st.just("turn"), st.integers(1, 12)), st.tuples(st.just("abort"), st.integers(0, 40))), min_size=6, max_size=40)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(features, many, guests)
def test_prompts_of_a_light_client_change_nobodys_answer(on: Features, script: list[tuple], more: list[tuple]) -> None:
    """They are read in steps without the decode rows of the others."""
    check_promises(replace(on, run_ahead=max(1, on.run_ahead)), [*script, *more])


def test_a_prompt_of_a_light_client_is_read_without_the_others_rows_and_never_twice_in_a_row() -> None:
    rig = Rig(replace(SIZES, n_slots=12, n_pages=240), policy=POLICY, run_ahead=1)
    rig.engine.drafter.is_on = False
    answers = [rig.ask([(31 * k + i) % 480 for i in range(12)], 40, client=1) for k in range(9)]
    while not all(len(a.tokens) > 2 for a in answers):
        rig.turn()
    answers += [rig.ask([(77 * k + i) % 480 for i in range(10)], 3, client=2 + k) for k in range(3)]
    rig.run()
    n_decode = [sum(n == 1 for _, n, _ in rows) for rows in rig.device.rows]
    apart = [i for i, n in enumerate(n_decode) if not n and i > n_decode.index(9)]
    assert apart and all(n_decode[i + 1] >= 9 for i in apart)
    assert all(a.tokens == alone(list(memoryview(a.ask.prompt)), a.ask.max_tokens, 500, 64) for a in answers)
    rig.close()


def test_a_light_client_that_waits_for_a_slot_leaves_the_others_rows_in_the_steps() -> None:
    rig = Rig(replace(SIZES, n_slots=12, n_pages=400), policy=replace(POLICY, lead_ms=0.0, gather_ms=0.0), run_ahead=1)
    rig.engine.drafter.is_on = False
    first = rig.ask([(77 * i) % 480 for i in range(10)], 50, client=2)
    answers = [rig.ask([(31 * k + i) % 480 for i in range(12)], 40, client=1) for k in range(10)]
    while not all(len(a.tokens) > 2 for a in (first, *answers)):
        rig.turn()
    long = rig.ask([(7 * i) % 480 for i in range(56)], 2, client=1)
    while long.started is None:
        rig.turn()
    before = len(rig.device.rows)
    answers += [rig.ask([(31 * k + i) % 480 for i in range(12)], 4, client=1) for k in range(10, 20)]
    second = rig.ask([(13 * i) % 480 for i in range(10)], 3, client=2)
    while not long.tokens:
        rig.turn()
    assert second.started is None, "no slot is free"
    assert all(sum(n == 1 for _, n, _ in rows) >= 11 for rows in rig.device.rows[before:])
    rig.run()
    rig.close()


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1 << 20))
def test_clients_that_always_want_more_are_served_by_their_weights(run_ahead: int, heavy: int, light: int, seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(replace(SIZES, n_slots=3), policy=replace(POLICY, max_queue=500, oldest_every=1 << 30), run_ahead=run_ahead)
    rig.engine.drafter.is_on = False
    for k in range(120):
        for client, weight in ((1, heavy), (2, light)):
            rig.ask([(k * 31 + client * 7 + i) % 480 for i in range(rng.randrange(4, 30))], rng.randrange(2, 12), client=client, weight=weight)
    queue = rig.engine.scheduler.queue
    for _ in range(160):
        rig.turn()
        if any(not queue.clients[c].n_waiting for c in (1, 2)):
            break
        one, two = (queue.clients[c].served_tokens for c in (1, 2))
        assert abs(one - two) <= 4 * 42, "both have had the same, by weight, but for what runs"
    for answer in rig.answers.values():
        rig.abort(answer)
    rig.run()
    rig.close()
