"""What a model takes on a GPU: weights in the CUDA pack's layout, no host memory, graphs and context."""

from __future__ import annotations

import pytest
from paddock_runner.errors import UnsupportedError
from paddock_runner.formats import cuda


@pytest.mark.parametrize(
    ("format", "scales", "n_bytes"),
    [
        ("bf16", "", 2 * 4096 * 4096), ("q4_k", "", 4096 * 16 * 148), ("q8_0", "", 4096 * 32 * 136), ("fp8_e4m3", "block", 4096 * 4096 + 4 * 32 * 32),
        ("fp8_e4m3", "row", 4096 * 4096 + 4 * 4096), ("nvfp4", "", 4096 * 32 * 72),
    ],
)  # fmt: skip
def test_a_matrix_is_tiles_and_scales_and_one_more_number(format: str, scales: str, n_bytes: int) -> None:
    assert cuda.packed_bytes(format, 4096, 4096, scales) == n_bytes + 256


def test_rows_and_columns_are_padded() -> None:
    assert cuda.packed_bytes("q4_k", 33, 257) == cuda.packed_bytes("q4_k", 64, 512)
    assert cuda.packed_bytes("bf16", 1, 1) == cuda.packed_bytes("f16", 32, 64) == 32 * 64 * 2 + 256


def test_a_format_without_kernels_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="q9_9"):
        cuda.packed_bytes("q9_9", 32, 64)
