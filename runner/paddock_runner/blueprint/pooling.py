"""Models that give vectors: which ones these are, what is done with their hidden states, and the tensors that this needs."""

from __future__ import annotations

import json
from dataclasses import replace

from ..errors import FileError, UnsupportedError, UsageError
from ..files.checkpoint import Checkpoint, open_checkpoint
from ..files.sentence import SentenceModules, purpose, read_modules
from ..files.view import TensorView
from .blueprint import Blueprint, Dense, Pooling
from .quantised import rows_of

TASKS = ("auto", "generate", "embed", "rank")
GGUF_POOLS = {1: "mean", 2: "first", 3: "last"}
"""Values of "<arch>.pooling_type"; 0 is none, 4 is rank. Source: llama.cpp, include/llama.h, llama_pooling_type."""
HEADS = {
    "bert": ("bert.pooler.dense", "classifier"), "roberta": ("classifier.dense", "classifier.out_proj"),
    "xlm-roberta": ("classifier.dense", "classifier.out_proj"),
}  # fmt: skip
"""The two layers of a classifier, by model_type: tanh after the first."""


def with_pooling(blueprint: Blueprint, checkpoint: Checkpoint, task: str = "auto") -> Blueprint:
    """The blueprint with its pooling, when the checkpoint or the user says that vectors are wanted.

    task: "auto" (as the checkpoint's files say), or what the user wants. Raises: UsageError (a task that this model cannot do),
    UnsupportedError, FileError.
    """
    if task not in TASKS:
        raise UsageError(f"task {task!r} is not one of {', '.join(TASKS)}")
    modules = read_modules(checkpoint.path) if checkpoint.kind == "safetensors" and checkpoint.path.is_dir() else None
    wanted = (purpose(checkpoint) or "generate") if task == "auto" else task
    if wanted == "generate":
        if not blueprint.is_causal or not blueprint.has_out_norm:
            raise UsageError(f"{checkpoint.path}: {blueprint.family} is an encoder and generates no text", "leave --task out")
        return blueprint
    if modules is not None and modules.max_tokens:
        blueprint = replace(blueprint, max_ctx_tokens=min(blueprint.max_ctx_tokens, modules.max_tokens))
    if wanted == "rank":
        return replace(blueprint, pooling=_ranking(blueprint, checkpoint, modules))
    return _embedding(blueprint, checkpoint, modules)


def _classifies(checkpoint: Checkpoint) -> bool:
    names = checkpoint.config.get("architectures")
    return isinstance(names, list) and any(isinstance(n, str) and n.endswith("ForSequenceClassification") for n in names)


def _gguf_pool(checkpoint: Checkpoint) -> int:
    if checkpoint.kind != "gguf":
        return 0
    return checkpoint.fields.integer(f"{checkpoint.fields.text('general.architecture', '')}.pooling_type", 0)


def _gguf_layers(checkpoint: Checkpoint) -> tuple[Dense, ...]:
    """Dense layers on pooled rows, as wide as their tensors (EmbeddingGemma)."""
    found = [checkpoint.tensors.get(f"{name}.weight") for name in ("dense_2", "dense_3")] if checkpoint.kind == "gguf" else []
    return tuple(Dense(view.shape[1], view.shape[0]) for view in found if view is not None and len(view.shape) == 2)


def _embedding(blueprint: Blueprint, checkpoint: Checkpoint, modules: SentenceModules | None) -> Blueprint:
    if modules is None or not modules.pool:
        pool = GGUF_POOLS.get(_gguf_pool(checkpoint)) or ("last" if blueprint.is_causal and blueprint.has_out_norm else "mean")
        note = f"nothing says how vectors are pooled: {'the last token' if pool == 'last' else 'the mean'} is taken, and normalised"
        notes = blueprint.notes if _gguf_pool(checkpoint) in GGUF_POOLS else (*blueprint.notes, note)
        return replace(blueprint, pooling=Pooling("embed", pool, _gguf_layers(checkpoint), is_normalised=True), notes=notes)
    layers = tuple(Dense(x.cols, x.rows, x.bias, x.activation) for x in modules.layers)
    width = blueprint.model_width
    for layer, x in zip(layers, modules.layers, strict=True):
        if layer.cols != width:
            raise FileError(f"{x.path}: a dense layer reads {layer.cols} numbers, it is given {width}", path=str(x.path), field="in_features")
        width = layer.rows
    return replace(blueprint, pooling=Pooling("embed", modules.pool, layers, None, modules.is_normalised, modules.prompts))


def _ranking(blueprint: Blueprint, checkpoint: Checkpoint, modules: SentenceModules | None) -> Pooling:
    width = blueprint.model_width
    if blueprint.is_causal and blueprint.has_out_norm and blueprint.family != "qwen3":
        raise UnsupportedError(f"{checkpoint.path}: ranking with {blueprint.family} is not supported; qwen3 and bert are", what="reranker", supported=["qwen3", "bert"])
    if _classifies(checkpoint):
        n_labels = len(checkpoint.config.get("id2label") or ()) or checkpoint.fields.integer("num_labels", 1)
        if n_labels != 1:
            raise UnsupportedError(f"{checkpoint.path}: a classifier of {n_labels} labels is not supported; a reranker has one", what="classifier")
        if blueprint.is_causal:
            return Pooling("rank", "last", (Dense(width, 1, "score.bias" in checkpoint.tensors),))
        if blueprint.family == "bert":
            return Pooling("rank", "first", (Dense(width, width, True, "tanh"), Dense(width, 1, True)))
        raise UnsupportedError(f"{checkpoint.path}: reranking with {blueprint.family} is not supported", what="classifier")
    if not blueprint.is_causal or not blueprint.has_out_norm:
        raise UnsupportedError(f"{checkpoint.path}: there is no classifier in it, so it cannot rank", what="reranker")
    answers = modules.answers if modules is not None else None
    return Pooling("rank", "last", (), answers or _answers(checkpoint))


def _answers(checkpoint: Checkpoint) -> tuple[int, int]:
    """Ids of "no" and "yes" in the tokenizer's vocabulary. Raises: UnsupportedError."""
    found: dict[str, int] = {}
    path = checkpoint.files.get("tokenizer.json")
    if path is not None:
        try:
            vocabulary = json.loads(path.read_bytes())["model"]["vocab"]
            found = {word: vocabulary[word] for word in ("no", "yes") if isinstance(vocabulary.get(word), int)}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise FileError(f"{path}: there is no vocabulary in it", path=str(path)) from None
    elif checkpoint.kind == "gguf":
        tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
        found = {word: i for i, word in enumerate(tokens or ()) if word in ("no", "yes")}
    if len(found) < 2:
        raise UnsupportedError(f"{checkpoint.path}: its vocabulary has no tokens for yes and no, so it cannot rank", what="reranker")
    return found["no"], found["yes"]


def pooling_views(blueprint: Blueprint, checkpoint: Checkpoint, ours: dict[str, TensorView]) -> dict[str, TensorView]:
    """The tensors, with those of the pooling's own layers, and without a head. Raises: FileError naming what is missing."""
    p = blueprint.pooling
    if p is None:
        return ours
    head = ours.get("embed.weight" if blueprint.tied_head else "head.weight")
    out = {name: view for name, view in ours.items() if not name.startswith("head.")}
    if p.answers is not None and head is not None:
        out.update({f"answers.{i}.weight": rows_of(head, token, 1) for i, token in enumerate(p.answers)})
    if p.task == "embed" and p.layers and checkpoint.kind == "safetensors":
        modules = read_modules(checkpoint.path)
        for i, layer in enumerate(modules.layers if modules else ()):
            stored = open_checkpoint(layer.path).tensors
            for kind in ("weight", "bias")[: 1 + layer.bias]:
                view = stored.get(f"linear.{kind}")
                if view is None:
                    raise FileError(f"{layer.path}: tensor linear.{kind} is missing", path=str(layer.path), field=f"linear.{kind}")
                out[f"dense.{i}.{kind}"] = view
    return out


def pooling_shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of the pooling's own tensors."""
    p = blueprint.pooling
    want: dict[str, tuple[int, ...]] = {}
    if p is None:
        return want
    for i, layer in enumerate(p.layers):
        want[f"dense.{i}.weight"] = (layer.rows, layer.cols)
        if layer.bias:
            want[f"dense.{i}.bias"] = (layer.rows,)
    if p.answers is not None:
        want.update({f"answers.{i}.weight": (1, blueprint.model_width) for i in range(len(p.answers))})
    return want
