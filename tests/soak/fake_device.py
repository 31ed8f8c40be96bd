"""A device that computes nothing but hashes, and catches every mistake: wrong page, wrong order, wrong length.

The KV of position p is a hash of the KV of position p - 1 (read through the page table) and of token p, so a page that is shared,
freed or written wrongly changes every later token. The next token is a hash of the last KV, seed and position.
With pages of windows (sizes.n_window_pages) the hashes are kept there, too, and those that the window sees must be right when all rows have written.
With recurrent layers (sizes.recurrent_bytes) the hash goes on from the slot's own state, which is saved and loaded apart from the pages.
"""

from __future__ import annotations

import ctypes
import random
from array import array
from dataclasses import dataclass, replace
from struct import Struct

from paddock_runner.errors import PackError
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.wire.messages import SAMPLING

HEAD, NEW, ROW, WRITE, TEXT, FINISH, RESULT = (Struct(f) for f in ("<Qiiiiiiii", "<iiii", "<iiii", "<iiii", "<iiii", "<Qii", "<iiiifi"))
M = (1 << 61) - 1
STEP_US, ROW_US, TOKEN_US = 2000, 50, 100
MOST_WAIT_US = 100_000
GRANULE_PAGES = 4


@dataclass(frozen=True)
class Facts:
    run_ahead: int
    has_drafts: bool = True


def mix(a: int, b: int) -> int:
    return (a * 1_000_003 + b * 7_919 + 12_345) * 2_654_435_761 % M


def draw(kv: int, seed: int, position: int, n_vocab: int, banned: set[int] = frozenset(), mask: int | None = None) -> int:  # type: ignore[assignment]
    token = mix(mix(kv, seed), position) % n_vocab
    while token in banned or (mask is not None and not mask >> token & 1):
        token = (token + 1) % n_vocab
    return token


def alone(prompt: list[int], max_tokens: int, n_vocab: int, ctx: int, seed: int = 0, stop: tuple[int, ...] = (), min_tokens: int = 0, masks: list[int] | None = None) -> list[int]:
    """What this ask answers when nobody else is there."""
    tokens, out, kv = list(prompt), [], 0
    for token in tokens:
        kv = mix(kv, token)
    limit = min(ctx, len(prompt) + max_tokens) if max_tokens else ctx
    while True:
        banned = set(stop) if len(tokens) + 1 <= len(prompt) + min_tokens else set()
        token = draw(kv, seed, len(tokens), n_vocab, banned, masks[len(out)] if masks else None)
        tokens.append(token)
        out.append(token)
        if token in stop or len(tokens) >= limit:
            return out
        kv = mix(kv, token)


class FakeDevice:
    """run_ahead 0: `step` runs the step. Otherwise steps run when waited for, or by chance: the engine never knows."""

    def __init__(self, sizes: StateSizes, run_ahead: int = 0, seed: int = 0, n_attached: int = 0, nan_token: int = -2) -> None:
        self.sizes, self.facts, self.rng, self.nan_token = sizes, Facts(run_ahead), random.Random(seed), nan_token
        n = sizes.n_slots
        self.tokens = [[-1] * (sizes.max_ctx_tokens + 1) for _ in range(n)]
        self.length, self.alive = [0] * n, [False] * n
        self.table = [[0] * sizes.slot_pages for _ in range(n)]
        self.window_table = [[0] * sizes.slot_pages for _ in range(n)]
        self.window_kv: dict[tuple[int, int], int] = {}
        self.seen: list[tuple[int, int, int]] = []
        """What the windows of this step's rows see: page, place in it, and what must be there."""
        self.sampling: list[tuple] = [()] * n
        self.masks: dict[int, list[int]] = {}
        """Of this step's rows."""
        self.allocated: dict[str, int] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.results = memoryview(bytearray(24 * sizes.n_results * sizes.max_step_rows))
        self.top = memoryview(bytearray(8 * sizes.n_results * sizes.max_step_rows * max(1, sizes.max_top)))
        self._done = bytearray(8)
        self.done = memoryview(self._done).cast("Q")
        self.pending: list = []
        self.now_ns = 1_000_000_000
        self.last_seq = 0
        self.open: bytes | None = None
        """The step that waits for pk_finish."""
        self.brought: dict[int, dict[int, list[int]]] = {}
        """Masks of slots, by step: one, or one for each draw of a row of guesses."""
        self.n_attached = n_attached or sizes.n_pages
        self.most_pages = sizes.n_pages
        """Pages that it has memory for: others may take some of it."""
        self.n_given = self.n_made = 0
        """Copies from and to host memory."""
        self.fails_at = 0
        self.state: list[tuple[int, int]] = [(0, 0)] * n
        """Of each slot: tokens so far, and their hash."""
        self.saved: dict[int, tuple[int, int]] = {}
        self.gives_way = self.is_part = False
        self.aside: FakeDevice | None = None
        self.log: list[tuple[int, int, int, int]] = []
        """(seq, T, R, dead rows) of every step."""
        self.rows: list[list[tuple[int, int, int]]] = []

    def times(self, n: int) -> list[tuple[int, int]]:
        return []

    def give_way(self, is_on: bool) -> None:
        assert is_on != self.gives_way, "told twice"
        self.gives_way = is_on

    def part(self, n_tokens: int) -> FakeDevice:
        """A device beside it over the same slots and pages, with steps of one row."""
        part = FakeDevice(replace(self.sizes, max_step_tokens=n_tokens, max_step_rows=1), min(1, self.facts.run_ahead), self.rng.randrange(1 << 30), self.n_attached)
        part.is_part = True
        for name in ("tokens", "length", "alive", "table", "sampling", "kv", "window_table", "window_kv", "state"):
            setattr(part, name, getattr(self, name))
        self.aside = part
        return part

    def grow_pages(self, n_pages: int) -> int:
        self.n_attached = max(self.n_attached, min(self.sizes.n_pages, self.most_pages, n_pages))
        return self.n_attached

    def shrink_pages(self, n_pages: int) -> int:
        self.n_attached = min(self.n_attached, -(-n_pages // GRANULE_PAGES) * GRANULE_PAGES)
        for at in [at for at in self.kv if at[0] >= self.n_attached]:
            del self.kv[at]
        return self.n_attached

    def text_token(self, slot: int, position: int) -> int:
        self.settle()
        return self.tokens[slot][position]

    def copy_page(self, source: int, to: int) -> None:
        def copy() -> None:
            self.kv.update({(to, i): self.kv[source, i] for i in range(self.sizes.page_tokens) if (source, i) in self.kv})

        self._copy(copy)

    def _copy(self, copy) -> None:  # type: ignore[no-untyped-def]
        """Copies come in order with the steps."""
        if self.pending:
            self.pending.append(copy)
        else:
            copy()

    def _to_host(self, copy) -> None:  # type: ignore[no-untyped-def]
        """A copy from or to host memory, counted."""

        def counted() -> None:
            copy()
            self.n_made += 1

        self.n_given += 1
        self._copy(counted)

    # ---- places in host memory: a page is its hashes as int64 ----

    def alloc_host_pages(self, n: int) -> None:
        self.n_host_pages = n
        self.host = memoryview(bytearray(n * self.page_bytes))

    @property
    def page_bytes(self) -> int:
        return 8 * self.sizes.page_tokens

    kv_page_bytes = page_bytes

    @property
    def page_facts(self) -> tuple[str, ...]:
        return ("fake",)

    def host_page(self, place: int) -> memoryview:
        return self.host[place * self.page_bytes : (place + 1) * self.page_bytes]

    def page_out(self, page: int, place: int) -> None:
        size = self.sizes.page_tokens
        self._to_host(lambda: self.host_page(place).cast("q").__setitem__(slice(0, size), array("q", [self.kv.get((page, i), -1) for i in range(size)])))

    def page_in(self, place: int, page: int) -> None:
        def copy() -> None:
            for i, value in enumerate(self.host_page(place).cast("q").tolist()):
                self.kv[page, i] = value

        self._to_host(copy)

    state_bytes = 16

    def alloc_host_states(self, n: int) -> None:
        self.host_states = memoryview(bytearray(16 * n))

    def host_state(self, host_place: int) -> memoryview:
        return self.host_states[16 * host_place : 16 * host_place + 16]

    def state_out(self, place: int, host_place: int) -> None:
        self._to_host(lambda: self.host_state(host_place).cast("q").__setitem__(slice(0, 2), array("q", self.saved[place])))

    def state_in(self, host_place: int, slot: int) -> None:
        def copy() -> None:
            n, kv = self.host_state(host_place).cast("q").tolist()
            self.state[slot] = (n, kv)

        self._to_host(copy)

    @property
    def window_bytes(self) -> int:
        return 8 * self.sizes.page_tokens

    def alloc_host_windows(self, n: int) -> None:
        self.host_windows = memoryview(bytearray(n * self.window_bytes))

    def host_window(self, place: int) -> memoryview:
        return self.host_windows[place * self.window_bytes : (place + 1) * self.window_bytes]

    def window_out(self, page: int, place: int) -> None:
        size = self.sizes.page_tokens
        self._to_host(lambda: self.host_window(place).cast("q").__setitem__(slice(0, size), array("q", [self.window_kv.get((page, i), -1) for i in range(size)])))

    def window_in(self, place: int, page: int) -> None:
        def copy() -> None:
            for i, value in enumerate(self.host_window(place).cast("q").tolist()):
                self.window_kv[page, i] = value

        self._to_host(copy)

    def copied(self) -> tuple[int, int]:
        return self.n_given, self.n_made

    def settle(self) -> None:
        while self.can_run:
            self.run_one()

    def save_state(self, slot: int, place: int) -> None:
        assert 0 <= place < self.sizes.n_snapshots
        self._copy(lambda: self.saved.__setitem__(place, self.state[slot]))

    def load_state(self, slot: int, place: int) -> None:
        self._copy(lambda: self.state.__setitem__(slot, self.saved[place]))

    def clock(self) -> int:
        """Time moves by what steps cost, and a little with every look."""
        self.now_ns += 100
        return self.now_ns

    def step(self, input_address: int) -> None:
        head = HEAD.unpack(ctypes.string_at(input_address, HEAD.size))
        seq, _, n_rows, _, n_new, n_pages, n_texts, _, n_payload = head
        if self.fails_at and seq >= self.fails_at:
            raise PackError("the device has failed")
        assert seq == self.last_seq + 1, "steps are numbered without gaps"
        self.last_seq = seq
        n_bytes = HEAD.size + 152 * n_new + 16 * (n_rows + n_pages + n_texts) + 4 * n_payload
        assert self.open is None, "a step comes before the last was finished"
        data = ctypes.string_at(input_address, n_bytes)
        self.pending.append(data)
        rows = data[HEAD.size + 152 * n_new : HEAD.size + 152 * n_new + 16 * n_rows]
        if any(flags & abi.PK_ROW_HELD for _, _, flags, _ in ROW.iter_unpack(rows)):
            self.open = data
            if not self.facts.run_ahead:
                self.now_ns += 1000 * STEP_US
        assert sum(isinstance(p, bytes) for p in self.pending) <= self.facts.run_ahead + 1
        self.go_on()

    def go_on(self) -> None:
        """Runs what has been given: all of it, or some of it."""
        while self.can_run and ((not self.facts.run_ahead and not self.is_part) or self.rng.random() < 0.4):
            self.run_one()

    @property
    def can_run(self) -> bool:
        return bool(self.pending) and self.pending[0] is not self.open

    def finish(self, input_address: int) -> None:
        seq, n, _ = FINISH.unpack(ctypes.string_at(input_address, FINISH.size))
        assert self.open is not None and seq == self.last_seq, "that step is not open"
        size = 4 * self.sizes.mask_words
        data = ctypes.string_at(input_address + FINISH.size, n * (4 + size))
        slots = memoryview(data)[: 4 * n].cast("i").tolist()
        assert n <= self.sizes.max_step_rows and len(set(slots)) == sum(a != b for a, b in zip(slots, [*slots[1:], -1], strict=False)), "a slot's masks lie side by side"
        brought = self.brought[seq] = {slot: [] for slot in slots}
        for i, slot in enumerate(slots):
            brought[slot].append(int.from_bytes(data[4 * n + i * size : 4 * n + (i + 1) * size], "little"))
        self.open = None
        self.go_on()

    def wait(self, seq: int, timeout_us: int) -> bool:
        if timeout_us < MOST_WAIT_US and self.rng.random() < 0.5:
            self.now_ns += 1000 * timeout_us
            return self.done[0] >= seq
        while self.done[0] < seq:
            assert self.can_run, "nobody finishes the step that is waited for"
            self.run_one()
        return True

    def run_one(self) -> None:
        data = self.pending.pop(0)
        if not isinstance(data, bytes):
            return data()  # type: ignore[no-any-return]
        seq, n_tokens, n_rows, n_samples, n_new, n_pages, n_texts, _, n_payload = HEAD.unpack_from(data)
        at = HEAD.size
        new = [(NEW.unpack_from(data, at + 152 * i), SAMPLING.unpack_from(data, at + 152 * i + 16)) for i in range(n_new)]
        at += 152 * n_new
        parts = []
        for layout, n in ((ROW, n_rows), (WRITE, n_pages), (TEXT, n_texts)):
            parts.append(list(layout.iter_unpack(data[at : at + layout.size * n])))
            at += layout.size * n
        rows, writes, texts = parts
        payload = memoryview(data)[at:].cast("i")
        assert len(payload) == n_payload
        assert n_tokens == sum(r[1] for r in rows) <= self.sizes.max_step_tokens and n_rows <= self.sizes.max_step_rows
        assert n_samples == sum(r[1] if r[2] & abi.PK_ROW_DRAFT else r[2] & abi.PK_ROW_SAMPLE for r in rows) and len({r[0] for r in rows}) == n_rows, "a slot has one row"
        for (slot, length, _, _), sampling in new:
            self.alive[slot], self.length[slot], self.sampling[slot] = True, length, sampling
            self.tokens[slot] = [-1] * (self.sizes.max_ctx_tokens + 1)
        assert len({(slot, index, pool) for slot, index, _, pool in writes}) == len(writes), "two writes to one place of a page table"
        for slot, index, page, pool in writes:
            assert 0 < page < (self.sizes.n_window_pages if pool else self.n_attached)
            (self.window_table if pool else self.table)[slot][index] = page
        for slot, position, n, offset in texts:
            self.tokens[slot][position : position + n] = payload[offset : offset + n].tolist()
        brought = self.brought.pop(seq, {})
        for slot, n, flags, _ in rows:
            if slot in brought:
                assert flags & abi.PK_ROW_HELD and len(brought[slot]) <= (n if flags & abi.PK_ROW_DRAFT else 1)
        self.masks = brought
        block = seq % self.sizes.n_results * self.sizes.max_step_rows
        n_dead = 0
        self.seen.clear()
        results = [result for slot, n, flags, _ in rows for result in self.results_of(slot, n, flags)]
        assert all(self.window_kv[page, i] == kv for page, i, kv in self.seen), "a window sees what is not there"
        assert len(results) <= self.sizes.max_step_rows
        for i, result in enumerate(results):
            slot = result[0]
            n_dead += result[2] == abi.PK_ROW_DEAD
            n_top = min(max(result[1] >= 0 and self.sampling[slot][12], 0), self.sizes.max_top)
            RESULT.pack_into(self.results, (block + i) * 24, *result, -0.5, n_top)
            for k in range(n_top):
                ctypes_at = ((block + i) * self.sizes.max_top + k) * 8
                self.top[ctypes_at : ctypes_at + 4] = ((result[1] + k) % self.sizes.n_vocab).to_bytes(4, "little")
        self.rows.append([r[:3] for r in rows])
        self.log.append((seq, n_tokens, n_rows, n_dead))
        self.done[0] = seq
        n_decode = sum(r[1] == 1 for r in rows)
        self.now_ns += 1000 * (STEP_US + ROW_US * n_decode + TOKEN_US * (n_tokens - n_decode))

    def results_of(self, slot: int, n: int, flags: int) -> list[tuple[int, int, int, int]]:
        if flags & abi.PK_ROW_HELD and slot not in self.masks:
            if self.alive[slot]:
                self.row(slot, n, 0)
                self.length[slot] -= n  # pages and recurrent states have gone on all the same
            return [(slot, -1, abi.PK_ROW_DEAD, self.length[slot])] * (n if flags & abi.PK_ROW_DRAFT else 1)
        if not flags & abi.PK_ROW_DRAFT:
            return [self.row(slot, n, flags)]
        if flags & abi.PK_ROW_SCORE:
            rated = [self.row(slot, 1, 0) for _ in range(n)]
            return [(slot, self.tokens[slot][length] if state == 0 else -1, state or abi.PK_ROW_SCORE, length + (state == 0)) for _, _, state, length in rated]
        guesses = self.tokens[slot][self.length[slot] + 1 : self.length[slot] + n]
        assert min(guesses, default=0) >= 0 or not self.alive[slot]
        out: list[tuple[int, int, int, int]] = []
        most = min(n, len(self.masks[slot])) if flags & abi.PK_ROW_HELD else n
        while len(out) < most and (not out or (not out[-1][2] and out[-1][1] == guesses[len(out) - 1])):
            out.append(self.row(slot, 1, flags))
        dead = abi.PK_ROW_DEAD if out[0][2] == abi.PK_ROW_DEAD else 0
        return out + [(slot, -1, dead, self.length[slot])] * (n - len(out))

    def row(self, slot: int, n: int, flags: int) -> tuple[int, int, int, int]:
        if not self.alive[slot]:
            return slot, -1, abi.PK_ROW_DEAD, self.length[slot]
        first, tokens, table, size = self.length[slot], self.tokens[slot], self.table[slot], self.sizes.page_tokens
        n_prompt, min_length, max_length, _, _, use_mask, n_stop = self.sampling[slot][9:16]
        kv = self.kv[table[(first - 1) // size], (first - 1) % size] if first else 0
        if self.sizes.recurrent_bytes and first:
            assert self.state[slot] == (first, kv), "the states are not those of the tokens so far"
        for p in range(first, first + n):
            assert table[p // size] != 0 and tokens[p] >= 0
            kv = mix(kv, tokens[p])
            self.kv[table[p // size], p % size] = kv
            if self.sizes.n_window_pages:
                assert self.window_table[slot][p // size] != 0
                self.window_kv[self.window_table[slot][p // size], p % size] = kv
        if self.sizes.n_window_pages:
            for p in range(max(0, first - self.sizes.window_tokens + 1), first + n):
                self.seen.append((self.window_table[slot][p // size], p % size, self.kv[table[p // size], p % size]))
        self.length[slot] = length = first + n
        self.state[slot] = (length, kv)
        if not flags & abi.PK_ROW_SAMPLE:
            return slot, -1, 0, length
        if self.nan_token in tokens[:n_prompt]:
            self.alive[slot] = False
            return slot, -1, abi.PK_ROW_NAN, length
        stop = set(self.sampling[slot][16 : 16 + n_stop])
        assert self.sampling[slot][4] == 1.0 or min(tokens[:length]) >= 0, "a penalty needs the whole prompt"
        token = draw(kv, self.sampling[slot][8], length, self.sizes.n_vocab, stop if length + 1 <= min_length else set(), self.masks[slot].pop(0) if use_mask else None)
        assert bool(use_mask) == bool(flags & abi.PK_ROW_HELD), "a row draws without its mask"
        tokens[length] = token
        assert length + 1 <= max_length
        out = (abi.PK_ROW_STOP if token in stop else 0) | (abi.PK_ROW_LENGTH if length + 1 >= max_length else 0)
        if out:
            self.alive[slot] = False
        return slot, token, out, length + 1
