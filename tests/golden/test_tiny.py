"""Every model family against Hugging Face transformers on tiny random checkpoints: prefill in chunks, then step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.golden.teacher import Teacher
from tests.golden.test_models import open_device

TINY = Path(__file__).resolve().parent / "tiny"
FAMILIES = sorted(p.name for p in TINY.iterdir() if (p / "golden.npz").exists()) if TINY.exists() else []
# f32 weights and KV. AVX-512: f32 products, sums of at most a few hundred in another order. AMX: every f32 is two bf16 (16 bits).
LEVELS = {"avx512": (2, 1e-4), "amx": (3, 2e-3)}


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n_prompt, chunk", [(1, 16), (23, 5), (30, 64)], ids=["token-by-token", "small-chunks", "one-chunk"])
def test_family_matches_transformers(name, n_prompt, chunk, level):
    max_isa, tolerance = LEVELS[level]
    if name.endswith("-mxfp4"):
        tolerance = 2e-3  # activations are quantised to 16 bits before coded weights see them
    golden = np.load(TINY / name / "golden.npz")
    ids, want = golden["ids"].tolist(), log_softmax(golden["logits"])
    device = open_device(TINY / name, max_isa=max_isa)
    try:
        teacher = Teacher(device, chunk)
        best = teacher.begin(ids[:n_prompt])
        for position in range(n_prompt - 1, len(ids)):
            row = want[position]
            assert max(abs(row[i] - p) for i, p in best.items()) <= tolerance, position
            assert sorted(best) == sorted(np.argsort(-row)[: len(best)].tolist()) or row[np.argsort(-row)[len(best) - 1]] - row[np.argsort(-row)[len(best)]] < tolerance
            if position + 1 < len(ids):
                best = teacher.follow(ids[position + 1])
    finally:
        device.close()
