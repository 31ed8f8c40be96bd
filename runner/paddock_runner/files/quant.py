"""What people call a checkpoint's quantization, and how many parameters it has."""

from __future__ import annotations

from collections.abc import Iterable

from .checkpoint import Checkpoint
from .view import TensorView

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 21: "Q2_K_S", 25: "IQ4_NL", 30: "IQ4_XS", 32: "BF16", 38: "MXFP4_MOE",
}  # fmt: skip
"""general.file_type of GGUF. Source: llama.cpp, include/llama.h, enum llama_ftype."""


def quant_name(checkpoint: Checkpoint, format: str) -> str:
    """As in file names: "Q4_K_M", "BF16". format: of most of its bytes, for files that do not say."""
    told = checkpoint.metadata.get("general.file_type") if checkpoint.kind == "gguf" else None
    return FILE_TYPES.get(told, format.upper()) if isinstance(told, int) else format.upper()


def n_parameters(views: Iterable[TensorView]) -> int:
    """Elements of all tensors; one that two weights share counts once."""
    found: dict[tuple[str, int], int] = {}
    for view in views:
        n = 1
        for size in view.shape:
            n *= size
        found[str(view.path), view.offset] = n
    return sum(found.values())
