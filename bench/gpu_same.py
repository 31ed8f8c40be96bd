"""The same greedy tokens from two packs: a real model's answers to a few prompts, drawn on each.

Usage: python -m bench.gpu_same MODEL --write FILE [--device cpu]   (draws and keeps)
       python -m bench.gpu_same MODEL --compare FILE --device cuda  (draws and compares)
Where the packs part, the better of the two first tokens is a matter of rounding only if their logits are close: the margin there is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from bench.served import runner

PROMPTS = [
    "The capital of France is", "def fibonacci(n):\n", "Once upon a time there was a small dragon who", "1, 1, 2, 3, 5, 8,",
    "Water boils at", "List three uses of a paper clip:\n1.", "SELECT name FROM users WHERE", "Dear Sir or Madam,\n",
    "".join(f"Entry {i}: the square of {i} is {i * i}.\n" for i in range(1, 40)) + "Entry 40:",
]  # fmt: skip
"""The last is long enough for the kernels of many rows."""


def answers(model: Path, device: str, pack: str) -> list[dict[str, Any]]:
    """Tokens and log-probabilities of 48 greedy tokens for every prompt, one request after the other."""
    words = ["--device", device, *(["--kernel-pack", pack] if pack else []), "--max-ctx", "2048", "--max-batch", "8", "--name", "m"]
    found = []
    with runner(model, *words) as (url, _):
        for prompt in PROMPTS:
            body = {"model": "m", "prompt": prompt, "max_tokens": 48, "temperature": 0, "logprobs": 2}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                choice = json.load(answer)["choices"][0]
            found.append({"text": choice["text"], "tokens": choice["logprobs"]["tokens"], "top": choice["logprobs"]["top_logprobs"]})
    return found


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> int:
    """Prints where answers part; returns how many do with a margin that rounding does not explain."""
    n_wrong = 0
    for prompt, a, b in zip(PROMPTS, ours, theirs, strict=True):
        at = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=False)) if x != y), None)
        if at is None:
            sys.stdout.write(f"same  {len(a['tokens'])} tokens  {prompt[:30]!r}\n")
            continue
        best = sorted(b["top"][at].values(), reverse=True)
        margin = best[0] - best[1] if len(best) > 1 else float("inf")
        n_wrong += margin > 0.1
        sys.stdout.write(f"parts at token {at}, margin {margin:.4f}  {prompt[:30]!r}: {a['tokens'][at]!r} / {b['tokens'][at]!r}\n")
    return n_wrong


def main() -> int:
    """Draws, keeps or compares; 1 when answers part by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pack", default="")
    a = parser.parse_args()
    found = answers(a.model, a.device, a.pack)
    if a.write:
        a.write.write_text(json.dumps(found))
    return compare(found, json.loads(a.compare.read_text())) > 0 if a.compare else 0


if __name__ == "__main__":
    sys.exit(main())
