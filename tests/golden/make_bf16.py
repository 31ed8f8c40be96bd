"""Writes bf16.json: how far transformers in bf16 is from its own f32 logits on the tiny checkpoints, per family.

Usage: python tests/golden/make_bf16.py (torch and transformers; a tool, never imported by the product). Per position the largest difference of
log-probability among the twenty best tokens; of these the median and the largest, from each position on that a mode of bench/gpu_golden.py
begins at: later positions are further off, so a mode is held to the positions that it measures.

What the file holds as "moved" is kept: tests/golden/make_moved.py writes it.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
BF16_JSON = HERE / "bf16.json"
PROMPTS = (1, 23, 30)
"""Tokens of the prompt in the modes of bench/gpu_golden.py: what is measured begins at the last of them."""


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, in f64."""
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def distances(folder: Path) -> list[float]:
    """Of every position of a family's golden, in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    data = np.load(folder / "golden.npz")
    maker = AutoModelForImageTextToText if "vision_config" in (folder / "config.json").read_text() else AutoModelForCausalLM
    model = maker.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        got = log_softmax(model(torch.tensor([data["ids"].tolist()])).logits[0].float().numpy())
    want = log_softmax(data["logits"])
    return [max(abs(want[t][i] - got[t][i]) for i in np.argsort(-got[t])[:20]) for t in range(len(want))]


def write(found: dict[str, dict[str, list[float]]]) -> None:
    """Writes the file, a family a line."""
    lines = ",\n".join(f' "{name}": {json.dumps(pair)}' for name, pair in found.items())
    BF16_JSON.write_text(f"{{\n{lines}\n}}\n")


def main() -> None:
    """Measures every family and writes the file."""
    before, found = json.loads(BF16_JSON.read_text()), {}
    for golden in sorted((HERE / "tiny").glob("*/golden.npz")):
        name, off = golden.parent.name, distances(golden.parent)
        found[name] = {str(n): [round(statistics.median(off[n - 1 :]), 4), round(max(off[n - 1 :]), 4)] for n in PROMPTS}
        found[name] |= {key: value for key, value in before.get(name, {}).items() if key.startswith("moved")}
    write(found)


if __name__ == "__main__":
    main()
