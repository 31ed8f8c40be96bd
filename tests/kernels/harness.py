"""A bench for one pack: device tensors from numpy, poisoned outputs, rows and pages, one program at a time.

Knows only pk_alloc, pk_write and pk_read: device memory is never touched by address, so that any pack can be tested.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from paddock_runner.formats.fp8 import E4M3
from paddock_runner.memory.state import StateSizes, device_arrays, pinned_arrays
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device
from paddock_runner.pack.library import Pack
from paddock_runner.pack.program import Heads, Program
from paddock_runner.pack.tensor import ELEMENT_BYTES, T, Tensor

POISON = 0xFF
"""Every byte of an output before the op runs: NaN in all float formats."""


def to_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bits of f32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """f32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """e4m3 codes of numbers, rounded to nearest even; what is beyond 448 becomes 448."""
    sizes, size = E4M3[:127].astype(np.float64), np.abs(np.asarray(x, np.float64))
    low = np.clip(np.searchsorted(sizes, size, "right") - 1, 0, 125)
    middle = (sizes[low] + sizes[low + 1]) / 2
    code = low + ((size > middle) | ((size == middle) & (low % 2 == 1)))
    return (code | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def encode(x: np.ndarray, format: int) -> np.ndarray:
    """The array's elements as a format stores them."""
    if format == abi.PK_F16:
        return x.astype(np.float16)
    if format == abi.PK_BF16:
        return to_bf16(x)
    if format == abi.PK_FP8_E4M3:
        return to_e4m3(x)
    return x.astype({abi.PK_F32: np.float32, abi.PK_I32: np.int32, abi.PK_U8: np.uint8}[format])


def decode(raw: bytes, format: int) -> np.ndarray:
    """The inverse of encode, as f32 (integers stay what they are)."""
    if format == abi.PK_BF16:
        return from_bf16(np.frombuffer(raw, np.uint16))
    if format == abi.PK_FP8_E4M3:
        return E4M3[np.frombuffer(raw, np.uint8)]
    kinds = {abi.PK_F32: np.float32, abi.PK_F16: np.float16, abi.PK_I32: np.int32, abi.PK_U8: np.uint8}
    values = np.frombuffer(raw, kinds[format])
    return values.astype(np.float32) if format == abi.PK_F16 else values


def rounded(x: np.ndarray, format: int) -> np.ndarray:
    """x as the format can hold it, in float64: what a reference must compute with."""
    return decode(np.ascontiguousarray(encode(x, format)).tobytes(), format).astype(np.float64).reshape(x.shape)


@dataclass
class Bench:
    """One open device with a small state."""

    pack: Pack
    max_isa: int = 0
    n_threads: int = 2
    page_bytes: int = 0
    sizes: StateSizes = field(default_factory=lambda: StateSizes(8, 256, 16, 64, 100, 256, 16, 8, 5, 3))
    is_invariant: bool = False

    def __post_init__(self) -> None:
        self.device = Device(self.pack, 0, self.n_threads, self.max_isa, self.is_invariant)
        self.activation = self.device.facts.activation
        s = self.sizes
        self.page_bytes = self.page_bytes or 4096
        self.device.reserve_kv(s.n_pages, self.page_bytes)
        self.device.grow_pages(s.n_pages)
        self.device.fill(self.device.kv_address, POISON, s.n_pages * self.page_bytes)
        names = ("n_slots", "max_ctx_tokens", "page_tokens", "slot_pages", "n_vocab", "max_step_tokens", "max_step_rows", "max_bias", "max_top", "n_results")
        scalars = {name: getattr(s, name) for name in names} | {"kv_page_stride": self.page_bytes}
        self.device.set_state(scalars, device_arrays(s), pinned_arrays(s))
        self.state = self.device.state

    # ---- operands ----

    def upload(self, values: np.ndarray, format: int, rows: int | None = None, gap: int = 0) -> Tensor:
        """values [n, cols] on the device; `gap` unused (poisoned) elements between rows."""
        values = np.atleast_2d(values)
        n, cols = values.shape
        stride = (cols + gap) * ELEMENT_BYTES[format]
        raw = np.full((n, stride), POISON, np.uint8)
        raw[:, : cols * ELEMENT_BYTES[format]] = np.ascontiguousarray(encode(values, format)).view(np.uint8).reshape(n, -1)
        address = self.device.alloc(raw.size + 64, "operand")
        self.device.write(address, raw.tobytes())
        return Tensor(address, n if rows is None else rows, cols, format, stride)

    def activations(self, values: np.ndarray, rows: int | None = None, gap: int = 0) -> tuple[Tensor, np.ndarray]:
        """An operand in the pack's activation format, and what it really holds."""
        return self.upload(values, self.activation, rows, gap), rounded(values, self.activation)

    def output(self, n: int, cols: int, rows: int | None = None, gap: int = 0, format: int | None = None) -> Tensor:
        """A poisoned operand of n rows."""
        format = self.activation if format is None else format
        stride = (cols + gap) * ELEMENT_BYTES[format]
        address = self.device.alloc(n * stride + 64, "output")
        self.device.fill(address, POISON, n * stride + 64)
        return Tensor(address, n if rows is None else rows, cols, format, stride)

    def projections(self, n: int, heads: Heads) -> tuple[Tensor, Tensor]:
        """Where a product leaves queries, keys and values, and where queries lie once they are rotated, as the decoder has them beside such keys."""
        width, is_half = heads.n_heads * heads.head_width, heads.kv_format == abi.PK_F16 and self.activation == abi.PK_BF16
        qkv = self.output(n, width + heads.n_kv_heads * (heads.head_width + heads.v_width), T, format=abi.PK_F32 if is_half else None)
        return qkv, self.output(n, width, T, format=abi.PK_F16) if is_half else qkv.columns(0, width)

    def download(self, tensor: Tensor, n: int) -> np.ndarray:
        """The first n rows of a tensor; checks that the gaps are still poisoned."""
        raw = np.frombuffer(self.device.read(tensor.data, n * tensor.row_bytes), np.uint8).reshape(n, -1)
        used = tensor.cols * ELEMENT_BYTES[tensor.format]
        assert (raw[:, used:] == POISON).all(), "an op wrote between the rows of its output"
        return decode(np.ascontiguousarray(raw[:, :used]).tobytes(), tensor.format).reshape(n, tensor.cols)

    # ---- state ----

    def set(self, name: str, values: Any, kind: Any = np.int32, at: int = 0) -> None:
        """Writes an array of pk_state, from element `at` on."""
        raw = np.ascontiguousarray(values, kind)
        self.device.write(getattr(self.state, name) + at * raw.itemsize, raw.tobytes())

    def get(self, name: str, n: int, kind: Any = np.int32, at: int = 0) -> np.ndarray:
        """Reads n elements of an array of pk_state."""
        size = np.dtype(kind).itemsize
        return np.frombuffer(self.device.read(getattr(self.state, name) + at * size, n * size), kind)

    def set_sampling(self, slot: int, sampling: abi.pk_sampling) -> None:
        """Writes one slot's sampling parameters."""
        self.device.write(self.state.sampling + slot * ctypes.sizeof(sampling), bytes(sampling))

    def set_rows(self, rows: list[tuple[int, int, int]], sampled: list[int] | None = None, dead: tuple[int, ...] = ()) -> int:
        """Lays out rows (slot, first position, n_tokens) as PREPARE would. Returns T."""
        slots, positions, counts = (np.array(c, np.int32) for c in zip(*rows, strict=True))
        starts = np.concatenate([[0], np.cumsum(counts)])
        token_row = np.repeat(np.arange(len(rows)), counts)
        token_position = np.concatenate([p + np.arange(n) for p, n in zip(positions, counts, strict=True)])
        table = self.get("page_table", self.sizes.n_slots * self.sizes.slot_pages).reshape(self.sizes.n_slots, -1)
        pages = table[slots[token_row], token_position // self.sizes.page_tokens]
        flags = np.where(np.isin(np.arange(len(rows)), sampled if sampled is not None else range(len(rows))), abi.PK_ROW_SAMPLE, 0)
        for r in dead:
            flags[r] |= abi.PK_ROW_DEAD
        values = {"row_slot": slots, "row_start": starts, "row_position": positions, "row_flags": flags, "token_row": token_row}
        values |= {"token_position": token_position, "token_page": pages, "sample_row": np.flatnonzero(flags & abi.PK_ROW_SAMPLE), "sample_at": starts[1:][(flags & abi.PK_ROW_SAMPLE) > 0] - 1}
        for name, array in values.items():
            self.set(name, array)
        return int(starts[-1])

    def scatter_pages(self, rng: np.random.Generator) -> None:
        """Gives every slot its own pages in random order (page 0 is nobody's), as far as they go."""
        s = self.sizes
        pages = rng.permutation(np.arange(1, s.n_pages))
        table = np.zeros((s.n_slots, s.slot_pages), np.int32)
        n = min(table.size, pages.size)
        table.reshape(-1)[:n] = pages[:n]
        self.set("page_table", table)

    # ---- running ----

    def load(self, program: Program, buckets: tuple[int, ...] = ()) -> None:
        """Loads a program with a poisoned workspace of exactly the size asked for."""
        n = self.device.workspace_bytes(program)
        address = self.device.alloc(max(n, 64), "workspace")
        self.device.fill(address, POISON, max(n, 64))
        self.device.load(program, list(buckets), (address, n))

    def run(self, program: Program, n_tokens: int, n_samples: int = 0) -> None:
        """Runs a program once on the rows that are laid out."""
        self.load(program)
        self.device.run(n_tokens, n_samples)

    def close(self) -> None:
        """Frees everything."""
        self.device.close()
