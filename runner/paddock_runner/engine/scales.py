"""Scales of keys and values in FP8, one for every layer and KV head: the checkpoint's own, or measured before the first request.

Measured: a made-up prompt runs once with keys and values in bf16, in memory that pages will have. A head's scale is the power of two that leaves its largest number
between an eighth and a quarter of what FP8 can hold: precision does not suffer, and a real text may have numbers four times as large. What was measured decides nothing but
that power, so a restart finds the same scales, and its pages on disk.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ..blueprint.blueprint import Attention, Blueprint
from ..blueprint.kv_scales import Pair
from ..errors import FileError, PackError
from ..files.view import TensorView
from ..memory.state import PageLayout, StateSizes, aligned, layer_formats, page_layout, scale_bytes
from ..model.decoder import trace
from ..model.site import Site
from ..model.weights import read_vector
from ..pack import abi
from ..pack.device import Device
from ..pack.tensor import Tensor

F32 = NDArray[np.float32]
MEASURED_TOKENS = 512
LARGEST = 112.0
"""Where a head's largest number lies at most, of 448."""
LEAST_KEYS = -8
"""Keys are not made larger than by that power: queries become as much smaller, and some kernels keep them in f16."""
WAIT_US = 600_000_000
SIZE, INFINITE = np.uint16(0x7FFF), 0x7F80
"""Of bf16: the bits without the sign; this and what is above is no number."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Of one layer, [K]: what a stored number is multiplied by to be the key, or the value, again."""

    k: F32
    v: F32


def stored(pairs: Mapping[int, Pair], blueprint: Blueprint) -> dict[int, Scales]:
    """The checkpoint's own, of every layer. Raises: FileError for one that is no positive number."""
    return {i: Scales(*(_read(view, blueprint.layers[i].attention.n_kv_heads) for view in pair)) for i, pair in pairs.items()}


def _read(view: TensorView, n_heads: int) -> F32:
    values = read_vector(view)
    if not (np.isfinite(values) & (values > 0)).all():
        raise FileError(f"{view.path}: tensor {view.name} holds a scale of {values.min()}, expected positive numbers", field=view.name)
    return np.broadcast_to(values, n_heads)


def lacking(blueprint: Blueprint, kv_format: str, scales: Mapping[int, Scales]) -> bool:
    """Whether some layer with keys and values in FP8 has no scales."""
    layers = zip(blueprint.all_layers, layer_formats(blueprint, kv_format), strict=True)
    return any(f == "fp8" and x.attention.n_kv_heads and (i if x.attention.kv_from is None else x.attention.kv_from) not in scales for i, (x, f) in enumerate(layers))


def prompt(n_vocab: int, n: int) -> list[int]:
    """Tokens from all over a vocabulary, always the same. Source: Park and Miller 1988, the minimal standard generator."""
    found, x = [], 1
    for _ in range(n):
        x = x * 48271 % 0x7FFFFFFF
        found.append(x % n_vocab)
    return found


def measure(device: Device, blueprint: Blueprint, site: Site, sizes: StateSizes, workspace: tuple[int, int]) -> dict[int, Scales]:
    """Runs the prompt. Leaves the device as it was, without a program. Raises: PackError."""
    layout = page_layout(blueprint, "bf16", sizes.page_tokens, sizes.n_window_pages > 0)
    pools = [_Pool(device.kv_address, device.kv_bytes, layout.page_bytes)]
    windows = None
    if site.windows is not None:
        pools.append(_Pool(site.windows.kv, sizes.n_window_pages * site.windows.kv_page_stride, layout.window_page_bytes))
        windows = replace(site.windows, kv_page_stride=layout.window_page_bytes)
    n_pages = min(-(-MEASURED_TOKENS // sizes.page_tokens), sizes.slot_pages, *(pool.n_bytes // pool.page_bytes - 1 for pool in pools))
    if n_pages < 1:
        raise PackError("the page pool is too small to measure scales of keys and values in fp8", "take a longer context, or another format")
    n_tokens = min(n_pages * sizes.page_tokens, MEASURED_TOKENS, blueprint.max_ctx_tokens)
    chunk = min(n_tokens, sizes.max_step_tokens)
    formats = (abi.PK_BF16,) * len(layout.offsets)
    program = trace(blueprint, replace(site, kv_offsets=layout.offsets, kv_formats=formats, index_offsets=layout.index_offsets, windows=windows, gains={}))
    own = device.state
    device.state = abi.pk_state.from_buffer_copy(own)
    device.state.kv_page_stride = layout.page_bytes
    try:
        device.need_pages(-(-(n_pages + 1) * layout.page_bytes // device.kv_page_bytes))
        for pool in pools:
            device.fill(pool.address, 0, (n_pages + 1) * pool.page_bytes)
        device.load(program, [chunk], workspace)
        _run(device, prompt(blueprint.n_vocab, n_tokens), chunk, n_pages, len(pools))
        pages = [[np.frombuffer(device.read(pool.address + i * pool.page_bytes, pool.page_bytes), np.uint16) & SIZE for i in range(1, n_pages + 1)] for pool in pools]
    finally:
        device.unload()
        for pool in pools:
            device.fill(pool.address, 0, (n_pages + 1) * pool.page_bytes)
        tables = [own.page_table, *([site.windows.page_table] if site.windows is not None else [])]
        for address, size in (*((table, 4 * sizes.slot_pages) for table in tables), (own.length, 4), (own.alive, 4)):
            device.fill(address, 0, size)
        device.done[0] = 0
        device.state = own
    return _scales(blueprint, layout, sizes.page_tokens, pages)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Memory of pages, and the size of one while the prompt runs."""

    address: int
    n_bytes: int
    page_bytes: int


def _run(device: Device, tokens: list[int], chunk: int, n_pages: int, n_pools: int) -> None:
    """Prefills slot 0, in pages 1, 2, ... of every pool."""
    sampling = abi.pk_sampling(0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, max_length=device.state.max_ctx_tokens)
    news, payload = [bytes(abi.pk_new_slot(0, 0, 0, 0, sampling))], tokens
    pages = [(0, i, i + 1, abi.PK_PAGE_OF_POOL if pool else 0) for pool in range(n_pools) for i in range(n_pages)]
    texts = [(0, 0, len(tokens), 0)]
    for seq, at in enumerate(range(0, len(tokens), chunk), 1):
        n = min(chunk, len(tokens) - at)
        head = abi.pk_step_head(seq, n, 1, 0, len(news), len(pages), len(texts), 0, len(payload))
        entries = b"".join(struct.pack("4i", *entry) for entry in [(0, n, 0, 0), *pages, *texts])
        blob = bytes(head) + b"".join(news) + entries + struct.pack(f"{len(payload)}i", *payload)
        news, pages, texts, payload = [], [], [], []
        buffer = (ctypes.c_uint64 * (len(blob) // 8 + 1))()
        ctypes.memmove(buffer, blob, len(blob))
        device.step(ctypes.addressof(buffer))
        if not device.wait(seq, WAIT_US):
            raise PackError("the prompt that measures keys and values does not end")


def _scales(blueprint: Blueprint, layout: PageLayout, page_tokens: int, pools: list[list[NDArray[np.uint16]]]) -> dict[int, Scales]:
    """From the sizes of numbers, as bf16 has them, in the pages of both pools."""
    found = {}
    for i, (layer, (k_at, v_at), is_windowed) in enumerate(zip(blueprint.all_layers, layout.offsets, layout.is_windowed, strict=True)):
        a, pages = layer.attention, pools[is_windowed]
        if a.kv_from is not None or not a.n_kv_heads:
            continue
        k = _power(_largest(pages, k_at, a.n_kv_heads, page_tokens * a.head_width, i), LEAST_KEYS)
        v = k if a.latent is not None else _power(_largest(pages, v_at, a.n_kv_heads, page_tokens * a.values_width, i))
        found[i] = Scales(k, v)
    return found


def _largest(pages: list[NDArray[np.uint16]], at: int, n_heads: int, n: int, layer: int) -> F32:
    """Of every head: the largest number's size. Raises: PackError when some are none."""
    most: NDArray[np.uint16] = np.max([page[at // 2 : at // 2 + n_heads * n].reshape(n_heads, n).max(1) for page in pages], 0)
    if (most >= INFINITE).any():
        raise PackError(f"keys or values of layer {layer} are no numbers: they cannot be kept in fp8", "the model may be damaged: paddock verify")
    found: F32 = (most.astype(np.uint32) << 16).view(np.float32)
    return found


def _power(largest: F32, least: int = -126) -> F32:
    """The scales of heads with these largest numbers; 1 of a head that has nothing but zeros."""
    fraction, exponent = np.frexp(largest / np.float32(LARGEST))
    exponent = np.maximum(exponent - (fraction == 0.5), least)
    return np.where(largest > 0, np.ldexp(np.float32(1), exponent), 1).astype(np.float32)


def gains(device: Device, blueprint: Blueprint, kv_format: str, scales: Mapping[int, Scales]) -> dict[int, tuple[Tensor, Tensor]]:
    """On the device, for every layer with keys and values in FP8: as in Heads."""
    formats = layer_formats(blueprint, kv_format)
    vectors: dict[int, tuple[F32, F32]] = {}
    for i, (layer, format) in enumerate(zip(blueprint.all_layers, formats, strict=True)):
        a = layer.attention
        if format == "fp8" and a.n_kv_heads:
            vectors[i] = _vectors(a, scales[i if a.kv_from is None else a.kv_from])
    at = device.alloc(aligned(scale_bytes(blueprint, kv_format)), "vectors")
    found = {}
    for i, pair in vectors.items():
        both = []
        for values in pair:
            device.write(at, values.tobytes())
            both.append(Tensor(at, 1, len(values), abi.PK_F32))
            at += values.nbytes
        found[i] = (both[0], both[1])
    return found


def _vectors(a: Attention, scales: Scales) -> tuple[F32, F32]:
    """Gains of what is stored (queries are as much larger as keys are smaller), and of what attention gives."""
    group = a.n_heads // a.n_kv_heads
    one = np.float32(1)
    stored = [np.repeat(scales.k, group), one / scales.k, one / scales.v]
    return np.concatenate(stored if a.latent is None else stored[:2]), np.repeat(scales.v, group)


def digest(scales: Mapping[int, Scales]) -> str:
    """What tells these scales from others."""
    words = blake2b(digest_size=8)
    for i, s in sorted(scales.items()):
        words.update(struct.pack("i", i) + s.k.tobytes() + s.v.tobytes())
    return words.hexdigest()
