"""A real model in float64: which of two packs' tokens is nearer to what its file says, where they part, and what rounding as a GPU pack does it costs.

Usage: python -m bench.exact MODEL ANSWERS [ANSWERS ...] [--rounded x bf16 f16]
MODEL: a GGUF file of a dense model with plain attention (Llama, Qwen 2 and 3, Gemma 3); ANSWERS: what bench.gpu_same wrote for it. Every answer is read whole, so
that each of its tokens is judged behind the tokens that the pack itself drew: how many are float64's own, by how much the others miss (float64's logit of its best
token less that of the pack's), and how far the pack's log-probabilities are from float64's. --rounded: the same of a float64 model that rounds what products read
to BF16 (x), and also queries, keys, values and weights of attention, before they are rotated and after (bf16), or only after, to F16 (f16): as the CUDA pack does
with pages of that format.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.blueprint.blueprint import Attention, Rope
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.formats.reference import dequantize
from paddock_runner.text.load import load_tokenizer
from paddock_runner.text.tokenizer import Tokenizer

from bench.gpu_same import PROMPTS

F32 = np.ndarray[Any, np.dtype[np.float32]]
F64 = np.ndarray[Any, np.dtype[np.float64]]
Round = Callable[[F64], F64]
ROWS = 16384
"""Of the head at a time."""


def as_it_is(x: F64) -> F64:
    """Not rounded."""
    return x


def to_bf16(x: F64) -> F64:
    """The nearest BF16."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)


def to_f16(x: F64) -> F64:
    """The nearest F16."""
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64)


ROUNDED: dict[str, tuple[Round, Round, Round]] = {
    "": (as_it_is, as_it_is, as_it_is), "x": (to_bf16, as_it_is, as_it_is), "bf16": (to_bf16, to_bf16, to_bf16), "f16": (to_bf16, as_it_is, to_f16),
}  # fmt: skip
"""What products read, heads before they are rotated, and after, beside the weights of attention."""


PLACES = dict.fromkeys("qkv", "normed") | {"o": "attended", "gate": "normed", "up": "normed", "down": "gated"}
"""Where products read, by name."""


class Exact:
    """Weights decoded as a layer needs them, everything in float64 but for what is rounded."""

    def __init__(self, path: Path, rounded: str = "") -> None:
        self.file = open_checkpoint(path)
        self.plan, self.x, (self.read, self.raw, self.kept) = read_blueprint(self.file), tensors_by_name(self.file, read_blueprint(self.file)), ROUNDED[rounded]
        for layer in self.plan.layers:
            a = layer.attention
            if layer.kind != "attention" or layer.experts is not None or not a.is_plain or a.sinks or a.out_gate or not layer.feed_forward.is_gated:
                raise SystemExit(f"{path}: {self.plan.family} is more than a dense model with plain attention")
        if (self.plan.norm, self.plan.n_streams) != ("rms", 1):
            raise SystemExit(f"{path}: {self.plan.family} has norms or streams that are not known here")

    def matrix(self, name: str) -> F32:
        """A tensor as it is decoded."""
        view = self.x[name]
        return dequantize(view.format, self.file.read(view), view.shape)

    def weight(self, name: str) -> F64 | None:
        """A tensor in float64, or None."""
        return self.matrix(name).astype(np.float64) if name in self.x else None

    def need(self, name: str) -> F64:
        """A tensor that the model cannot be without."""
        found = self.weight(name)
        if found is None:
            raise SystemExit(f"{self.file.path}: no tensor {name}")
        return found

    def taken(self, x: F64, place: str) -> F64:
        """What is read in a place: by the products of the norms, of attention, of what is gated; by the norms behind branches ("branch"); by the head."""
        return x if place == "branch" else self.read(x)

    def project(self, x: list[F64], name: str) -> list[F64]:
        """x W^T + b, of every sequence."""
        w, b, place = self.need(f"{name}.weight"), self.weight(f"{name}.bias"), PLACES[name.rpartition(".")[2]]
        return [self.taken(each, place) @ w.T + (0 if b is None else b) for each in x]

    def norm(self, x: list[F64], name: str) -> list[F64]:
        """RMS norm; without such a weight nothing."""
        w = self.weight(name)
        return x if w is None else [each / np.sqrt((each**2).mean(-1, keepdims=True) + self.plan.norm_eps) * w for each in x]

    @staticmethod
    def turn(x: F64, rope: Rope | None) -> F64:
        """Rotation of [tokens, heads, width] by position."""
        if rope is None:
            return x
        n, half = rope.width, rope.width // 2
        angle = np.arange(len(x))[:, None, None] * rope.theta ** (-np.arange(0, n, 2) / n) / np.array(rope.factors or (1.0,) * half)
        first, second = (slice(0, half), slice(half, n)) if rope.layout == "neox" else (slice(0, n, 2), slice(1, n, 2))
        out, cosine, sine = x.copy(), np.cos(angle) * rope.magnitude, np.sin(angle) * rope.magnitude
        out[..., first] = x[..., first] * cosine - x[..., second] * sine
        out[..., second] = x[..., first] * sine + x[..., second] * cosine
        return out

    def attend(self, a: Attention, at: str, q: F64, k: F64, v: F64) -> F64:
        """Causal attention of one sequence."""
        n, group = len(q), a.n_heads // a.n_kv_heads
        q, k, v = (self.raw(x).reshape(n, -1, a.head_width) for x in (q, k, v))
        q, k = (self.kept(self.turn(self.norm([x], f"{at}{name}_norm.weight")[0], a.rope)) for x, name in ((q, "q"), (k, "k")))
        logits = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, 1)) * a.scale
        if a.softcap:
            logits = a.softcap * np.tanh(logits / a.softcap)
        far = np.arange(n)[:, None] - np.arange(n)[None]
        logits[:, (far < 0) | ((far >= a.window) if a.window else False)] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out: F64 = np.einsum("hqk,khd->qhd", self.kept(weights), np.repeat(self.kept(v), group, 1)) / weights.sum(-1).T[..., None]
        return out.reshape(n, -1)

    def left(self, x: list[F64], name: str) -> list[F64]:
        """What a branch leaves, behind the norm that it may have."""
        return self.norm([self.taken(each, "branch") for each in x], name) if name in self.x else x

    def hidden(self, sequences: list[list[int]]) -> list[F64]:
        """What the head reads, [tokens, width] a sequence."""
        rows = self.matrix("embed.weight")
        x = [rows[ids].astype(np.float64) * self.plan.embed_scale for ids in sequences]
        del rows
        for i, layer in enumerate(self.plan.layers):
            at = f"layers.{i}."
            h = self.norm(x, at + "attn_norm.weight")
            parts = (self.project(h, at + part) for part in "qkv")
            h = self.project([self.attend(layer.attention, at, *each) for each in zip(*parts, strict=True)], at + "o")
            x = [a + b for a, b in zip(x, self.left(h, at + "attn_post_norm.weight"), strict=True)]
            h = self.norm(x, at + "ffn_norm.weight")
            gate, up = self.project(h, at + "gate"), self.project(h, at + "up")
            h = self.project([act(a, layer.feed_forward.activation) * b for a, b in zip(gate, up, strict=True)], at + "down")
            x = [a + b for a, b in zip(x, self.left(h, at + "ffn_post_norm.weight"), strict=True)]
        return self.norm(x, "out_norm.weight")

    def logits(self, x: F64) -> F64:
        """Of some rows of hidden()."""
        w = self.matrix("embed.weight" if self.plan.tied_head else "head.weight")
        x = self.taken(x, "head")
        return np.concatenate([x @ w[at : at + ROWS].T.astype(np.float64) for at in range(0, len(w), ROWS)], 1)


def act(x: F64, kind: str) -> F64:
    """The gate of a feed-forward."""
    out: F64 = x / (1 + np.exp(-x)) if kind == "silu" else 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
    return out


def drawn_by(model: Exact, prompts: list[list[int]], drawn: list[list[int]]) -> list[F64]:
    """Log-probabilities at every token of every answer."""
    states = model.hidden([a + b[:-1] for a, b in zip(prompts, drawn, strict=True)])
    logits = model.logits(np.concatenate([state[len(prompt) - 1 :] for prompt, state in zip(prompts, states, strict=True)]))
    top = logits.max(-1, keepdims=True)
    logits -= top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.split(logits, np.cumsum([len(ids) for ids in drawn])[:-1])


def ids_by_text(tokenizer: Tokenizer) -> dict[str, int]:
    """Of several tokens with one text (a letter and its byte) the one that the text is encoded as."""
    found: dict[str, list[int]] = {}
    for i, text in enumerate(tokenizer.texts()):
        if text is not None:
            found.setdefault(text, []).append(i)
    return {text: ids[0] if len(ids) == 1 or len(own := tokenizer.encode(text, add_special=False)) != 1 else own[0] for text, ids in found.items()}


def judge(models: dict[str, Exact], tokenizer: Tokenizer, answers: list[dict[str, Any]]) -> None:
    """Prints a line a prompt: how many tokens are float64's own, the largest misses, the distances of log-probabilities; and the same of the rounded models."""
    by_text = ids_by_text(tokenizer)
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    drawn = [[by_text[text] for text in answer["tokens"]] for answer in answers]
    found = {name: drawn_by(model, prompts, drawn) for name, model in models.items()}
    for at, (ids, answer) in enumerate(zip(drawn, answers, strict=True)):
        exact = found[""][at]
        tops = [(i, by_text[text], value) for i, each in enumerate(answer["top"]) for text, value in each.items() if text in by_text]
        lines = {"": (ids, [abs(value - float(exact[i, token])) for i, token, value in tops])}
        for name in models:
            if name:
                own_tokens: list[int] = found[name][at].argmax(-1).tolist()
                lines[name] = (own_tokens, [abs(float(found[name][at][i, token] - exact[i, token])) for i, token, _ in tops])
        for name, (own, off) in lines.items():
            missed = [(i, float(exact[i].max() - exact[i, token])) for i, token in enumerate(own) if exact[i].argmax() != token]
            worst = ", ".join(f"token {i} by {miss:.4f}" for i, miss in missed[:4])
            sys.stdout.write(f"{name:5}{len(own) - len(missed)} of {len(own)} are float64's, log-probabilities {statistics.median(off):.4f} off in the median, ")
            sys.stdout.write(f"{max(off):.4f} at most  {answer['text'][:24]!r} {worst}\n")


def main() -> None:
    """Judges every file of answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--rounded", nargs="*", default=[], choices=[name for name in ROUNDED if name])
    a = parser.parse_args()
    models = {name: Exact(a.model, name) for name in ("", *a.rounded)}
    tokenizer = load_tokenizer(models[""].file)
    for path in a.answers:
        sys.stdout.write(f"{path.name}\n")
        judge(models, tokenizer, json.loads(path.read_text()))


if __name__ == "__main__":
    main()
