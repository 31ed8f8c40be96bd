"""What a hybrid's guesses are worth on a GPU, without HTTP: its own draft layer (MTP) always right or always wrong, and look-up; states are taken back where a guess was wrong.

Usage: python -m bench.gpu_drafts --pack PACK --out FOLDER [--model 27b] [--layers N] [--streams 1 8] [--tokens 300]
The shape is bench.gpu_hybrids', but the model counts, as in bench.gpu_guesses: layers add next to nothing, and the row of the head for token t + 1 is the embedding of t.
The draft layer's first product hands the embedding of the token that follows on to the head (right), or random numbers (wrong). Every answer is compared with what it must be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from paddock_runner.blueprint.blueprint import Blueprint
from paddock_runner.engine.assemble import Assembly, build_device
from paddock_runner.engine.policy import Policy
from paddock_runner.files.view import TensorView
from paddock_runner.memory.state import StateSizes, state_layout

from bench import board
from bench.gpu_guesses import prompt_of
from bench.gpu_hybrids import blueprint, views
from tests.soak.rig import Rig

KINDS = ("off", "right", "wrong", "lookup")
BLOCK = 1 << 24
"""Random numbers that rows of the embedding are windows of."""
FAINT = 1e-9
CTX, PAGE = 2048, 16


def with_guesses(plan: Blueprint, kind: str) -> Blueprint:
    """The blueprint with what guesses of that kind need."""
    if kind in ("right", "wrong"):
        return replace(plan, draft=next(layer for layer in plan.layers if layer.kind == "attention"), max_guesses=1)
    return replace(plan, max_guesses=8 if kind == "lookup" else 0)


def counting(plan: Blueprint, kind: str, folder: Path) -> dict[str, TensorView]:
    """Tensors of a model that counts. embed and head are one file, of which the head begins a row earlier."""
    found = views(plan, folder)
    m, v = plan.model_width, plan.n_vocab
    block = ((np.random.default_rng(2).standard_normal(BLOCK) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    rows = folder.parent / f"rows-{m}-{v}"
    if not rows.exists():
        with rows.open("wb") as file:
            step = (BLOCK - m) // (v + 1)
            for at in range(0, v + 1, 4096):
                places = step * np.arange(at, min(at + 4096, v + 1))
                file.write(np.lib.stride_tricks.sliding_window_view(block, m)[places].tobytes())
    for name, first in (("embed.weight", 1), ("head.weight", 0)):
        found[name] = TensorView(name, (v, m), "bf16", rows, 2 * m * first, 2 * m * v)
    (folder / "faint").write_bytes(np.full(1 << 16, FAINT, np.float32).tobytes())
    for name, view in found.items():
        if name.endswith((".o.weight", ".down.weight")) and view.scales is not None:
            values = replace(view.scales.view, path=folder / "faint")
            found[name] = replace(view, scales=replace(view.scales, view=values))
    if plan.draft is not None:
        fc = np.zeros((m, 2 * m), np.uint16)
        if kind == "right":
            fc[np.arange(m), np.arange(m)] = 0x3F80
        else:
            fc[:] = np.resize(block, (m, 2 * m))
        (folder / "fc").write_bytes(fc.tobytes())
        found["draft_fc.weight"] = TensorView("draft_fc.weight", (m, 2 * m), "bf16", folder / "fc", 0, 4 * m * m)
    return found


def measure(pack: Path, plan: Blueprint, kind: str, folder: Path, a: argparse.Namespace) -> dict[int, list[float]]:
    """Tokens per second by streams."""
    most = max(a.streams)
    sizes = StateSizes(
        most, CTX, PAGE, 1 + most * CTX // PAGE, plan.n_vocab, 2048, 9 * most, 8, 5, 8, recurrent_bytes=state_layout(plan).slot_bytes, max_guesses=plan.max_guesses,
    )  # fmt: skip
    device = build_device(Assembly(pack, sizes, "f32" if "cpu" in pack.name else "bf16"), plan, counting(plan, kind, folder))
    found: dict[int, list[float]] = {}
    try:
        number = 0
        for streams in a.streams:
            for _ in range(a.passes):
                policy = Policy(draft_head=plan.draft is not None, draft_rows=0 if kind == "off" else 8, gather_ms=0.0, lead_ms=0.0)
                rig = Rig(sizes, device=device, policy=policy)
                rig.engine.launched_seq = rig.engine.read_seq = rig.engine.slots.seq = int(device.done[0])
                asked = []
                for _ in range(streams):
                    number += 1
                    asked.append(rig.ask(prompt_of(number, a.tokens, a.run, plan.n_vocab), a.tokens, temperature=0.0))
                while not all(x.tokens for x in asked):
                    rig.turn()
                begun, n_before = time.perf_counter(), sum(len(x.tokens) for x in asked)
                rig.run(check=False)
                rate = (streams * a.tokens - n_before) / (time.perf_counter() - begun)
                n_right = sum(x.tokens == list(range(x.ask.prompt[-1] + 1, x.ask.prompt[-1] + 1 + a.tokens)) for x in asked)
                drafter = rig.engine.drafter
                sys.stdout.write(f"{kind:8}{streams} streams {rate:8.1f} tok/s, guessed {drafter.drafted}, right {drafter.accepted}; {n_right} of {streams} answers count on\n")
                sys.stdout.flush()
                found.setdefault(streams, []).append(rate)
                rig.close()
    finally:
        device.close()
    return found


def main() -> None:
    """Runs everything and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pack", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--model", default="27b")
    add("--layers", type=int, default=0)
    add("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    add("--streams", type=int, nargs="*", default=[1, 8])
    add("--run", type=int, default=24, help="tokens of the pieces in which a prompt holds its answer")
    add("--tokens", type=int, default=300)
    add("--passes", type=int, default=2)
    add("--commit", default="")
    a = parser.parse_args()
    rows, plain = [], dict[int, list[float]]()
    a.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        for kind in a.kinds:
            folder = Path(scratch) / kind
            folder.mkdir()
            plan = with_guesses(blueprint(a.model, a.layers), kind)
            begun = time.perf_counter()
            found = measure(a.pack, plan, kind, folder, a)
            sys.stdout.write(f"{kind}: {time.perf_counter() - begun:.1f} s\n")
            plain = plain or found
            name = f"h200.drafts.{a.model}{f'.{a.layers}' if a.layers else ''}.{kind}"
            rows += [board.row(f"{name}.{n}", rates, "tok/s", peer=("without guesses", plain[n])) for n, rates in found.items()]
            (a.out / "drafts.json").write_text(json.dumps(board.document("h200", rows, a.commit), indent=1) + "\n")
    for row in rows:
        sys.stdout.write(f"{row['id']}: {row['value']:.1f} tok/s, {row['vs_peer']:.2f} times without\n")


if __name__ == "__main__":
    main()
