"""Adds to bf16.json how far f32 is from itself when weights are moved by at most half a step of bf16, for families that choose.

Usage: python -m tests.golden.make_moved (the CPU pack in f32, which gives transformers' logits to 1e-4: tests/golden/test_tiny.py). Where two experts
of a router or two blocks of an index nearly tie, that little makes another one be chosen, and a run in bf16 meets few of those places. Each
weight is moved at random; over N_MOVED draws, from the first position on that a mode of bench/gpu_golden.py measures: the upper quartile of the
medians, the largest of all, and the most positions of one draw that are further off than FAR times the largest of bf16.
"""

from __future__ import annotations

import json
import shutil
import statistics
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.pack.library import find_pack

from bench.gpu_golden import FAR, distances, open_device
from tests.golden.make_bf16 import BF16_JSON, HERE, PROMPTS, write

CHOOSES, N_MOVED = ("indexer", "num_experts", "num_local_experts", "n_routed_experts"), 12


def chooses(config: Any) -> bool:
    """Whether a config.json names experts or an index of blocks."""
    if isinstance(config, dict):
        return any((bool(value) and any(word in key for word in CHOOSES)) or chooses(value) for key, value in config.items())
    return isinstance(config, list) and any(map(chooses, config))


def move(file: Path, seed: int) -> None:
    """Every f32 tensor of a safetensors file times 1 +- 2^-8."""
    rng, raw = np.random.default_rng(seed), bytearray(file.read_bytes())
    n_head = struct.unpack("<Q", raw[:8])[0]
    for entry in json.loads(raw[8 : 8 + n_head]).values():
        if entry.get("dtype") == "F32":
            begin, end = (8 + n_head + at for at in entry["data_offsets"])
            values = np.frombuffer(raw[begin:end], np.float32)
            raw[begin:end] = (values * (1 + (rng.random(len(values), np.float32) - np.float32(0.5)) * np.float32(2**-7))).tobytes()
    file.write_bytes(raw)


def off(folder: Path, seed: int) -> list[float]:
    """The distance of every position from the golden's logits, with weights moved by the seed's numbers."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / folder.name
        shutil.copytree(folder, copy)
        for file in copy.glob("*.safetensors"):
            move(file, seed)
        device = open_device(find_pack("cpu"), copy)
        try:
            return distances(device, folder / "golden.npz", 1, 16)
        finally:
            device.close()


def main() -> None:
    """Measures every family that chooses and writes the file."""
    found = json.loads(BF16_JSON.read_text())
    for golden in sorted((HERE / "tiny").glob("*/golden.npz")):
        limits = found[golden.parent.name]
        if not chooses(json.loads((golden.parent / "config.json").read_text())):
            continue
        draws, far = [off(golden.parent, seed) for seed in range(N_MOVED)], FAR * limits["1"][1]
        for n in PROMPTS:
            parts = [draw[n - 1 :] for draw in draws]
            middle, most, n_far = statistics.quantiles(map(statistics.median, parts))[2], max(map(max, parts)), max(sum(bool(v > far) for v in part) for part in parts)
            limits[f"moved {n}"] = [round(float(middle), 4), round(float(most), 4), n_far]
    write(found)


if __name__ == "__main__":
    main()
