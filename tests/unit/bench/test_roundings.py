"""Weights as a GPU's products of few rows decode them, in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.formats.reference import dequantize
from paddock_runner.formats.table import by_name

from bench.gpu_weights import HALVES
from bench.roundings import GROUPS, decoded, words_of


@pytest.mark.parametrize("format", sorted(GROUPS))
def test_decoded_weights_are_the_files_but_for_what_is_rounded(format: str) -> None:
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (96, by_name(format).block_bytes), dtype=np.uint8)
    size = rng.uniform(1e-3, 2e-2, (96, 1))
    for i, at in enumerate(HALVES[format]):
        blocks[:, at : at + 2] = (size * rng.uniform(0.8, 1.2, (96, 1)) * ({"q4_1": -8, "q5_1": -16}.get(format, 1) if i else 1)).astype("<f2").view(np.uint8)
    values = dequantize(format, blocks.reshape(-1), (96, by_name(format).block_elements)).astype(np.float64)
    off = np.linalg.norm(decoded(format, blocks.reshape(-1), values) - values) / np.linalg.norm(values)
    assert 0.001 < off < 0.01


def test_words_name_what_is_rounded_to_what() -> None:
    assert words_of("all,-branch,head:f16,weights:bf16") == {"normed": "", "attended": "", "gated": "", "head": "f16", "kept": "", "weights": "bf16"}
