"""Slot arrays and the step's difference, written into one preallocated input block in the layout of pack.h.

Decode rows stay in place from step to step; `until` counts, for every slot at once, how many more rows may be launched before
something happens (a page is full, the length is reached). When nothing happened the block goes out again with a new number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..memory.state import StateSizes
from ..pack.abi import PK_ROW_SAMPLE
from .request import Request

HEAD = Struct("<Qiiiiiiii")
NEW_SLOT = Struct("<iiii")
NEW_SLOT_BYTES = 152
NEVER = 1 << 30
Chunk = tuple[Request, int, bool]
"""A request, how many tokens of its prefill, and whether the row draws a token."""


class SlotTable:
    """The slots of one device state. Everything is allocated here, once."""

    __slots__ = (
        "_active",
        "_at",
        "_block",
        "_free",
        "_is_changed",
        "_last_rows",
        "_mark",
        "_masks",
        "_n_new",
        "_n_payload",
        "_new",
        "_page_writes",
        "_payload",
        "_rows",
        "_seq_word",
        "_span",
        "_texts",
        "_until",
        "address",
        "decode",
        "history",
        "history_flat",
        "max_page_writes",
        "max_payload_words",
        "n_top",
        "read_length",
        "request_of",
        "row_stride",
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
        self.request_of: list[Request | None] = [None] * n
        self._free = list(range(n - 1, -1, -1))
        self.row_stride = sizes.max_ctx_tokens + 1
        self.history: NDArray[np.int32] = np.zeros((n, self.row_stride), np.int32)
        """int32 [n_slots, max_ctx_tokens + 1]: what the device's `tokens` holds, as far as it has been read."""
        self.history_flat = self.history.reshape(-1)
        self.read_length: NDArray[np.int32] = np.zeros(n, np.int32)
        """int32 [n_slots]: tokens of each slot by the last result that was read."""
        self._active = np.zeros(n, np.int32)
        self._until = np.full(n, NEVER, np.int32)
        self._mark = [0] * n
        self._span = [NEVER] * n
        self.decode: list[int] = []
        """Slots with a row in every step, in row order."""
        self._rows = np.zeros((sizes.max_step_rows, 4), np.int32)
        self.n_top = 0
        """Running requests that want the k best logprobs."""
        self.max_page_writes = 2 * sizes.slot_pages + n
        words = sizes.mask_words
        self.max_payload_words = 2 * self.row_stride + n * words + 2 * n * sizes.max_bias
        size = (
            HEAD.size
            + n * (NEW_SLOT_BYTES + 8)
            + 16 * (sizes.max_step_rows + self.max_page_writes + 2 * n)
            + 4 * self.max_payload_words
        )
        block = np.zeros(size // 8 + 1, np.uint64)
        self.address = int(block.ctypes.data)
        self._block = block.data.cast("B")
        self._seq_word = block.data
        self._new = bytearray()
        self._page_writes = array("i")
        self._texts = array("i")
        self._masks = array("i")
        self._payload: list[bytes] = []
        self._n_payload = self._n_new = 0
        self._last_rows = -1
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
        request.slot = slot
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
            self._page_writes = array("i", kept[kept[:, 0] != slot].tobytes())
        self._until[slot] = self._span[slot] = NEVER
        self._mark[slot] = 0
        self._free.append(slot)

    def has_room(self, request: Request, n_pages: int) -> bool:
        """The input block can take this start in the present step."""
        words = self._n_payload + request.n_tokens + 2 * request.n_bias + self.sizes.mask_words
        return (
            words <= self.max_payload_words
            and len(self._page_writes) // 4 + n_pages + self.sizes.n_slots <= self.max_page_writes
        )

    def start(self, request: Request) -> None:
        """Stages a new slot: its parameters, page table, and tokens, of which done_tokens are cached."""
        slot, holding = request.slot, request.holding
        assert holding is not None
        self._n_new += 1
        self._new += NEW_SLOT.pack(slot, request.done_tokens, self._n_payload, 0)
        self._new += request.sampling
        if request.n_bias:
            self._pay(request.bias)
        pages = holding.pages
        writes = np.empty((len(pages), 4), np.int32)
        writes[:, 0] = slot
        writes[:, 1] = np.arange(len(pages))
        writes[:, 2] = pages
        writes[:, 3] = 0
        self._page_writes.frombytes(writes.tobytes())
        self._texts.extend((slot, 0, request.n_tokens, self._n_payload))
        self._pay(request.tokens)
        self.history[slot, : request.n_tokens] = np.frombuffer(request.tokens, np.int32)

    def write_page(self, slot: int, index: int, page: int) -> None:
        """Stages one entry of a page table."""
        self._page_writes.extend((slot, index, page, 0))

    def write_mask(self, slot: int, words: bytes) -> None:
        """Stages a slot's mask."""
        self._masks.extend((slot, self._n_payload))
        self._pay(words)

    def _pay(self, data: bytes) -> None:
        self._payload.append(data)
        self._n_payload += len(data) // 4

    # ---- decode rows ----

    def join(self, request: Request, length: int, has_row: bool = True) -> None:
        """A request begins to decode: `length` tokens have been launched. With has_row it gets a row in every step from now on."""
        slot = request.slot
        self.mark(request, length)
        if has_row:
            self.decode.append(slot)
            self._active[slot] = 1
            self._is_changed = True

    def mark(self, request: Request, length: int) -> None:
        """Counts anew how far the slot can go: to the end of its pages, or until max_length tokens are there."""
        slot, holding = request.slot, request.holding
        assert holding is not None
        room = len(holding.pages) * self.sizes.page_tokens - length
        self._mark[slot] = length
        self._span[slot] = min(room, request.max_length - 1 - length)
        self._until[slot] = self._span[slot]

    def leave(self, slot: int) -> None:
        """The slot gets no more rows."""
        if self._active[slot]:
            self._active[slot] = 0
            self.decode.remove(slot)
            self._is_changed = True

    def pause(self, slot: int) -> None:
        """Makes `due` silent about a slot that has left; `launched` stays right."""
        launched = self.launched(slot)
        self._mark[slot], self._span[slot] = launched, NEVER
        self._until[slot] = NEVER

    def launched(self, slot: int) -> int:
        """Tokens of a decoding slot whose KV is computed, or will be by what has been launched."""
        return self._mark[slot] + self._span[slot] - int(self._until[slot])

    def due(self) -> list[int]:
        """Slots that cannot have another row before something is done about them."""
        if self._until.all():
            return []
        found: list[int] = np.flatnonzero(self._until == 0).tolist()
        return found

    def count_row(self, slot: int) -> None:
        """A single row of a slot without a standing row is launched."""
        self._until[slot] -= 1

    # ---- the block ----

    def compose(self, seq: int, chunks: Sequence[Chunk], singles: Sequence[int]) -> tuple[int, int, int]:
        """Writes the input block: standing decode rows, then `singles` (slots), then prefill chunks. Returns (T, R, S)."""
        decode = self.decode
        n_decode = len(decode)
        np.subtract(self._until, self._active, out=self._until)
        if (
            not (self._is_changed or chunks or singles or self._page_writes or self._n_new or self._masks)
            and self._last_rows == n_decode
        ):
            self._seq_word[0] = seq
            return n_decode, n_decode, n_decode
        rows = self._rows
        if self._is_changed:
            if decode:
                rows[:n_decode, 0] = decode
                rows[:n_decode, 1] = 1
                rows[:n_decode, 2] = PK_ROW_SAMPLE
            self._is_changed = False
        n_rows = n_tokens = n_samples = n_decode
        for slot in singles:
            rows[n_rows] = (slot, 1, PK_ROW_SAMPLE, 0)
            n_rows += 1
            n_tokens += 1
            n_samples += 1
        for request, n, samples in chunks:
            rows[n_rows] = (request.slot, n, PK_ROW_SAMPLE if samples else 0, 0)
            n_rows += 1
            n_tokens += n
            n_samples += samples
        self._write(seq, n_tokens, n_rows, n_samples)
        is_plain = n_rows == n_decode and not (self._n_new or self._page_writes or self._masks)
        self._last_rows = n_rows if is_plain else -1
        self._clear()
        return n_tokens, n_rows, n_samples

    def _write(self, seq: int, n_tokens: int, n_rows: int, n_samples: int) -> None:
        block = self._block
        HEAD.pack_into(
            block, 0, seq, n_tokens, n_rows, n_samples, self._n_new, len(self._page_writes) // 4, len(self._texts) // 4,
            len(self._masks) // 2, self._n_payload,
        )  # fmt: skip
        at = HEAD.size
        self._at = at
        self._put(self._new)
        self._put(self._rows[:n_rows].data)
        self._put(self._page_writes)
        self._put(self._texts)
        self._put(self._masks)
        for part in self._payload:
            self._put(part)

    def _put(self, data: bytes | bytearray | array[int] | memoryview) -> None:
        if len(data):
            view = memoryview(data).cast("B")
            end = self._at + len(view)
            self._block[self._at : end] = view
            self._at = end
            view.release()

    def _clear(self) -> None:
        if self._n_new:
            self._new.clear()
            self._n_new = 0
        if self._page_writes:
            del self._page_writes[:]
        if self._texts:
            del self._texts[:]
        if self._masks:
            del self._masks[:]
        if self._n_payload:
            self._payload.clear()
            self._n_payload = 0
