"""Writes bf16.json: how far transformers in bf16 is from its own f32 logits on the tiny checkpoints, per family.

Usage: python tests/golden/make_bf16.py (torch and transformers; a tool, never imported by the product). Per position the largest difference of
log-probability among the twenty best tokens; of these the median and the largest, from each position on that a mode of bench/gpu_golden.py
begins at: later positions are further off, so a mode is held to the positions that it measures.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
PROMPTS = (1, 23, 30)
"""Tokens of the prompt in the modes of bench/gpu_golden.py: what is measured begins at the last of them."""


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, in f64."""
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def distances(folder: Path) -> list[float]:
    """Of every position of a family's golden."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    data = np.load(folder / "golden.npz")
    maker = AutoModelForImageTextToText if "vision_config" in (folder / "config.json").read_text() else AutoModelForCausalLM
    model = maker.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        got = log_softmax(model(torch.tensor([data["ids"].tolist()])).logits[0].float().numpy())
    want = log_softmax(data["logits"])
    return [max(abs(want[t][i] - got[t][i]) for i in np.argsort(-got[t])[:20]) for t in range(len(want))]


def main() -> None:
    """Writes the file."""
    found = {}
    for golden in sorted((HERE / "tiny").glob("*/golden.npz")):
        off = distances(golden.parent)
        found[golden.parent.name] = {str(n): [round(statistics.median(off[n - 1 :]), 4), round(max(off[n - 1 :]), 4)] for n in PROMPTS}
    lines = ",\n".join(f' "{name}": {json.dumps(pair)}' for name, pair in found.items())
    (HERE / "bf16.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
