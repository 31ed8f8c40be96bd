"""A real model in float64: which of two packs' tokens is nearer to what its file says, where they part.

Usage: python -m bench.exact MODEL ANSWERS [ANSWERS ...]
MODEL: a GGUF file of the Llama or Qwen2 family; ANSWERS: what bench.gpu_same wrote for it. Every answer is read whole, so that each of its tokens is judged behind
the tokens that the pack itself drew: how many are float64's own, by how much the others miss (float64's logit of its best token less that of the pack's), and how
far the pack's log-probabilities are from float64's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from paddock_runner.files.checkpoint import Checkpoint, open_checkpoint
from paddock_runner.formats.reference import dequantize
from paddock_runner.text.load import load_tokenizer
from paddock_runner.text.tokenizer import Tokenizer

from bench.gpu_same import PROMPTS

F64 = np.ndarray[Any, np.dtype[np.float64]]


class Exact:
    """A dense GGUF model of the Llama or Qwen2 family, weights decoded as a layer needs them, everything in float64."""

    def __init__(self, path: Path) -> None:
        self.file: Checkpoint = open_checkpoint(path)
        kind = self.file.metadata["general.architecture"]
        if kind not in ("llama", "qwen2"):
            raise SystemExit(f"{path}: {kind} is neither llama nor qwen2")
        def number(key: str, default: float | None = None) -> Any:
            return self.file.metadata.get(f"{kind}.{key}", default)

        self.n_layers, self.n_heads = number("block_count"), number("attention.head_count")
        self.n_kv = number("attention.head_count_kv", self.n_heads)
        self.eps, self.base = number("attention.layer_norm_rms_epsilon"), number("rope.freq_base", 10000.0)
        self.width = number("attention.key_length", number("embedding_length") // self.n_heads)
        self.is_paired = kind == "llama"
        """GGUF's Llama turns neighbours, Qwen2 the halves of a head."""

    def weight(self, name: str) -> F64 | None:
        """A tensor in float64, or None."""
        view = self.file.tensors.get(name)
        return None if view is None else dequantize(view.format, self.file.read(view), view.shape).astype(np.float64)

    def need(self, name: str) -> F64:
        """A tensor that the model cannot be without."""
        found = self.weight(name)
        if found is None:
            raise SystemExit(f"{self.file.path}: no tensor {name}")
        return found

    def project(self, x: list[F64], name: str) -> list[F64]:
        """x W^T + b, of every sequence."""
        w, b = self.need(f"{name}.weight"), self.weight(f"{name}.bias")
        return [each @ w.T + (0 if b is None else b) for each in x]

    def norm(self, x: list[F64], name: str) -> list[F64]:
        """RMS norm."""
        w = self.need(f"{name}.weight")
        return [each / np.sqrt((each**2).mean(-1, keepdims=True) + self.eps) * w for each in x]

    def turn(self, x: F64) -> F64:
        """Rotation of [tokens, heads, width] by position."""
        angle = np.arange(len(x))[:, None, None] * self.base ** (-np.arange(0, self.width, 2) / self.width)
        a, b = (x[..., ::2], x[..., 1::2]) if self.is_paired else (x[..., : self.width // 2], x[..., self.width // 2 :])
        c, d = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return np.stack([c, d], -1).reshape(x.shape) if self.is_paired else np.concatenate([c, d], -1)

    def attend(self, q: F64, k: F64, v: F64) -> F64:
        """Causal attention of one sequence."""
        n, group = len(q), self.n_heads // self.n_kv
        q, k = self.turn(q.reshape(n, self.n_heads, -1)), self.turn(k.reshape(n, self.n_kv, -1))
        logits = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, 1)) / np.sqrt(self.width)
        logits[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out: F64 = np.einsum("hqk,khd->qhd", weights, np.repeat(v.reshape(n, self.n_kv, -1), group, 1)).reshape(n, -1)
        return out

    def hidden(self, sequences: list[list[int]]) -> list[F64]:
        """What the head reads, [tokens, width] a sequence."""
        table = self.need("token_embd.weight")
        x = [table[ids] for ids in sequences]
        del table
        for i in range(self.n_layers):
            h = self.norm(x, f"blk.{i}.attn_norm")
            q, k, v = (self.project(h, f"blk.{i}.attn_{part}") for part in "qkv")
            h = self.project([self.attend(*each) for each in zip(q, k, v, strict=True)], f"blk.{i}.attn_output")
            x = [a + b for a, b in zip(x, h, strict=True)]
            h = self.norm(x, f"blk.{i}.ffn_norm")
            gate, up = self.project(h, f"blk.{i}.ffn_gate"), self.project(h, f"blk.{i}.ffn_up")
            h = self.project([a / (1 + np.exp(-a)) * b for a, b in zip(gate, up, strict=True)], f"blk.{i}.ffn_down")
            x = [a + b for a, b in zip(x, h, strict=True)]
        return self.norm(x, "output_norm")

    def head(self) -> F64:
        """[tokens, width]."""
        own = self.weight("output.weight")
        return self.need("token_embd.weight") if own is None else own


def judge(model: Exact, tokenizer: Tokenizer, answers: list[dict[str, Any]]) -> None:
    """Prints a line a prompt: how many tokens are float64's own, the largest miss, the median distance of log-probabilities."""
    by_text = {text: i for i, text in reversed(list(enumerate(tokenizer.texts()))) if text is not None}
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS]
    drawn = [[by_text[text] for text in answer["tokens"]] for answer in answers]
    states = model.hidden([a + b[:-1] for a, b in zip(prompts, drawn, strict=True)])
    head = model.head()
    for prompt, ids, answer, state in zip(prompts, drawn, answers, states, strict=True):
        logits = state[len(prompt) - 1 :] @ head.T
        top = logits.max(-1)
        log_sum = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        missed = [(float(top[i] - logits[i, token]), i) for i, token in enumerate(ids) if logits[i].argmax() != token]
        tops = [(i, by_text[text], value) for i, each in enumerate(answer["top"]) for text, value in each.items() if text in by_text]
        off = [abs(value - float(logits[i, token] - log_sum[i])) for i, token, value in tops]
        worst = ", ".join(f"token {i} by {miss:.4f}" for miss, i in missed[:4])
        sys.stdout.write(f"{len(ids) - len(missed)} of {len(ids)} are float64's, log-probabilities {statistics.median(off):.4f} off in the median, ")
        sys.stdout.write(f"{max(off):.4f} at most  {answer['text'][:24]!r} {worst}\n")


def main() -> None:
    """Judges every file of answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    a = parser.parse_args()
    model = Exact(a.model)
    tokenizer = load_tokenizer(model.file)
    for path in a.answers:
        sys.stdout.write(f"{path.name}\n")
        judge(model, tokenizer, json.loads(path.read_text()))


if __name__ == "__main__":
    main()
