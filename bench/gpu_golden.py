"""The tiny golden checkpoints of every family through a GPU pack, against transformers' f32 logits.

Usage: python -m bench.gpu_golden PACK [FOLDER] [--only NAME ...]. One line per family: the largest and the median distance of the best
tokens' log-probabilities, token by token, in small chunks and in one chunk; of models that give vectors the largest distance of one. Exits 1 when a
family is outside what bf16 explains.

Weights and activations are bf16 here and f32 there. tests/golden/bf16.json holds how far transformers itself is off in bf16 (median and
largest distance per family; tests/golden/make_bf16.py): a family passes when its median is no larger than that over the positions that the
mode measures, and its largest distance within half as much again of the largest at any position. Where a router's scores or an index's blocks
nearly tie, another one may be chosen: a family that chooses may have positions further off, as many and as far as f32 has with weights moved by
half a step of bf16 ("moved" in bf16.json; tests/golden/make_moved.py).
A draft layer's guess may be three times the family's median below transformers' best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
from paddock_runner.blueprint.guessing import with_guesses
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.errors import PaddockError
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.memory.plan import chosen_format
from paddock_runner.memory.state import StateSizes, state_layout
from paddock_runner.pack import abi
from paddock_runner.pack.device import Device

from tests.golden.drafted import MTP, N_PROMPT
from tests.golden.drafted import folder as drafted_folder
from tests.golden.teacher import Teacher
from tests.golden.vectors import TASKS, Vectors, golden_of

ROOT = Path(__file__).resolve().parent.parent
LIMITS = json.loads((ROOT / "tests/golden/bf16.json").read_text())
MODES = {"token by token": (1, 16), "small chunks": (23, 5), "one chunk": (30, 64)}
DRAFT = 3.0
"""How many times the family's median distance a draft layer's guess may be below transformers' best in its logits (f32), where bf16 decides between two that nearly tie."""
FAR, VECTOR, SCORES = 1.5, 0.04, 0.056
"""How much larger than in bf16.json the largest distance may be; the largest relative distance of a vector, and of a pair of scores
(transformers in bf16: 0.037 on qwen3-rank)."""


def open_device(pack: Path, folder: Path, guesses: str = "off") -> Device:
    """A model on the GPU: one slot, keys and values as a runner keeps them."""
    checkpoint = open_checkpoint(folder)
    blueprint = with_guesses(read_blueprint(checkpoint), checkpoint, guesses)
    sizes = StateSizes(1, 512, 16, 33, blueprint.n_vocab, 64, 1, max_guesses=blueprint.max_guesses, recurrent_bytes=state_layout(blueprint).slot_bytes)
    return build_device(Assembly(pack, sizes, "f32" if "cpu" in pack.name else chosen_format(blueprint, "cuda")[0]), blueprint, tensors_by_name(checkpoint, blueprint))


def distances(device: Device, golden: Path, n_prompt: int, chunk: int) -> list[float]:
    """Per position: the largest |difference of log-probability| of the best tokens; infinite when a number is missing."""
    data = np.load(golden)
    ids, logits = data["ids"].tolist(), data["logits"].astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    want = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    teacher, found = Teacher(device, chunk), []
    best = teacher.begin(ids[:n_prompt])
    for position in range(n_prompt - 1, len(ids)):
        worst = max((abs(want[position][i] - p) for i, p in best.items()), default=float("inf"))
        found.append(worst if worst == worst else float("inf"))
        if position + 1 < len(ids):
            best = teacher.follow(ids[position + 1])
    return found


def family(pack: Path, folder: Path) -> bool:
    """Runs one checkpoint in every mode and tells. False when it is outside the limits."""
    told, is_good, limits = [], True, LIMITS.get(folder.name, {})
    for name, (n_prompt, chunk) in MODES.items():
        try:
            device = open_device(pack, folder)
        except PaddockError as error:
            sys.stdout.write(f"FAIL  {folder.name:18} {error}\n")
            return False
        moved = limits.get(f"moved {n_prompt}", (0.0, 0.0, 0))
        limit, far = max(limits.get(str(n_prompt), (0.05, 0.2))[0], moved[0]), FAR * limits.get("1", (0.05, 0.2))[1]
        try:
            found = distances(device, folder / "golden.npz", n_prompt, chunk)
            middle, most, n_far = statistics.median(found), max(found), sum(v > far for v in found)
            is_good = is_good and middle <= limit and most <= max(far, moved[1]) and n_far <= moved[2]
            told.append(f"{name} {middle:.4f} of {limit} (max {most:.4f}, {n_far} of {moved[2]} beyond {far:.4f})")
        except (PaddockError, AssertionError) as error:
            is_good = False
            told.append(f"{name}: {error!r}")
        finally:
            device.close()
    sys.stdout.write(f"{'ok  ' if is_good else 'FAIL'}  {folder.name:18} {', '.join(told)}\n")
    sys.stdout.flush()
    return is_good


def drafts(pack: Path, name: str) -> bool:
    """A model's own draft layer along its golden's answer: how far each guess is from transformers' best, in log-probability."""
    golden = np.load(MTP / name / "golden.npz")
    ids, logits = golden["ids"].tolist(), golden["logits"].astype(np.float64)
    with tempfile.TemporaryDirectory() as scratch:
        device = open_device(pack, drafted_folder(name, Path(scratch)), "mtp")
        try:
            teacher, far = Teacher(device, 7, abi.PK_ROW_SAMPLE | abi.PK_ROW_DRAFT), []
            teacher.begin(ids[:N_PROMPT])
            for position in range(N_PROMPT - 1, len(ids) - 2):
                at = device.state.tokens + 4 * (position + 2)
                guess, row = struct.unpack("i", device.read(at, 4))[0], logits[position]
                if teacher.token == ids[position + 1]:  # the guess is of what follows the token that was drawn
                    far.append(float(row.max() - row[guess]) if 0 <= guess < len(row) else float("inf"))
                teacher.follow(ids[position + 1])
        finally:
            device.close()
    limit = DRAFT * LIMITS[name]["1"][0]
    is_good = 2 * len(far) > len(ids) - N_PROMPT and max(far) <= limit
    sys.stdout.write(f"{'ok  ' if is_good else 'FAIL'}  {name:18} guesses are {max(far, default=0.0):.4f} of {limit:.4f} from transformers' best at most, after the {len(far)} draws that are its own\n")
    return is_good


def vectors(pack: Path, folder: Path) -> bool:
    """A model that gives vectors, in batches: the largest relative distance of one from transformers' in f32, and the largest of 1 - cosine."""
    prompts, want = golden_of(folder.name)
    try:
        with Vectors(folder, TASKS.get(folder.name, "auto"), kv_format="bf16", pack=pack) as model:
            found = model.of(prompts)
    except PaddockError as error:
        sys.stdout.write(f"FAIL  {folder.name:18} {error}\n")
        return False
    far = max(float(np.linalg.norm(g - w) / max(np.linalg.norm(w), 1.0 if g.size < 4 else 1e-9)) for g, w in zip(found, want, strict=True))
    angle = max(1.0 - float(np.dot(g, w) / (np.linalg.norm(g) * np.linalg.norm(w))) for g, w in zip(found, want, strict=True))
    is_good = far <= (SCORES if want.shape[-1] < 4 else VECTOR) and (angle <= 1e-3 or want.shape[-1] < 4)
    sys.stdout.write(f"{'ok  ' if is_good else 'FAIL'}  {folder.name:18} vectors differ by {far:.4f}, 1 - cosine {angle:.1e}\n")
    sys.stdout.flush()
    return is_good


def main() -> None:
    """Runs the families and exits 1 when one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "tests/golden/tiny")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    folders = sorted(p.parent for p in options.folder.glob("*/golden.npz"))
    good = [family(options.pack, p) for p in folders if not options.only or p.name in options.only]
    folders = sorted(p.parent for p in (options.folder.parent / "encoders").glob("*/golden.npz"))
    good += [drafts(options.pack, p.parent.name) for p in sorted(MTP.glob("*/golden.npz")) if not options.only or p.parent.name in options.only]
    good += [vectors(options.pack, p) for p in folders if not options.only or p.name in options.only]
    sys.stdout.write(f"{sum(good)} of {len(good)} families\n")
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
