"""The float64 model that judges where packs part (bench.exact) says what the CPU pack says of a whole small Llama."""

from __future__ import annotations

import numpy as np

from bench.exact import Exact
from tests import tiny_gguf
from tests.golden.teacher import Teacher
from tests.golden.test_models import open_device


def test_float64_and_the_pack_agree_on_a_small_llama(tmp_path):
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    ids = [5, 40, 7, 90, 3, 60, 61, 8, 11, 2, 77, 30]
    model = Exact(path)
    logits = model.logits(model.hidden([ids])[0])
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    teacher = Teacher(open_device(path), 16)
    best = teacher.begin(ids[:6])
    for at, token in enumerate(ids[6:], 5):
        assert len(best) >= 5 and max(best, key=best.get) == exact[at].argmax()
        assert max(abs(value - exact[at, i]) for i, value in best.items()) < 5e-3
        best = teacher.follow(token)
