"""Runs a real device step by step along given token ids: what the golden tests compare. No engine, no text."""

from __future__ import annotations

import ctypes
import struct

from paddock_runner.pack import abi
from paddock_runner.pack.device import Device

N_TOP = 20


class Teacher:
    """Slot 0 of a device, driven with hand-made step inputs. Pages 1, 2, ... are the slot's."""

    def __init__(self, device: Device, chunk: int, flags: int = abi.PK_ROW_SAMPLE) -> None:
        self.device, self.chunk, self.flags, self.seq = device, chunk, flags, 0

    def _step(self, new: list, rows: list, pages: list, texts: list, payload: list[int], n_samples: int) -> None:
        self.seq += 1
        head = abi.pk_step_head(self.seq, sum(r[1] for r in rows), len(rows), n_samples, len(new), len(pages), len(texts), 0, len(payload))
        blob = bytes(head) + b"".join(bytes(n) for n in new)
        for entry in [*rows, *pages, *texts]:
            blob += struct.pack("4i", *entry)
        blob += struct.pack(f"{len(payload)}i", *payload)
        buffer = (ctypes.c_uint64 * (len(blob) // 8 + 1))()
        ctypes.memmove(buffer, blob, len(blob))
        self.device.step(ctypes.addressof(buffer))
        assert self.device.wait(self.seq, 60_000_000)

    def begin(self, ids: list[int]) -> dict[int, float]:
        """Prefills a prompt in chunks; log-probabilities of the best tokens after it."""
        page_tokens = self.device.state.page_tokens
        n_pages = -(-(len(ids) + 64) // page_tokens)
        self.device.grow_pages(n_pages + 1)
        sampling = abi.pk_sampling(0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)
        sampling.prompt_length, sampling.max_length, sampling.n_logprobs = len(ids), self.device.state.max_ctx_tokens, N_TOP
        new = [abi.pk_new_slot(0, 0, 0, 0, sampling)]
        pages = [(0, i, i + 1, 0) for i in range(n_pages)]
        texts = [(0, 0, len(ids), 0)]
        payload = list(ids)
        for at in range(0, len(ids), self.chunk):
            n = min(self.chunk, len(ids) - at)
            is_last = at + n == len(ids)
            self._step(new, [(0, n, abi.PK_ROW_SAMPLE if is_last else 0, 0)], pages, texts, payload, int(is_last))
            new, pages, texts, payload = [], [], [], []
        self.length = len(ids)
        return self._best()

    def follow(self, token: int) -> dict[int, float]:
        """Feeds `token` as the next input (whatever was drawn); log-probabilities after it."""
        self._step([], [(0, 1, self.flags, 0)], [], [(0, self.length, 1, 0)], [token], 1)
        self.length += 1
        return self._best()

    def _best(self) -> dict[int, float]:
        state = self.device.state
        block = self.seq % state.n_results
        size = ctypes.sizeof(abi.pk_result)
        result = abi.pk_result.from_buffer_copy(self.device.results, block * state.max_step_rows * size)
        assert not result.flags & (abi.PK_ROW_DEAD | abi.PK_ROW_NAN), result.flags
        at = block * state.max_step_rows * state.max_top * 8
        self.token = result.token
        return dict(struct.unpack_from("if", self.device.top, at + 8 * i) for i in range(result.n_top))
