"""A tiny model stored by AWQ, GPTQ and compressed-tensors answers as its dequantised weights do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.golden.teacher import Teacher
from tests.golden.test_models import open_device
from tests.golden.test_tiny import TINY
from tests.unit.model.test_int4 import awq_words, words

GROUP = 32
CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq-act-order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    "auto-round": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": GROUP, "sym": False},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "int", "num_bits": 4, "symmetric": False, "group_size": GROUP}}}},
}


def stored(name: str, method: str, w: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a weight as the method stores it, and what they stand for."""
    n, k = w.shape
    groups = rng.permutation(np.arange(k) // GROUP) if method == "gptq-act-order" else np.arange(k) // GROUP
    low, high = (np.stack([f(w[:, groups == g]) for g in range(k // GROUP)], 1) for f in (lambda x: x.min(1), lambda x: x.max(1)))
    scales = ((high - low) / 14).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.round(-low / scales), 1, 15).astype(int)
    codes = np.clip(np.round(w / scales[:, groups]) + zeros[:, groups], 0, 15).astype(int)
    values = (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups]
    if method == "compressed-tensors":
        parts = {"weight_packed": words(codes), "weight_scale": scales.astype(np.float16), "weight_zero_point": words(np.ascontiguousarray(zeros.T)).T, "weight_shape": np.array([n, k])}
    elif method == "awq":
        parts = {"qweight": awq_words(codes.T), "qzeros": awq_words(zeros.T), "scales": scales.T.astype(np.float16)}
    else:
        by_eight = words(codes.T.reshape(k // 8, 8, n).swapaxes(1, 2)).reshape(k // 8, n)
        parts = {"qweight": by_eight, "qzeros": words((zeros - 1).T), "scales": scales.T.astype(np.float16), "g_idx": groups.astype(np.int32)}
    kinds = {np.dtype(np.uint32): np.int32}
    return {f"{name}.{kind}": np.ascontiguousarray(v.view(kinds.get(v.dtype, v.dtype))) for kind, v in parts.items()}, values


def log_probabilities(folder: Path, ids: list[int]) -> list[dict[int, float]]:
    device = open_device(folder)
    try:
        teacher = Teacher(device, 16)
        return [teacher.begin(ids[:20]), *(teacher.follow(i) for i in ids[20:])]
    finally:
        device.close()


@pytest.mark.parametrize("method", CONFIGS)
def test_answers_are_those_of_the_dequantised_weights(tmp_path, method):
    source, rng = TINY / "llama", np.random.default_rng(11)
    tensors = load_file(source / "model.safetensors")
    quantised, plain = {}, {}
    for name, w in tensors.items():
        if not name.endswith("_proj.weight"):
            quantised[name] = plain[name] = w
            continue
        parts, plain[name] = stored(name.removesuffix(".weight"), method, w, rng)
        quantised |= parts
    config = json.loads((source / "config.json").read_text())
    for folder, weights, more in (("quantised", quantised, {"quantization_config": CONFIGS[method]}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        save_file(weights, tmp_path / folder / "model.safetensors", {"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **more}))
    ids = np.load(source / "golden.npz")["ids"].tolist()
    for got, wanted in zip(*(log_probabilities(tmp_path / folder, ids) for folder in ("quantised", "plain")), strict=True):
        common = got.keys() & wanted.keys()
        assert len(common) > 15
        # Activations have 16 bits before coded weights; in act-order weights are products rounded to f16.
        assert max(abs(got[i] - wanted[i]) for i in common) < (2e-2 if method == "gptq-act-order" else 5e-3)
