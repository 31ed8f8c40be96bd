"""Real models on a device that their files are too large to be carried to: cut to the tokens that matter, and read behind the CPU pack's tokens.

Usage: python -m bench.cut make MODEL ANSWERS FOLDER [--layers N]     (a GGUF file as bench.exact takes it; what bench.gpu_same wrote for it)
       python -m bench.cut run PACK FOLDER [FOLDER ...] [--kv f16 bf16]
A cut model has the file's layers as they are (or the first N of them, a model of its own), and those rows of its embedding and head that stand in prompts or answers, or are among float64's best at some position. On the device every answer
is read whole: how many tokens are float64's own and the answer's, and how far log-probabilities are off float64's (of tokens that float64 has within e^3 of its best).
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.files.view import TensorView
from paddock_runner.formats.table import by_name
from paddock_runner.memory.state import StateSizes
from paddock_runner.text.load import load_tokenizer

from bench.exact import Exact, drawn_by, ids_by_text
from bench.gpu_same import PROMPTS
from tests.golden.teacher import Teacher

N_BEST, NEAR, MAX_CTX = 24, 3.0, 1024
ALIGNMENT = 64


def make(model_path: Path, answers: Path, folder: Path, n_layers: int) -> None:
    """Writes the cut model: the tensors one behind the other, and what is known of them and of the answers."""
    model = Exact(model_path)
    if n_layers:
        model.plan = replace(model.plan, layers=model.plan.layers[:n_layers])
    tokenizer = load_tokenizer(model.file)
    by_text = ids_by_text(tokenizer)
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    drawn = [[by_text[text] for text in answer["tokens"]] for answer in json.loads(answers.read_text())]
    exact = drawn_by(model, prompts, drawn)
    best = {int(i) for x in exact for i in np.argsort(-x, 1)[:, :N_BEST].ravel()} if not n_layers else set()  # of some layers alone nearly every token is likely
    kept = sorted(best | {i for ids in prompts + drawn for i in ids})
    numbers = {old: new for new, old in enumerate(kept)}
    sums = [np.log(np.exp(x[:, kept]).sum(1, keepdims=True)) for x in exact]
    folder.mkdir(parents=True, exist_ok=True)
    views, at = {}, 0
    with (folder / "data").open("wb") as file:
        for name, view in model.x.items():
            is_cut = name in ("embed.weight", "head.weight")
            if name.startswith("layers.") and int(name.split(".")[1]) >= len(model.plan.layers):
                continue
            raw, row = bytes(model.file.read(view)), by_name(view.format).row_bytes(view.shape[-1])
            if is_cut:
                raw = b"".join(raw[i * row : (i + 1) * row] for i in kept)
            views[name] = ((len(kept), view.shape[1]) if is_cut else view.shape, view.format, at, len(raw))
            at += file.write(raw + bytes(-len(raw) % ALIGNMENT))
    facts = {
        "plan": replace(model.plan, n_vocab=len(kept)), "views": views,
        "prompts": [[numbers[i] for i in ids] for ids in prompts], "drawn": [[numbers[i] for i in ids] for ids in drawn],
        "exact": [(x[:, kept] - total).astype(np.float32) for x, total in zip(exact, sums, strict=True)],
    }  # fmt: skip
    (folder / "facts").write_bytes(pickle.dumps(facts))
    sys.stdout.write(f"{folder}: {len(kept)} of {len(by_text)} tokens, {at / 1e6:.1f} MB\n")


def run(pack: Path, folder: Path, kv: str) -> None:
    """Reads the answers on the pack's device and tells."""
    facts: dict[str, Any] = pickle.loads((folder / "facts").read_bytes())
    views = {name: TensorView(name, shape, format, folder / "data", at, n) for name, (shape, format, at, n) in facts["views"].items()}
    device = build_device(Assembly(pack, StateSizes(1, MAX_CTX, 16, MAX_CTX // 16 + 1, facts["plan"].n_vocab, MAX_CTX, 1), kv), facts["plan"], views)
    teacher, lines, n, n_exact, n_same, all_off = Teacher(device, MAX_CTX), [], 0, 0, 0, []
    for at, (prompt, drawn, exact) in enumerate(zip(facts["prompts"], facts["drawn"], facts["exact"], strict=True)):
        found, missed, parted, off = teacher.begin(prompt), [], [], []
        for i, token in enumerate(drawn):
            top, own = max(found, key=lambda each: found[each]), int(exact[i].argmax())
            off += [abs(value - float(exact[i, each])) for each, value in found.items() if exact[i, each] > exact[i, own] - NEAR]
            missed += [f"token {i} by {exact[i, own] - exact[i, top]:.4f}"] if top != own else []
            parted += [i] if top != token else []
            if i + 1 < len(drawn):
                found = teacher.follow(token)
        n, n_exact, n_same, all_off = n + len(drawn), n_exact + len(drawn) - len(missed), n_same + len(drawn) - len(parted), all_off + off
        lines.append(f"   {at}: {len(drawn) - len(missed)} of {len(drawn)} float64's, {len(drawn) - len(parted)} the answer's, off {statistics.median(off):.4f} in the median, {max(off):.4f} at most  {', '.join(missed[:5])}\n")
    device.close()
    sys.stdout.write(f"{folder.name}, pages in {kv}: {n_exact} of {n} float64's, {n_same} the answers', off {statistics.median(all_off):.4f} in the median, {max(all_off):.4f} at most\n{''.join(lines)}")
    sys.stdout.flush()


def main() -> None:
    """Makes or runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    made = parts.add_parser("make")
    for name in ("model", "answers", "folder"):
        made.add_argument(name, type=Path)
    made.add_argument("--layers", type=int, default=0)
    ran = parts.add_parser("run")
    ran.add_argument("pack", type=Path)
    ran.add_argument("folders", type=Path, nargs="+")
    ran.add_argument("--kv", nargs="*", default=["f16", "bf16"])
    a = parser.parse_args()
    if a.what == "make":
        make(a.model, a.answers, a.folder, a.layers)
        return
    for folder in a.folders:
        for kv in a.kv:
            run(a.pack, folder, kv)


if __name__ == "__main__":
    main()
