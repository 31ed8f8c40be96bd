"""Makes the tiny random encoders of tests/golden/encoders with Hugging Face transformers, and their reference vectors.

A tool for people, not a test: needs torch and transformers in an environment of its own.
Usage: python tests/golden/make_encoders.py [NAME ...]
Each folder: config.json, model.safetensors (f32), sentence-transformers files where the model has them, and golden.npz: ids [n] and types [n]
of all sequences one after the other, lengths [s], vectors [s, width] (before normalisation; of rerankers: the logits).
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers
from make_tiny import SMALL, randomise
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

HERE = pathlib.Path(__file__).resolve().parent / "encoders"
BERT = dict(vocab_size=128, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
QWEN3 = dict(model_type="qwen3", **SMALL, head_dim=16, tie_word_embeddings=True)
LENGTHS = (1, 7, 30, 18)
ENCODERS = {
    "bert": dict(model_type="bert", **BERT, pool="mean"),
    "bert-cls": dict(model_type="bert", **{**BERT, "num_attention_heads": 3, "type_vocab_size": 1}, pool="cls", hidden_act="gelu_new"),
    "bert-rank": dict(model_type="bert", **BERT, num_labels=1, task="rank"),
    "xlm-roberta-rank": dict(model_type="xlm-roberta", **BERT, type_vocab_size=1, num_labels=1, task="rank", pad_token_id=1),
    "nomic-bert": dict(model_type="nomic_bert", **BERT, pool="mean"),
    "gemma3-both-ways": dict(
        model_type="gemma3_text", **{**SMALL, "num_hidden_layers": 3}, head_dim=16, sliding_window=8, query_pre_attn_scalar=24, use_bidirectional_attention=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_local_base_freq=10000.0, rope_theta=1000000.0, pool="mean", dense=(72, 40),
    ),
    "qwen3-embed": dict(**QWEN3, pool="lasttoken"),
    "qwen3-classifier": dict(**QWEN3, num_labels=1, task="rank", pad_token_id=0),
    "qwen3-rank": dict(**QWEN3, task="answers"),
}  # fmt: skip
ANSWERS = (17, 23)


def pool_rows(hidden: torch.Tensor, pool: str) -> torch.Tensor:
    """[n, M] -> [M]."""
    return hidden.mean(0) if pool == "mean" else hidden[0] if pool == "cls" else hidden[-1]


def write_modules(folder: pathlib.Path, pool: str, width: int, dense: tuple[int, ...]) -> list[torch.Tensor]:
    """The files of sentence-transformers, and dense layers with random weights."""
    modules = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    paths = ["" if i == 0 else f"{i}_{name}" for i, name in enumerate(modules)]
    listed = [{"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{m}"} for i, (m, p) in enumerate(zip(modules, paths, strict=True))]
    (folder / "modules.json").write_text(json.dumps(listed, indent=2))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name.startswith(pool) for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": width, **modes}))
    weights = []
    for i, rows in enumerate(dense):
        w = torch.randn((rows, width), generator=torch.Generator().manual_seed(i)) * width**-0.5
        at = folder / f"{i + 2}_Dense"
        at.mkdir(exist_ok=True)
        (at / "config.json").write_text(json.dumps({"in_features": width, "out_features": rows, "bias": False, "activation_function": "torch.nn.modules.activation.Tanh"}))
        save_file({"linear.weight": w}, at / "model.safetensors")
        weights.append(w)
        width = rows
    return weights


def make(name: str) -> None:
    """Writes one folder."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = dict(ENCODERS[name])
    pool, task, dense = settings.pop("pool", ""), settings.pop("task", "embed"), settings.pop("dense", ())
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config._attn_implementation = "eager"
    kind = {"embed": AutoModel, "rank": AutoModelForSequenceClassification, "answers": AutoModelForCausalLM}[task]
    model = kind.from_config(config, dtype=torch.float32).eval()
    randomise(model)
    if task == "answers":
        model.tie_weights()
    model.save_pretrained(folder)
    weights = write_modules(folder, pool, config.hidden_size, dense) if pool else []
    if task == "answers":
        vocabulary = {"no": ANSWERS[0], "yes": ANSWERS[1]} | {f"w{i}": i for i in range(config.vocab_size) if i not in ANSWERS}
        spec = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}}
        (folder / "tokenizer.json").write_text(json.dumps(spec))
    rng = np.random.default_rng(7)
    n_types = getattr(config, "type_vocab_size", 1) if name.startswith(("bert", "nomic")) else 1
    ids, types, vectors = [], [], []
    for n in LENGTHS:
        row = rng.integers(2, config.vocab_size, n)
        kinds = (np.arange(n) >= n // 2).astype(np.int64) if n_types > 1 else np.zeros(n, np.int64)
        more = {"token_type_ids": torch.tensor(kinds[None])} if n_types > 1 else {}
        with torch.no_grad():
            out = model(torch.tensor(row[None]), attention_mask=torch.ones((1, n), dtype=torch.long), **more)
        if task == "embed":
            vector = pool_rows(out.last_hidden_state[0], pool)
            for w in weights:
                vector = torch.tanh(vector @ w.T)
        else:
            vector = out.logits[0] if task == "rank" else out.logits[0, -1, list(ANSWERS)]
        ids.append(row)
        types.append(kinds)
        vectors.append(vector.float().numpy())
    (folder / "generation_config.json").unlink(missing_ok=True)
    arrays = {"ids": np.concatenate(ids), "types": np.concatenate(types), "lengths": np.array(LENGTHS)}
    arrays = {key: value.astype(np.int32) for key, value in arrays.items()}
    np.savez_compressed(folder / "golden.npz", **arrays, vectors=np.array(vectors), reference=f"transformers {transformers.__version__} torch {torch.__version__}")
    print(name, type(model).__name__, vectors[-1][:4], sorted(p.name for p in folder.iterdir()))


if __name__ == "__main__":
    torch.manual_seed(1)
    for wanted in sys.argv[1:] or ENCODERS:
        make(wanted)
