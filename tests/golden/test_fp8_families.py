"""Tiny models with every projection in FP8 with block scales, as publishers store them, answer as the values do that these stand for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from paddock_runner.formats.fp8 import E4M3
from safetensors.numpy import load_file

from tests.golden.test_int4 import log_probabilities
from tests.golden.test_latent import write
from tests.golden.test_tiny import TINY

BLOCK = 128
POSITIVE = E4M3[:0x7F].astype(np.float64)
MULTIMODAL = {"gemma4": "gemma4"}
"""Model type of the checkpoint around the text part."""


def coded(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E4M3 codes, a scale for each block, and what both stand for."""
    rows, cols = (-(-n // BLOCK) for n in w.shape)
    scales = np.array([[abs(w[r * BLOCK : (r + 1) * BLOCK, c * BLOCK : (c + 1) * BLOCK]).max() / 448 for c in range(cols)] for r in range(rows)], np.float32)
    whole = np.kron(scales, np.ones((BLOCK, BLOCK), np.float32))[: w.shape[0], : w.shape[1]]
    x = w / whole
    at = np.clip(np.searchsorted(POSITIVE, abs(x)), 1, len(POSITIVE) - 1)
    nearest = at - (abs(x) - POSITIVE[at - 1] < POSITIVE[at] - abs(x))
    codes = (nearest | (x < 0) << 7).astype(np.uint8)
    return codes, scales, (E4M3[codes] * whole).astype(np.float32)


def coded_alike(pieces: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """The same, with one scale for several matrices."""
    scale = np.float32(max(abs(w).max() for w in pieces) / 448)
    at = [np.clip(np.searchsorted(POSITIVE, abs(w / scale)), 0, len(POSITIVE) - 1) for w in pieces]
    codes = [(i | (w < 0) << 7).astype(np.uint8) for i, w in zip(at, pieces, strict=True)]
    return codes, np.array([scale]), [(E4M3[c] * scale).astype(np.float32) for c in codes]


def parts_of(name: str, w: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor, or for a stack of experts a matrix for each expert, as publishers of FP8 name them."""
    if w.ndim < 3:
        return {name: w}
    stem = name.rpartition(".")[0]
    if name.endswith("gate_up_proj"):
        half = w.shape[1] // 2
        return {f"{stem}.{e}.{kind}_proj.weight": w[e][part] for e in range(len(w)) for kind, part in (("gate", slice(half)), ("up", slice(half, None)))}
    return {f"{stem}.{e}.down_proj.weight": w[e] for e in range(len(w))}


@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe", "muse-glimmer", "kolibri"])
def test_answers_are_those_of_the_values_that_codes_stand_for(name, tmp_path):
    source = TINY / name
    config = json.loads((source / "config.json").read_text())
    stored, plain = {}, {}
    whole = {k: v for t, w in load_file(source / "model.safetensors").items() for k, v in parts_of(t, w).items()}
    for key, w in whole.items():
        stored[key] = plain[key] = ("F32", w)
        if key.endswith("_proj.weight"):
            codes, scales, values = coded(w)
            stored[key], stored[key + "_scale_inv"], plain[key] = ("F8_E4M3", codes), ("F32", scales), ("F32", values)
    quantised = {**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
    if name in MULTIMODAL:
        stored = {key.replace("model.", "model.language_model.", 1): value for key, value in stored.items()}
        stored["model.vision_tower.patch_embedder.input_proj.weight"] = ("F32", np.zeros((2, 2), np.float32))
        stored["model.language_model.layers.5.self_attn.k_proj.weight"] = ("F32", np.zeros((2, 2), np.float32))
        quantised = {"model_type": MULTIMODAL[name], "text_config": config, "vision_config": {}, "quantization_config": quantised["quantization_config"]}
    for folder, tensors, settings in (("stored", stored, quantised), ("plain", plain, config)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "model.safetensors", tensors)
        (tmp_path / folder / "config.json").write_text(json.dumps(settings))
    ids = np.load(source / "golden.npz")["ids"].tolist()
    for got, wanted in zip(*(log_probabilities(tmp_path / folder, ids) for folder in ("stored", "plain")), strict=True):
        # Activations have 16 bits before coded weights.
        assert max(abs(got[i] - wanted[i]) for i in got.keys() & wanted.keys()) < 2e-2


def test_pieces_of_an_n_gram_table_may_share_one_scale(tmp_path):
    """As the FP8 checkpoint of Qwen 3.8 Flash Next has it: nothing but the table is coded here, and rows of it are looked up, so nothing is rounded."""
    source = TINY / "qwen4-exp"
    config = json.loads((source / "config.json").read_text())
    whole = {key: ("F32" if w.dtype == np.float32 else "I64", w) for key, w in load_file(source / "model.safetensors").items()}
    stored, plain = dict(whole), dict(whole)
    for table in {key.partition(".shard_")[0] for key in whole if ".shard_" in key}:
        names = sorted(key for key in whole if key.startswith(table + ".shard_"))
        assert len(names) > 1
        codes, scale, values = coded_alike([whole[key][1] for key in names])
        stored[f"{table}.weight_scale"] = ("F32", scale)
        stored |= {key: ("F8_E4M3", c) for key, c in zip(names, codes, strict=True)}
        plain |= {key: ("F32", v) for key, v in zip(names, values, strict=True)}
    for folder, tensors, more in (("stored", stored, {"quantization_config": {"quant_method": "fp8"}}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "model.safetensors", tensors)
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **more}))
    ids = np.load(source / "golden.npz")["ids"].tolist()
    for got, wanted in zip(*(log_probabilities(tmp_path / folder, ids) for folder in ("stored", "plain")), strict=True):
        assert max(abs(got[i] - wanted[i]) for i in got.keys() & wanted.keys()) < 1e-5
