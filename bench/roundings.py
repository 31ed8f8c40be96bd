"""What each rounding between a GPU pack's ops costs: a real model in float64, cut to the tokens that matter (bench.cut), with some of its numbers rounded.

Usage: python -m bench.roundings FOLDER [--draws 6] [WORDS ...]
WORDS: roundings with commas between them: normed, attended, gated, branch, head (what products, norms behind branches and the head read, to BF16; NAME:f16 to F16), kept (queries, keys, values and
weights of attention, to F16), all (all of these), weights (of prompts of 3 to 256 tokens as the products of few rows decode them, rounded once for longer ones),
weights:bf16 (rounded once everywhere). "-NAME": not that one. One line each: tokens lost, how far log-probabilities are off float64's.
--draws: numbers are rounded on grids that are shifted at random, the same sizes apart: what is lost by some of the draws only is chance.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.files.view import TensorView
from paddock_runner.formats.reference import dequantize
from paddock_runner.formats.table import by_name

from bench.cut import NEAR
from bench.exact import F32, F64, PLACES, Exact, as_it_is, drawn_by, to_bf16, to_f16

READ = ("normed", "attended", "gated", "branch", "head")
SHORT = 256
"""Longer prompts' products read weights that were unpacked to BF16."""
GROUPS = {"q4_1": 32, "q5_1": 32, "q5_0": 32, "q8_0": 32, "q4_k": 32, "q6_k": 16}


def halves(blocks: np.ndarray, at: int) -> F64:
    """An F16 of every block."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float64)


def bytes_of_k(blocks: np.ndarray) -> tuple[F64, F64]:
    """Scales and minima of Q4_K's eight groups, six bits each."""
    b = blocks[:, 4:16].astype(np.int64)
    high = b[:, 8:12]
    return np.concatenate([b[:, :4] & 63, (high & 15) | (b[:, :4] >> 6 << 4)], 1).astype(np.float64), np.concatenate([b[:, 4:8] & 63, (high >> 4) | (b[:, 4:8] >> 6 << 4)], 1).astype(np.float64)


def decoded(format: str, raw: np.ndarray, values: F64) -> F64:
    """A block format's weights as the products of 3 to 128 rows have them (skinny_parts.cuh): factors in BF16, what is added in BF16, then their sum."""
    blocks, n = raw.reshape(-1, by_name(format).block_bytes), GROUPS[format]
    groups = values.reshape(-1, n)
    scale, least = np.zeros((len(groups), 1)), np.zeros((len(groups), 1))
    if format in ("q4_1", "q5_1"):
        scale, least = halves(blocks, 0), halves(blocks, 2)
        near, added = to_bf16(scale), to_bf16(least)
    elif format == "q4_k":
        (s, m), d, low = bytes_of_k(blocks), halves(blocks, 0), halves(blocks, 2)
        scale, least = (d * s).reshape(-1, 1), (-low * m).reshape(-1, 1)
        near, added = to_bf16(to_bf16(d) * s).reshape(-1, 1), to_bf16(-to_bf16(low) * m).reshape(-1, 1)
    else:
        whole, factors = halves(blocks, 208 if format == "q6_k" else 0), blocks[:, 192:208].view(np.int8).astype(np.float64) if format == "q6_k" else np.ones((1, 1))
        scale, near, added = (whole * factors).reshape(-1, 1), to_bf16(to_bf16(whole) * factors).reshape(-1, 1), least
    codes = np.rint(np.divide(groups - least, scale, out=np.zeros_like(groups), where=scale != 0))
    return to_bf16(codes * near + added).reshape(values.shape)


class Rounded(Exact):
    """A cut model; words: what is rounded, and to what."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder, self.facts, self.plan = folder, facts, facts["plan"]
        self.x = {name: TensorView(name, shape, format, folder / "data", at, n) for name, (shape, format, at, n) in facts["views"].items()}
        data = np.memmap(folder / "data", np.uint8)
        self.bytes = {name: np.asarray(data[at : at + n]) for name, (_, _, at, n) in facts["views"].items()}
        self.exact = {name: dequantize(view.format, self.bytes[name], view.shape).astype(np.float32) for name, view in self.x.items()}
        self.made: dict[tuple[str, str], F32] = {}
        self.raw = as_it_is

    def round_to(self, words: dict[str, str], rng: np.random.Generator | None) -> None:
        """From now on. rng: shifts the grids."""
        self.words, self.rng = words, rng
        self.kept = self.shifted(to_f16) if "kept" in words else as_it_is

    def shifted(self, round_: Callable[[F64], F64]) -> Callable[[F64], F64]:
        """The rounding, on a grid that is drawn each time."""
        rng = self.rng
        if rng is None:
            return round_

        def call(x: F64) -> F64:
            factor = 1 + rng.random()
            return round_(x * factor) / factor

        return call

    def taken(self, x: F64, place: str) -> F64:
        """Rounded as the words say."""
        return self.shifted(to_f16 if self.words[place] == "f16" else to_bf16)(x) if place in self.words else x

    def matrix(self, name: str) -> F32:
        """A tensor, exact."""
        return self.exact[name]

    def weight_as(self, name: str, kind: str) -> F32:
        """A matrix, exact ("") or as somebody decodes it."""
        if not kind:
            return self.exact[name]
        if (name, kind) not in self.made:
            format, exact = self.x[name].format, self.exact[name].astype(np.float64)
            made = decoded(format, self.bytes[name], exact) if kind != "bf16" and format in GROUPS else to_bf16(exact)
            self.made[name, kind] = made.astype(np.float32)
        return self.made[name, kind]

    def project(self, x: list[F64], name: str) -> list[F64]:
        """x W^T + b: of a prompt's tokens with weights as its products decode them, of tokens one by one with exact ones (16 bits of x and sums in F32 are as good as float64 here)."""
        b, kind, out = self.weight(f"{name}.bias"), self.words.get("weights"), []
        for each, prompt in zip(x, self.facts["prompts"], strict=True):
            read, n = self.taken(each, PLACES[name.rpartition(".")[2]]).astype(np.float32), len(prompt)
            of_prompt = "" if kind is None else "bf16" if n > SHORT else kind or "now"
            y = np.concatenate([read[:n] @ self.weight_as(f"{name}.weight", of_prompt).T, read[n:] @ self.exact[f"{name}.weight"].T]).astype(np.float64)
            out.append(y if b is None else y + b)
        return out


def told(model: Rounded, words: dict[str, str], n_draws: int) -> str:
    """The line of some roundings: tokens lost in each draw, distances as bench.cut has them, and which tokens how often."""
    lost, off, which = [], [], Counter[str]()
    for draw in range(n_draws):
        model.round_to(words, np.random.default_rng(draw) if n_draws > 1 else None)
        found = drawn_by(model, model.facts["prompts"], model.facts["drawn"])
        lost.append(0)
        for at, (ours, exact) in enumerate(zip(found, model.facts["exact"], strict=True)):
            own, top = exact.argmax(-1), ours.argmax(-1)
            for i in np.flatnonzero(own != top):
                lost[-1] += 1
                which[f"{at}.{i} by {exact[i, own[i]] - exact[i, top[i]]:.4f}"] += 1
            off.append(np.abs(ours - exact)[exact > exact.max(-1, keepdims=True) - NEAR])
    distances = np.concatenate(off)
    tokens = ", ".join(f"{name} ({n})" for name, n in which.most_common(6))
    return f"{statistics.mean(lost):.1f} lost {lost}, off {np.median(distances):.4f} in the median, {np.sqrt((distances**2).mean()):.4f} rms, {distances.max():.4f} at most  {tokens}"


def words_of(text: str) -> dict[str, str]:
    """"all,-branch,weights:old" as what is rounded to what."""
    found: dict[str, str] = {}
    for word in text.split(","):
        name, _, how = word.partition(":")
        if name.startswith("-"):
            del found[name[1:]]
        elif name == "all":
            found |= dict.fromkeys((*READ, "kept"), how)
        else:
            found[name] = how
    return found


def main() -> None:
    """One line for each of the words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*", default=["all,weights"])
    parser.add_argument("--draws", type=int, default=1)
    a = parser.parse_intermixed_args()
    model = Rounded(a.folder, pickle.loads((a.folder / "facts").read_bytes()))
    for text in a.words:
        sys.stdout.write(f"{text:30}{told(model, words_of(text), a.draws)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
