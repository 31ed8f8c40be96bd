"""The same tiny models as GGUF files, named by gguf-py: metadata keys, tensor names and layouts against the same logits."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.golden.gguf_of import ARCHS, convert
from tests.golden.teacher import Teacher
from tests.golden.test_models import open_device
from tests.golden.test_tiny import FAMILIES, TINY, log_softmax

LEFT_OUT = {
    "llama3-rope": "its factors are a tensor that tests/unit/blueprint covers",
    "gpt-oss-mxfp4": "the same graph as gpt-oss",
    "qwen2-moe": "dense layers between those with experts have no place in its GGUF form",
}


def model_type(name: str) -> str:
    return json.loads((TINY / name / "config.json").read_text())["model_type"]


@pytest.mark.parametrize("name", [f for f in FAMILIES if f not in LEFT_OUT and model_type(f) in ARCHS])
def test_gguf_form_matches_transformers(name, tmp_path):
    golden = np.load(TINY / name / "golden.npz")
    ids, want = golden["ids"].tolist(), log_softmax(golden["logits"])
    device = open_device(convert(TINY / name, tmp_path / "model.gguf"), max_isa=2)
    try:
        teacher = Teacher(device, 7)
        best = teacher.begin(ids[:25])
        for position in range(24, len(ids)):
            assert max(abs(want[position][i] - p) for i, p in best.items()) <= 1e-4, position
            if position + 1 < len(ids):
                best = teacher.follow(ids[position + 1])
    finally:
        device.close()
