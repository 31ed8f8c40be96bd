"""Slot arrays and the step's difference, written into one preallocated input block in the layout of pack.h.

Decode rows stay in place from step to step. What will happen to a slot is known when its row joins: a calendar by step number says
when it needs a page or reaches its length, so a step in which nothing happens costs the same at any number of slots: the block goes
out again with a new number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..memory.state import AHEAD_TOKENS, StateSizes
from ..pack.abi import PK_PAGE_OF_POOL, PK_ROW_DRAFT, PK_ROW_HELD, PK_ROW_SAMPLE, PK_ROW_SCORE
from .request import NEVER, Request

HEAD = Struct("<Qiiiiiiii")
NEW_SLOT = ROW = Struct("<iiii")
NEW_SLOT_BYTES = 152
SCORE = PK_ROW_SAMPLE | PK_ROW_DRAFT | PK_ROW_SCORE
HELD = PK_ROW_SAMPLE | PK_ROW_HELD
Chunk = tuple[Request, int, bool]
"""A request, how many tokens of its prefill, and whether the row draws a token."""


class SlotTable:
    """The slots of one device state. Everything is allocated here, once."""

    __slots__ = (
        "_block",
        "_calendar",
        "_due_at",
        "_free",
        "_is_changed",
        "_is_standing",
        "_last_rows",
        "_left",
        "_mark",
        "_mark_seq",
        "_moved",
        "_n_new",
        "_n_payload",
        "_n_window_writes",
        "_n_written",
        "_new",
        "_page_template",
        "_page_writes",
        "_payload",
        "_row_of",
        "_rows",
        "_rows_at",
        "_seq_word",
        "_texts",
        "address",
        "border_tokens",
        "context",
        "decode",
        "history",
        "history_flat",
        "max_page_writes",
        "max_payload_words",
        "n_top",
        "pages_ahead",
        "read_length",
        "request_of",
        "row_stride",
        "seq",
        "sizes",
    )  # fmt: skip

    def __init__(self, sizes: StateSizes) -> None:
        n = sizes.n_slots
        if n > min(sizes.max_step_rows, sizes.max_step_tokens):
            raise UsageError(
                f"{n} slots need as many rows and tokens per step, {sizes.max_step_rows} and {sizes.max_step_tokens} are planned",
                n_slots=n, max_step_rows=sizes.max_step_rows, max_step_tokens=sizes.max_step_tokens,
            )  # fmt: skip
        self.sizes = sizes
        self.seq = 0
        """Number of the last composed step."""
        self.request_of: list[Request | None] = [None] * n
        self._free = list(range(n - 1, -1, -1))
        self.row_stride = sizes.max_ctx_tokens + 1
        self.history: NDArray[np.int32] = np.zeros((n, self.row_stride), np.int32)
        """int32 [n_slots, max_ctx_tokens + 1]: the answers as far as they have been read; the token that made a slot n long is at n."""
        self.history_flat = self.history.reshape(-1)
        self.read_length: NDArray[np.int32] = np.zeros(n, np.int32)
        """int32 [n_slots]: tokens of each slot by the last result that was read, kept only while some rows wait for masks."""
        self._mark = [0] * n
        self._mark_seq = [0] * n
        self._left = [0] * n
        self._is_standing = [False] * n
        self._row_of = [0] * n
        self._moved: list[int] = []
        self._n_written = 0
        self._due_at = [0] * n
        self._calendar: dict[int, list[int]] = {}
        self.decode: list[int] = []
        """Slots with a row in every step, in row order."""
        self.context = 0
        """Tokens of all of them."""
        self._rows = memoryview(bytearray(ROW.size * sizes.max_step_rows))
        self.border_tokens = 0
        """With a number here, a decoding slot is due at each multiple of it: its recurrent states can be saved there."""
        self.n_top = 0
        """Running requests that want the k best logprobs."""
        self.pages_ahead = sizes.pages_ahead
        """Pages that a decoding request gets at a time, while there are plenty."""
        self.max_page_writes = 2 * sizes.slot_pages + n * max(1, AHEAD_TOKENS // sizes.page_tokens)
        n_window_writes = sizes.n_window_pages + n * sizes.window_back
        self.max_payload_words = 2 * self.row_stride + 2 * sizes.max_step_tokens + 2 * n * sizes.max_bias
        size = (
            HEAD.size
            + n * NEW_SLOT_BYTES
            + 16 * (sizes.max_step_rows + self.max_page_writes + n_window_writes + 2 * n)
            + 4 * self.max_payload_words
        )
        block = np.zeros(size // 8 + 1, np.uint64)
        self.address = int(block.ctypes.data)
        self._block = block.data.cast("B")
        self._seq_word = block.data
        self._page_template = np.zeros((sizes.slot_pages, 4), np.int32)
        self._page_template[:, 1] = np.arange(sizes.slot_pages)
        self._new = bytearray()
        self._page_writes = array("i")
        self._texts = array("i")
        self._payload: list[bytes] = []
        self._n_payload = self._n_new = self._n_window_writes = 0
        self._last_rows = self._rows_at = -1
        self._is_changed = True

    # ---- slots ----

    @property
    def n_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self, request: Request) -> int:
        """A slot for the request. The caller has made sure that one is free."""
        slot = self._free.pop()
        self.request_of[slot] = request
        request.slot, request.first_seq = slot, NEVER
        self.n_top += request.n_logprobs > 0
        return slot

    def give(self, slot: int) -> None:
        """The slot is free again. The caller has made sure that no step in flight has a row of it."""
        request = self.request_of[slot]
        assert request is not None
        self.n_top -= request.n_logprobs > 0
        self.request_of[slot] = None
        self.read_length[slot] = 0
        if self._page_writes:
            kept = np.array(self._page_writes, np.int32).reshape(-1, 4)
            kept = kept[kept[:, 0] != slot]
            self._page_writes = array("i", kept.tobytes())
            self._n_window_writes = int((kept[:, 3] == PK_PAGE_OF_POOL).sum())
        self._mark[slot] = self._due_at[slot] = 0
        self._free.append(slot)

    def tokens_of(self, request: Request, first: int, end: int) -> bytes:
        """int32 tokens [first, end) of a decoding request, as far as they have been read."""
        n = request.n_tokens
        answer = self.history[request.slot, max(first, n) + 1 : end + 1].tobytes()
        return request.tokens[4 * first : 4 * end] + answer if first < n else answer

    def has_room(self, request: Request, n_pages: int) -> bool:
        """The input block can take this start in the present step."""
        text = request.n_tokens if request.needs_history else request.remaining_tokens + self.sizes.lookback_tokens
        words = self._n_payload + text + 2 * request.n_bias
        n_writes = len(self._page_writes) // 4 - self._n_window_writes + n_pages
        return words <= self.max_payload_words and n_writes <= self.max_page_writes

    def start(self, request: Request) -> None:
        """Stages a new slot: its parameters, page table, and tokens; those that are cached only when a penalty or an n-gram looks at them."""
        slot, holding = request.slot, request.holding
        assert holding is not None
        self._n_new += 1
        self._new += NEW_SLOT.pack(slot, request.done_tokens, self._n_payload, 0)
        self._new += request.sampling
        if request.n_bias:
            self._pay(request.bias)
        pages = holding.pages
        writes = self._page_template[: len(pages)]
        writes[:, 0] = slot
        writes[:, 2] = pages
        self._page_writes.frombytes(writes.tobytes())
        if holding.n_behind < len(holding.windows):
            self.write_windows(request, len(holding.windows) - holding.n_behind)
        first = 0 if request.needs_history else max(0, request.done_tokens - self.sizes.lookback_tokens)
        self._texts.extend((slot, first, request.n_tokens - first, self._n_payload))
        self._pay(request.tokens[4 * first :] if first else request.tokens)

    def write_pages(self, request: Request, n: int) -> None:
        """Stages the last n entries of a request's page table."""
        slot, holding = request.slot, request.holding
        assert holding is not None
        pages = holding.pages
        for index in range(len(pages) - n, len(pages)):
            self._page_writes.extend((slot, index, pages[index], 0))

    def write_windows(self, request: Request, n: int) -> None:
        """Stages the last n entries of its table of the windows' pages."""
        slot, holding = request.slot, request.holding
        assert holding is not None
        pages = holding.windows
        for index in range(len(pages) - n, len(pages)):
            self._page_writes.extend((slot, index, pages[index], PK_PAGE_OF_POOL))
        self._n_window_writes += n

    def write_text(self, slot: int, position: int, tokens: bytes) -> None:
        """Stages tokens of a slot, from `position` on."""
        self._texts.extend((slot, position, len(tokens) // 4, self._n_payload))
        self._pay(tokens)

    def _pay(self, data: bytes) -> None:
        self._payload.append(data)
        self._n_payload += len(data) // 4

    # ---- decode rows ----

    def join(self, request: Request, length: int, has_row: bool = True) -> None:
        """A request begins to decode: `length` tokens have been launched. With has_row it gets a row in every step from now on."""
        slot = request.slot
        if has_row:
            self._row_of[slot] = row = len(self.decode)
            self.decode.append(slot)
            if row < self._n_written:
                self._moved.append(row)
            self._is_standing[slot] = True
            self._is_changed = True
            self.context += length
        self.mark(request, length)

    def mark(self, request: Request, length: int) -> None:
        """Counts anew how far the slot can go: to the end of its pages, or until max_length tokens are there."""
        slot, holding = request.slot, request.holding
        assert holding is not None
        room = len(holding.pages) * self.sizes.page_tokens - length
        left = request.max_length - 1 - length
        if room < left:
            left = room
        if self.border_tokens:
            left = min(left, self.border_tokens - length % self.border_tokens)
        self._mark[slot] = length
        if self._is_standing[slot]:
            seq = self.seq
            self._mark_seq[slot] = seq
            self._due_at[slot] = due = seq + left + 1
            group = self._calendar.get(due)
            if group is None:
                self._calendar[due] = [slot]
            else:
                group.append(slot)
        else:
            self._left[slot] = left

    def leave(self, slot: int) -> None:
        """The slot gets no more rows; `launched` stays right."""
        if self._is_standing[slot]:
            self._mark[slot] += self.seq - self._mark_seq[slot]
            self.context -= self._mark[slot]
            self._is_standing[slot] = False
            self._due_at[slot] = 0
            last = self.decode.pop()
            if last != slot:
                row = self._row_of[slot]
                self.decode[row] = last
                self._row_of[last] = row
                self._moved.append(row)
            self._is_changed = True

    def launched(self, slot: int) -> int:
        """Tokens of a decoding slot whose KV is computed, or will be by what has been launched."""
        n = self._mark[slot]
        return n + self.seq - self._mark_seq[slot] if self._is_standing[slot] else n

    def due(self) -> list[int]:
        """Slots that cannot have their row in the next step before something is done about them."""
        at = self.seq + 1
        group = self._calendar.get(at)
        if not group:
            return []
        return [slot for slot in dict.fromkeys(group) if self._due_at[slot] == at]

    def left(self, slot: int) -> int:
        """Tokens that a slot without a standing row can still run before something is done about it."""
        return self._left[slot]

    def is_spent(self, slot: int) -> bool:
        """The same for one slot without a standing row."""
        return not self._left[slot]

    def count_row(self, slot: int, n: int = 1) -> None:
        """A single row of n tokens of a slot without a standing row is launched; below 0: it was left out after all."""
        self._mark[slot] += n
        self._left[slot] -= n

    # ---- the block ----

    def _draft_flags(self, slot: int) -> int:
        request = self.request_of[slot]
        return PK_ROW_DRAFT | (HELD if request is not None and request.use_mask else PK_ROW_SAMPLE)

    def compose(
        self, seq: int, chunks: Sequence[Chunk], singles: Sequence[tuple[int, int]], drafts: Sequence[tuple[int, int]] = (), is_apart: bool = False
    ) -> tuple[int, int, int]:
        """Writes the input block: standing decode rows, then `singles` (slot, tokens), whose draws wait for masks, then prefill chunks, those that are rated last, then guesses,
        whose draws wait where their request does.

        drafts: (slot, tokens). is_apart: standing rows are left out of this step. Returns tokens, results and draws of the step.
        """
        decode = [] if is_apart else self.decode
        n_decode = len(decode)
        self.seq = seq
        self.context += n_decode
        self._calendar.pop(seq, None)
        if is_apart:
            self._postpone()
        has_diff = bool(self._n_new or self._page_writes or self._texts)
        if not (has_diff or chunks or singles or drafts or self._is_changed) and self._last_rows == n_decode:
            self._seq_word[0] = seq
            return n_decode, n_decode, n_decode
        rows, pack, size = self._rows, ROW.pack_into, ROW.size
        if self._is_changed:
            for row in (*self._moved, *range(self._n_written, n_decode)):
                if row < n_decode:
                    pack(rows, size * row, decode[row], 1, PK_ROW_SAMPLE, 0)
            self._moved.clear()
        n_rows = n_tokens = n_samples = n_decode
        for slot, n in singles:
            pack(rows, size * n_rows, slot, n, HELD, 0)
            n_rows += 1
            n_tokens += n
            n_samples += 1
        scored: list[tuple[int, int, int]] = []
        for request, n, samples in chunks:
            if request.is_scored and request.done_tokens < request.prompt_tokens:
                scored.append((request.slot, n, SCORE))
                continue
            flags = (HELD if request.use_mask else PK_ROW_SAMPLE) if samples else 0
            pack(rows, size * n_rows, request.slot, n, flags, 0)
            n_rows += 1
            n_tokens += n
            n_samples += samples
        n_results = n_rows
        for slot, n, flags in (*scored, *((slot, n, self._draft_flags(slot)) for slot, n in drafts)):
            pack(rows, size * n_rows, slot, n, flags, 0)
            n_rows += 1
            n_tokens += n
            n_samples += n
            n_results += n
        self._write(seq, n_tokens, n_rows, n_samples, is_same=not self._is_changed and n_rows == n_decode)
        self._is_changed = is_apart
        self._n_written = n_decode
        self._last_rows = n_rows if n_rows == n_decode and not has_diff else -1
        if has_diff:
            self._clear()
        return n_tokens, n_results, n_samples

    def _postpone(self) -> None:
        """Everything that would happen to standing rows happens a step later."""
        for slot in self.decode:
            self._mark_seq[slot] += 1
            self._due_at[slot] += 1
        self._calendar = {due + 1: group for due, group in self._calendar.items()}

    def _write(self, seq: int, n_tokens: int, n_rows: int, n_samples: int, is_same: bool) -> None:
        """Head, then the arrays; standing rows that lie where they lay are left there (is_same)."""
        block = self._block
        HEAD.pack_into(
            block, 0, seq, n_tokens, n_rows, n_samples, self._n_new, len(self._page_writes) // 4, len(self._texts) // 4,
            0, self._n_payload,
        )  # fmt: skip
        at = HEAD.size
        if self._n_new:
            at = self._put(at, self._new)
        end = at + ROW.size * n_rows
        if not is_same or self._rows_at != at:
            block[at:end] = self._rows[: end - at]
            self._rows_at = at
        at = end
        if self._page_writes:
            at = self._put(at, self._page_writes.tobytes())
        if self._texts:
            at = self._put(at, self._texts.tobytes())
        for part in self._payload:
            at = self._put(at, part)

    def _put(self, at: int, data: bytes | bytearray) -> int:
        end = at + len(data)
        self._block[at:end] = data
        return end

    def _clear(self) -> None:
        if self._n_new:
            self._new.clear()
            self._n_new = 0
        if self._page_writes:
            del self._page_writes[:]
            self._n_window_writes = 0
        if self._texts:
            del self._texts[:]
        if self._n_payload:
            self._payload.clear()
            self._n_payload = 0


def draws_come_first(chunks: Sequence[Chunk]) -> bool:
    """The rows that draw a token come before those that do not, so that a slice finds them."""
    n = sum(samples for _, _, samples in chunks)
    return all(samples for _, _, samples in chunks[:n])
