"""Formats of keys and values by kind of layer: their words, their bytes in pages and plans, and what they add to a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paddock_runner.blueprint.blueprint import Attention, Blueprint, FeedForward, Layer, Rope
from paddock_runner.memory.kinds import joined_format, split_format
from paddock_runner.memory.state import layer_formats, page_layout, scale_bytes

FULL = Attention(8, 2, 64, 0.125, Rope(1e4, 64))
WINDOW = replace(FULL, window=128)
READER = replace(WINDOW, kv_from=1)
LAYERS = tuple(Layer(a, FeedForward(256)) for a in (FULL, WINDOW, READER))
BLUEPRINT = Blueprint("gemma3", 1000, 512, 4096, LAYERS, 1e-6, False)
PAGE = 32 * 2 * 64
"""Numbers of a page in one layer's keys, or values."""


@pytest.mark.parametrize(("word", "formats"), [("fp8", ("fp8", "fp8")), ("fp8,window=bf16", ("fp8", "bf16")), ("f16,window=fp8", ("f16", "fp8"))])
def test_a_word_names_a_format_for_each_kind_of_layer(word, formats):
    assert split_format(word) == formats and joined_format(*formats) == word


def test_the_same_format_twice_or_none_is_one_word():
    assert joined_format("bf16") == joined_format("bf16", "bf16") == "bf16"


def test_pages_hold_each_layer_in_its_own_format_and_readers_have_none_of_their_own():
    assert layer_formats(BLUEPRINT, "fp8,window=bf16") == ("fp8", "bf16", "bf16")
    mixed = page_layout(BLUEPRINT, "fp8,window=bf16", 32)
    assert mixed.offsets == ((0, PAGE), (2 * PAGE, 4 * PAGE), (2 * PAGE, 4 * PAGE)) and mixed.page_bytes == 6 * PAGE
    apart = page_layout(BLUEPRINT, "bf16,window=fp8", 32, has_windows=True)
    assert (apart.page_bytes, apart.window_page_bytes) == (4 * PAGE, 2 * PAGE)


def test_scales_are_counted_for_layers_in_fp8_only():
    each = 4 * (2 * 8 + 2 * 2)
    assert [scale_bytes(BLUEPRINT, word) for word in ("bf16", "fp8", "fp8,window=bf16", "bf16,window=fp8")] == [0, 3 * each, each, 2 * each]
