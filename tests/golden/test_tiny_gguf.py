"""The same tiny models as GGUF files, named by gguf-py: metadata keys, tensor names and layouts against the same logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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


CHANGED = {"nemotron-h": {"time_step_min": 0.001}, "laguna": {"moe_router_logit_softcapping": 0.0}}
"""Fields for which GGUF has no key, as files of that form mean them; the reference is then our own reading of the folder."""


def folder_of(name: str, tmp_path: Path) -> Path:
    """The tiny folder, or a copy with what GGUF cannot say changed."""
    if name not in CHANGED:
        return TINY / name
    shutil.copytree(TINY / name, tmp_path / "folder")
    config = json.loads((TINY / name / "config.json").read_text())
    (tmp_path / "folder/config.json").write_text(json.dumps({**config, **CHANGED[name]}))
    return tmp_path / "folder"


def followed(path: Path, ids: list[int]) -> list[dict[int, float]]:
    """Log-probabilities of the best tokens at the last positions of these ids."""
    device = open_device(path, max_isa=2)
    try:
        teacher = Teacher(device, 7)
        return [teacher.begin(ids[:25]), *(teacher.follow(ids[position]) for position in range(25, len(ids)))]
    finally:
        device.close()


def model_type(name: str) -> str:
    return json.loads((TINY / name / "config.json").read_text())["model_type"]


@pytest.mark.parametrize("name", [f for f in FAMILIES if f not in LEFT_OUT and model_type(f) in ARCHS])
def test_gguf_form_matches_transformers(name, tmp_path):
    golden = np.load(TINY / name / "golden.npz")
    ids, folder = golden["ids"].tolist(), folder_of(name, tmp_path)
    got = followed(convert(folder, tmp_path / "model.gguf"), ids)
    want = followed(folder, ids) if name in CHANGED else log_softmax(golden["logits"])[24:]
    for position, best in enumerate(got):
        both = [i for i in best if not isinstance(want[position], dict) or i in want[position]]
        assert len(both) > len(best) - 3 and max(abs(want[position][i] - best[i]) for i in both) <= 1e-4, position
