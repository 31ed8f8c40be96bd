"""Does an answer know its company? The same greedy requests alone and together, with and without what the prefix cache has of them, and gone on with.

Usage: python -m bench.gpu_alone --pack PACK --out FOLDER [--model 8b] [--format fp8] [--requests 32] [--tokens 40] [--cells 128/128c1x2 ...] [--plain] [--options ...]
Weights are made up (bench.synthetic), prompts are ids of 1 to 700 tokens; tokens and log-probabilities must be equal to the last bit. --plain: without
--deterministic, to see how many answers part then. Cells (as in bench.gpu_cells) are measured on the same runner: what the mode costs.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import board, served, synthetic
from bench.gpu_cells import VOCAB, run_cell

NAMED = re.compile(r"t\d+")
Said = tuple[tuple[str, ...], tuple[float, ...]]
"""Tokens of an answer, and their log-probabilities."""


def ask(url: str, prompt: list[int], n_tokens: int, salt: str) -> Said:
    """One greedy answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "logprobs": 0, "cache_salt": salt, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice = json.load(answer)["choices"][0]
    return tuple(choice["logprobs"]["tokens"]), tuple(choice["logprobs"]["token_logprobs"])


def together(url: str, prompts: list[list[int]], n_tokens: int, salt: str) -> list[Said]:
    """All at once, in another order, some a little later."""
    order = list(range(len(prompts)))
    random.Random(salt).shuffle(order)

    def later(place: int) -> Said:
        time.sleep(place % 4 * 0.03)
        return ask(url, prompts[order[place]], n_tokens, salt)

    with ThreadPoolExecutor(len(prompts)) as pool:
        said = list(pool.map(later, range(len(prompts))))
    return [said[order.index(i)] for i in range(len(prompts))]


def parted(name: str, wanted: list[Said], got: list[Said]) -> int:
    """Prints how many answers are not what they were; returns it."""
    tokens = sum(a[0] != b[0] for a, b in zip(wanted, got, strict=True))
    bits = sum(a != b for a, b in zip(wanted, got, strict=True))
    sys.stdout.write(f"{name:34} {len(got)} answers, {tokens} with other tokens, {bits} with other bits\n")
    sys.stdout.flush()
    return bits


def compare(url: str, n_requests: int, n_tokens: int, n_vocab: int) -> int:
    """Answers that part."""
    rng = random.Random(7)
    lengths = [1, 2, 17, 64, 65, 128, 129, 511, 512, 513, 640, *(rng.randrange(3, 700) for _ in range(n_requests))][:n_requests]
    prompts = [[rng.randrange(256, n_vocab) for _ in range(n)] for n in lengths]
    alone = [ask(url, p, n_tokens, "alone") for p in prompts]
    n = parted("together, nothing cached", alone, together(url, prompts, n_tokens, "together"))
    n += parted("together, prompts cached", alone, together(url, prompts, n_tokens, "alone"))
    half = n_tokens // 2
    # Names of tokens tell their numbers, but for bytes.
    known = [i for i, (tokens, _) in enumerate(alone) if all(NAMED.fullmatch(t) for t in tokens[:half])]
    onward = [[*prompts[i], *(int(t[1:]) for t in alone[i][0][:half])] for i in known]
    rest = [(alone[i][0][half:], alone[i][1][half:]) for i in known]
    n += parted("gone on with, answers cached", rest, together(url, onward, n_tokens - half, "alone"))
    return n + parted("gone on with, nothing cached", rest, together(url, onward, n_tokens - half, "onward"))


def main() -> int:
    """1 when an answer parts (but with --plain)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--format", default="fp8")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--cells", nargs="*", default=[])
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/paddock-bench"), help="where the weights are written")
    parser.add_argument("--make-only", action="store_true", help="write the weights and end")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=["--max-ctx", "8192", "--max-batch", "32"])
    a = parser.parse_args()
    served.use_this_tree()
    folder = a.folder / f"{a.model}-{a.format}"
    if not (folder / "model.safetensors").exists():
        synthetic.write(a.model, a.format, folder)
    if a.make_only:
        return 0
    n_vocab = synthetic.SHAPES[a.model][6] - 8
    VOCAB[0] = n_vocab
    words = ["--device", a.device, "--name", "m", *(["--kernel-pack", str(a.pack.resolve())] if a.pack else []), *([] if a.plain else ["--deterministic"]), *a.options]
    name, rows = f"{a.model}.{a.format}" + ("" if a.plain else ".deterministic"), list[dict[str, Any]]()
    with served.runner(folder, *words, limit_s=60.0) as (url, _):
        n = compare(url, a.requests, a.tokens, n_vocab) if a.requests else 0
        for cell in a.cells:
            rows += run_cell(url, name, cell)
    rows.append(board.row(f"h200.parted.{name}", [n], "answers", "lower"))
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / f"alone-{name}.json").write_text(json.dumps(rows, indent=1))
    return int(n > 0 and not a.plain)


if __name__ == "__main__":
    sys.exit(main())
