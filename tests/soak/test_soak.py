"""Random asks, aborts, masks, deadlines and shortages against the whole engine: the device model catches any wrong page,
the checker any lost one, and each answer must be what the ask answers alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from paddock_runner.engine.policy import Policy
from paddock_runner.memory.state import StateSizes, window_pages
from paddock_runner.wire.guesses import Guessed, Walked
from paddock_runner.wire.messages import Done, ErrorCode, MaskUpdate, Reason, Refused, RefusedCode
from paddock_runner.wire.port import FrontPort

from tests.soak.fake_device import FakeDevice, alone
from tests.soak.rig import Answer, Rig

SIZES = StateSizes(n_slots=6, max_ctx_tokens=96, page_tokens=4, n_pages=97, n_vocab=500, max_step_tokens=40, max_step_rows=10, max_bias=4, max_top=3, n_results=6)
NAN_TOKEN = 499
POLICY = Policy(max_queue=40, share_tokens=8, min_chunk_tokens=4, oldest_every=5)


class Storm:
    """One random run. Prompts are drawn from few families, so that prefixes are shared at every length."""

    def __init__(self, seed: int, run_ahead: int, n_pages: int, n_fronts: int, n_snapshots: int = 0, window: int = 0, n_window_pages: int = 0, part_tokens: int = 0) -> None:
        self.rng = rng = random.Random(seed)
        sizes = replace(SIZES, n_pages=n_pages, n_snapshots=n_snapshots, recurrent_bytes=64 * (n_snapshots > 0), max_guesses=4 * (n_snapshots > 0), window_tokens=window, n_window_pages=n_window_pages, part_tokens=part_tokens)
        device = FakeDevice(sizes, run_ahead, seed, n_attached=rng.choice((0, 2, 30)), nan_token=NAN_TOKEN)
        if part_tokens:
            device.part(part_tokens)
        self.rig = Rig(sizes, policy=replace(POLICY, burst_ms=rng.choice((0.5, 2.0))) if part_tokens else POLICY, n_fronts=n_fronts, device=device)
        self.families = [[rng.randrange(480) for _ in range(90)] for _ in range(4)]
        self.expected: dict[int, list[int]] = {}
        self.front_of: dict[int, int] = {}
        self.masks: dict[int, list[int]] = {}
        self.sent: dict[int, int] = {}
        """Output tokens whose masks have been sent, or that are sure."""
        self.aborted: set[int] = set()
        self.abort_at: dict[int, int] = {}
        self.rig.on_token, self.rig.on_guess = self.token, self.guess
        self.masked_share = 0.15
        self.least_pages = 0
        """Others take memory of the device and leave it again: it has so many pages at least; 0: they do not."""
        self.stale: list[tuple[FrontPort, Walked]] = []

    def prompt(self) -> list[int]:
        rng = self.rng
        shared = rng.choice(self.families)[: rng.choice((0, 3, 8, 20, 40, 70))]
        tail = [rng.randrange(480) for _ in range(rng.randrange(1, 16))]
        return (shared + tail)[:88] + ([NAN_TOKEN] if rng.random() < 0.03 else [])

    def ask(self) -> None:
        rng, rig = self.rng, self.rig
        prompt = self.prompt()
        n = rng.randrange(1, 97 - len(prompt)) if rng.random() < 0.8 else 0
        seed, salt = rng.randrange(3), rng.randrange(2)
        stop = tuple(rng.sample(range(480), rng.choice((0, 3, 17))))
        min_tokens = rng.choice((0, 0, 4))
        front = rng.randrange(len(rig.fronts))
        masked = rng.random() < self.masked_share and NAN_TOKEN not in prompt
        masks = self.some_masks(stop) if masked else []
        answer = rig.ask(
            prompt, n, front, seed=seed, salt=salt, stop=stop, min_tokens=min_tokens, client=rng.randrange(3), priority=rng.choice((-1, 0, 0, 1)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.5)), use_mask=masked, n_logprobs=rng.choice((-1, -1, 0, 2)), deadline_ns=rng.choice((1, rig.device.now_ns + rng.randrange(1, 60_000_000))) if rng.random() < 0.04 else 0,
        )  # fmt: skip
        ask_id = answer.ask.ask_id
        self.front_of[ask_id] = front
        self.expected[ask_id] = alone(prompt, n, 500, 96, seed, stop, min_tokens, masks)
        if masked:
            self.masks[ask_id] = masks
            self.send_mask(ask_id, 0)
        act = rng.random()
        if act < 0.1:
            self.abort(answer)
        elif act < 0.25:
            self.abort_at[ask_id] = rng.randrange(1, 30)

    def some_masks(self, stop: tuple[int, ...]) -> list[int]:
        """Masks of an answer; now and then nothing but one token may come, several times in a row."""
        rng, masks = self.rng, list[int]()
        while len(masks) < 97:
            masks += [1 << rng.choice([t for t in range(500) if t not in stop]) for _ in range(rng.choice((0, 0, 1, 5, 20)))]
            masks.append(sum(1 << t for t in range(500) if rng.random() < 0.5 and t not in stop) | 1)
        return masks

    def send_mask(self, ask_id: int, index: int) -> None:
        masks, sure = self.masks[ask_id], list[int]()
        first = index
        if first < self.sent.get(ask_id, 0):
            return
        while (mask := masks[index]).bit_count() == 1 and index < 96:
            sure.append(mask.bit_length() - 1)
            index += 1
        self.sent[ask_id] = index + 1
        self.rig.fronts[self.front_of[ask_id]].masks([MaskUpdate(ask_id, first, mask.to_bytes(64, "little"), sure)])

    def guess(self, port: FrontPort, guess: Guessed) -> None:
        """What may come behind guessed tokens; now and then it is said too late."""
        masks, first, places = self.masks[guess.ask_id], self.sent[guess.ask_id], list[int | bytes]()
        for at, token in enumerate(guess.tokens, guess.index):
            if not masks[at] >> token & 1:
                break
            if at + 1 >= first:
                mask = masks[at + 1]
                places.append(mask.bit_length() - 1 if mask.bit_count() == 1 else mask.to_bytes(64, "little"))
        walked = Walked(guess.ask_id, guess.index, first, places)
        if self.rng.random() < 0.1:
            self.stale.append((port, walked))
        else:
            port.masks([walked])

    def token(self, answer: Answer) -> None:
        ask_id = answer.ask.ask_id
        while self.stale:
            port, walked = self.stale.pop()
            port.masks([walked])
        n = len(answer.tokens)
        if ask_id in self.masks:
            self.send_mask(ask_id, n)
        if self.abort_at.get(ask_id) == n:
            self.abort(answer)

    def abort(self, answer: Answer) -> None:
        self.aborted.add(answer.ask.ask_id)
        self.rig.abort(answer, self.front_of[answer.ask.ask_id])

    def run(self, n_asks: int) -> None:
        rng, rig = self.rng, self.rig
        asked = 0
        while asked < n_asks:
            for _ in range(min(n_asks - asked, rng.choice((0, 0, 1, 2, 12)))):
                self.ask()
                asked += 1
            for _ in range(rng.randrange(1, 12)):
                if self.least_pages:
                    self.take_memory()
                rig.turn()
                rig.engine.check()
            if rng.random() < 0.05:
                waiting = [a for a in rig.answers.values() if a.end is None]
                if waiting:
                    self.abort(rng.choice(waiting))
        rig.run()
        rig.assert_empty()

    def take_memory(self) -> None:
        """Now and then another share of the memory that the pages do not have is free, and while nothing runs, pages that nobody needs are given back."""
        rng, engine, device = self.rng, self.rig.engine, self.rig.device
        if rng.random() < 0.1:
            device.most_pages = max(device.n_attached, self.least_pages + rng.randrange(10))
        pool, keep = engine.ledger.pool, 1 + engine.ledger.tree.n_pages
        if not engine.n_open and not engine.in_flight and not engine.retiring and keep < pool.n_attached and not engine.ledger.gather(keep, keep, device.copy_page):
            pool.shrink(keep)
            pool.grow(device.shrink_pages(keep))

    def judge(self) -> dict[str, int]:
        """Every ask ended once, with what it answers alone."""
        seen = dict.fromkeys(("stop", "length", "abort", "nan", "queue", "deadline", "cached", "preempted", "masked", "memory"), 0)
        for ask_id, answer in self.rig.answers.items():
            expected, end = self.expected[ask_id], answer.end
            assert answer.tokens == expected[: len(answer.tokens)], f"ask {ask_id} was answered wrongly"
            if isinstance(end, Refused):
                assert not answer.tokens and end.code in (RefusedCode.QUEUE_FULL, RefusedCode.DEADLINE)
                assert end.code != RefusedCode.DEADLINE or answer.ask.deadline_ns
                seen["queue" if end.code == RefusedCode.QUEUE_FULL else "deadline"] += 1
                continue
            assert isinstance(end, Done)
            assert end.output_tokens == len(answer.tokens)
            seen["preempted"] += end.n_preempted
            seen["cached"] += end.cached_tokens
            if end.reason == Reason.ABORT:
                assert ask_id in self.aborted
                seen["abort"] += 1
            elif end.error == ErrorCode.MEMORY:
                assert self.least_pages
                seen["memory"] += 1
            elif end.reason == Reason.ERROR:
                assert NAN_TOKEN in list(memoryview(answer.ask.prompt)) and not answer.tokens
                seen["nan"] += 1
            else:
                assert answer.tokens == expected
                stop = expected[-1] in answer.ask.stop
                assert end.reason == (Reason.STOP if stop else Reason.LENGTH)
                seen[end.reason.name.lower()] += 1
                seen["masked"] += ask_id in self.masks
        return seen


def storm(seed: int, run_ahead: int, n_pages: int, n_asks: int, n_fronts: int = 1, n_snapshots: int = 0, window: int = 0, n_window_pages: int = 0) -> dict[str, int]:
    scene = Storm(seed, run_ahead, n_pages, n_fronts, n_snapshots, window, n_window_pages)
    try:
        scene.run(n_asks)
        return scene.judge()
    finally:
        scene.rig.close()


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 3])
def test_a_storm_with_enough_pages_ends_every_ask_as_it_ends_alone(run_ahead: int) -> None:
    seen = storm(20 + run_ahead, run_ahead, 160, 150)
    assert min(seen[k] for k in ("stop", "length", "abort", "nan", "cached", "masked")) > 0, seen


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_a_storm_short_of_pages_preempts_and_still_answers_right(run_ahead: int) -> None:
    seen = storm(100 + run_ahead, run_ahead, 30, 120)
    assert seen["preempted"] > 0, seen


@pytest.mark.parametrize(("run_ahead", "n_pages", "n_snapshots"), [(0, 160, 40), (2, 160, 12), (3, 60, 12), (1, 30, 6)])
def test_a_storm_on_a_recurrent_model_shares_prefixes_and_answers_right(run_ahead: int, n_pages: int, n_snapshots: int) -> None:
    seen = storm(200 + run_ahead, run_ahead, n_pages, 150, n_snapshots=n_snapshots)
    assert seen["cached"] > 0, seen


@pytest.mark.parametrize(("run_ahead", "n_pages", "window", "n_more"), [(0, 160, 5, 0), (1, 160, 9, 30), (3, 60, 4, 4), (2, 30, 10, 0), (0, 40, 1, 0)])
def test_a_storm_on_a_model_with_windows_gives_their_pages_back_and_answers_right(run_ahead: int, n_pages: int, window: int, n_more: int) -> None:
    """n_more: pages beyond those that running requests need, for what the prefix tree knows."""
    least = window_pages(window, SIZES.n_slots, SIZES.slot_pages, SIZES.page_tokens, SIZES.max_step_tokens)
    seen = storm(300 + run_ahead, run_ahead, n_pages, 150, window=window, n_window_pages=least + n_more)
    assert seen["cached"] > 0, seen


def test_a_storm_from_two_fronts_keeps_their_answers_apart() -> None:
    storm(7, 1, 60, 120, n_fronts=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_many_storms(seed: int) -> None:
    rng = random.Random(seed)
    storm(1000 + seed, rng.randrange(4), rng.choice((26, 30, 40, 60, 97, 160)), 600, rng.choice((1, 1, 2)), rng.choice((0, 0, 3, 8, 40)))
