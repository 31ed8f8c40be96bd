"""Latent attention with quantised weights: the rows of kv_b that are transposed keep their scales."""

from __future__ import annotations

import json

import numpy as np
from paddock_runner.formats.fp8 import E4M3
from safetensors.numpy import load_file

from tests.golden.test_int4 import log_probabilities
from tests.golden.test_tiny import TINY


def write(path, tensors):
    """A safetensors file; numpy has no fp8, so types are named."""
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(np.ascontiguousarray(a).tobytes() for _, a in tensors.values()))


def test_kv_b_in_fp8_with_block_scales_answers_as_its_values_do(tmp_path):
    source = TINY / "deepseek-v3"
    config, rng = json.loads((source / "config.json").read_text()), np.random.default_rng(5)
    stored, plain = {}, {}
    for name, w in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = ("F32", w)
        if name.endswith("kv_b_proj.weight"):
            codes = rng.integers(0, 0x58, w.shape).astype(np.uint8) | (rng.integers(0, 2, w.shape) << 7).astype(np.uint8)
            scales = rng.uniform(0.01, 0.05, (w.shape[0] // 4, 1)).astype(np.float32)
            stored[name], stored[name + "_scale_inv"] = ("F8_E4M3", codes), ("F32", scales)
            plain[name] = ("F32", (E4M3[codes] * np.repeat(scales, 4, 0)).astype(np.float32))
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 128]}}
    for folder, tensors, more in (("stored", stored, quantised), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "model.safetensors", tensors)
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **more}))
    ids = np.load(source / "golden.npz")["ids"].tolist()
    for got, wanted in zip(*(log_probabilities(tmp_path / folder, ids) for folder in ("stored", "plain")), strict=True):
        assert max(abs(got[i] - wanted[i]) for i in got.keys() & wanted.keys()) < 2e-2
