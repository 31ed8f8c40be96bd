"""Layers with a window whose pages are apart: what they write and see is what they would in ordinary pages, and nothing behind the window is looked at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from harness import POISON, to_bf16
from paddock_runner.errors import PackError
from paddock_runner.memory.state import StateSizes
from paddock_runner.pack import abi
from paddock_runner.pack.device import f32_tensor
from paddock_runner.pack.program import Heads, Pages, Program, Rotation, View
from paddock_runner.pack.tensor import T

SIZES = StateSizes(4, 512, 16, 129, 100, 256, 8, 4, 3, 3)
N_PAGES = 140
ROWS = {
    "one": [(2, 300, 1)],
    "decode": [(0, 511, 1), (1, 0, 1), (2, 255, 1), (3, 256, 1)],
    "prompts": [(0, 130, 150), (1, 0, 40), (3, 317, 33)],
    "mixed": [(0, 90, 1), (1, 401, 1), (2, 200, 120)],
}


def windowed_pages(b, rng, rows, window):
    """Fills kv with random keys and values, copies what windows see to pages of their own, in another order; entries behind are those of a page of NaN."""
    s, size = b.sizes, b.page_bytes
    content = to_bf16((rng.standard_normal((s.n_pages, size // 2)) * 0.5).astype(np.float32)).view(np.uint8).reshape(s.n_pages, size)
    b.device.write(b.device.kv_address, content.tobytes())
    b.scatter_pages(rng)
    table = b.get("page_table", s.n_slots * s.slot_pages).reshape(s.n_slots, -1)
    poison, places = N_PAGES - 1, iter(rng.permutation(np.arange(1, N_PAGES - 1)).tolist())
    windows = np.full((s.n_slots, s.slot_pages), poison, np.int32)
    pool = np.full((N_PAGES, size), POISON, np.uint8)
    for slot, first, n in rows:
        for i in range(max(0, first - window + 1) // 16, (first + n - 1) // 16 + 1):
            windows[slot, i] = place = next(places)
            pool[place] = content[table[slot, i]]
    pages = [windows[slot, p // 16] for slot, first, n in rows for p in range(first, first + n)]
    addresses = [b.device.alloc(raw.nbytes, "windows") for raw in (pool, windows, np.array(pages, np.int32))]
    for address, raw in zip(addresses, (pool, windows, np.array(pages, np.int32)), strict=True):
        b.device.write(address, raw.tobytes())
    return table, windows, Pages(addresses[0], size, addresses[1], addresses[2])


@pytest.mark.parametrize("window", [1, 40, 128])
@pytest.mark.parametrize("name", sorted(ROWS))
@pytest.mark.parametrize("shape", [(4, 2, 64), (8, 2, 128), (4, 1, 256), (2, 1, 512)])
def test_layers_with_a_window_find_their_keys_in_pages_of_their_own(bench, rng, shape, name, window):
    n_heads, n_kv, width = shape
    k_bytes = n_kv * 16 * width * 2
    b = bench(sizes=SIZES, page_bytes=256 + 2 * k_bytes)
    rows = ROWS[name]
    table, windows, own_pages = windowed_pages(b, rng, rows, window)
    n = b.set_rows(rows)
    values = rng.standard_normal((n, (n_heads + 2 * n_kv) * width)).astype(np.float32)
    rope = Rotation(f32_tensor(b.device, [1e4 ** (-2 * i / width) for i in range(width // 2)], "vectors"), width, "neox", 1.0)
    found = []
    for pages in (None, own_pages):
        program, out = Program(), b.output(n, n_heads * width, T)
        qkv, _ = b.activations(values, T)
        heads = Heads(n_heads, n_kv, width, width, 256, 256 + k_bytes, abi.PK_BF16)
        q = qkv.columns(0, n_heads * width)
        if pages is not None:
            program.pool(pages)
        program.qkv(qkv, q, heads, (None, None), rope, 1e-6)
        program.attention(q, out, heads, width**-0.5, View(window))
        if pages is not None:
            program.pool(None)
        b.run(program, n, len(rows))
        found.append(b.download(out, n))
    assert np.isfinite(found[1]).all()
    assert np.array_equal(found[0], found[1])
    pages = np.frombuffer(b.device.read(b.device.kv_address, SIZES.n_pages * b.page_bytes), np.uint8).reshape(SIZES.n_pages, -1)
    own = np.frombuffer(b.device.read(own_pages.kv, N_PAGES * b.page_bytes), np.uint8).reshape(N_PAGES, -1)
    for slot, first, count in rows:
        at = np.arange(first // 16, (first + count - 1) // 16 + 1)
        assert np.array_equal(pages[table[slot, at]], own[windows[slot, at]]), "keys and values that were written"
    assert (own[-1] == POISON).all(), "what lies behind was written"


def test_a_pool_is_whole_one_and_for_windows(bench):
    b = bench(sizes=SIZES, page_bytes=32768)
    heads, q, out = Heads(4, 2, 64, 64, 0, 2048, abi.PK_F32), b.output(4, 256, T), b.output(4, 256, T)

    def refused(message, *pools, window=8):
        program = Program()
        for pages in pools:
            program.pool(pages)
        program.attention(q, out, heads, 1.0, View(window))
        with pytest.raises(PackError, match=message):
            b.load(program)

    whole = Pages(64, 32768, 64, 64)
    refused("sees more than a window", whole, window=0)
    refused("a part of the pool is absent", replace(whole, page_table=0))
    refused("has another pool already", whole, replace(whole, kv=128))
    refused("keys end at byte 8192 of a page of 64", replace(whole, kv_page_stride=64))
