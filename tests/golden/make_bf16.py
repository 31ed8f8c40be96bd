"""Writes bf16.json: how far transformers in bf16 is from its own f32 logits on the tiny checkpoints, per family.

Usage: python tests/golden/make_bf16.py (torch and transformers; a tool, never imported by the product). Per position the largest difference of
log-probability among the twenty best tokens; of these the median and the largest, from each position on that a mode of bench/gpu_golden.py
begins at: later positions are further off, so a mode is held to the positions that it measures.

A family whose attention chooses blocks by an index, or whose layers choose experts, has the same two numbers "moved": in f32 with all weights moved by at most half a step of
bf16, each at random; over twelve draws the median of the medians, and the largest of all. Where two blocks or two experts nearly tie, that little makes another one be chosen, and
one run in bf16 meets few of those places.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CHOOSES, N_MOVED = ("indexer", "num_experts", "num_local_experts", "n_routed_experts"), 12
PROMPTS = (1, 23, 30)
"""Tokens of the prompt in the modes of bench/gpu_golden.py: what is measured begins at the last of them."""


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, in f64."""
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def distances(folder: Path, seed: int = -1) -> list[float]:
    """Of every position of a family's golden. seed: of weights that are moved, in f32; otherwise in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    data = np.load(folder / "golden.npz")
    maker = AutoModelForImageTextToText if "vision_config" in (folder / "config.json").read_text() else AutoModelForCausalLM
    kind = torch.bfloat16 if seed < 0 else torch.float32
    model = maker.from_pretrained(folder, dtype=kind, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(max(seed, 0))
    with torch.no_grad():
        for p in model.parameters() if seed >= 0 else ():
            p.mul_(1 + (torch.rand(p.shape, generator=generator) - 0.5) * 2**-7)
        got = log_softmax(model(torch.tensor([data["ids"].tolist()])).logits[0].float().numpy())
    want = log_softmax(data["logits"])
    return [max(abs(want[t][i] - got[t][i]) for i in np.argsort(-got[t])[:20]) for t in range(len(want))]


def main() -> None:
    """Writes the file."""
    found = {}
    for golden in sorted((HERE / "tiny").glob("*/golden.npz")):
        off = distances(golden.parent)
        found[golden.parent.name] = {str(n): [round(statistics.median(off[n - 1 :]), 4), round(max(off[n - 1 :]), 4)] for n in PROMPTS}
        if any(word in (golden.parent / "config.json").read_text() for word in CHOOSES):
            moved = [distances(golden.parent, seed) for seed in range(N_MOVED)]
            for n in PROMPTS:
                middle = statistics.median(statistics.median(off[n - 1 :]) for off in moved)
                found[golden.parent.name][f"moved {n}"] = [round(float(middle), 4), round(max(map(max, moved)), 4)]
    lines = ",\n".join(f' "{name}": {json.dumps(pair)}' for name, pair in found.items())
    (HERE / "bf16.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
