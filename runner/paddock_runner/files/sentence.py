"""What sentence-transformers puts beside a model: pooling, dense layers, normalisation, prompts, length. Reads small JSON files only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FileError, UnsupportedError
from .checkpoint import Checkpoint
from .fields import Fields
from .folder import MAX_JSON_BYTES, read_json

POOLS = {
    "pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len", "pooling_mode_weightedmean_tokens": "weighted_mean",
}  # fmt: skip
POOL_NAMES = {"cls": "first", "mean": "mean", "lasttoken": "last"}
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "GELU": "gelu_erf"}


ENCODERS = ("bert", "roberta", "xlm-roberta", "nomic_bert")
"""Values of model_type whose models write no text."""


def purpose(checkpoint: Checkpoint) -> str:
    """What a checkpoint is for as far as its files say: "embed", "rank", or "" for nothing but text. Raises: FileError, UnsupportedError."""
    if checkpoint.kind == "gguf":
        arch = checkpoint.metadata.get("general.architecture")
        kind = checkpoint.fields.integer(f"{arch}.pooling_type", 0)
        return "rank" if kind == 4 else "embed" if kind in (1, 2, 3) or arch in ("bert", "nomic-bert", "gemma-embedding") else ""
    names = checkpoint.config.get("architectures")
    if isinstance(names, list) and any(isinstance(n, str) and n.endswith("ForSequenceClassification") for n in names):
        return "rank"
    modules = read_modules(checkpoint.path) if checkpoint.path.is_dir() else None
    if modules is not None and (modules.pool or modules.answers):
        return "rank" if modules.answers else "embed"
    is_encoder = checkpoint.config.get("model_type") in ENCODERS or checkpoint.config.get("use_bidirectional_attention") is True
    return "embed" if is_encoder else ""


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A dense layer and the file that holds its weights. activation: "none", "tanh" or "gelu_erf"."""

    path: Path
    cols: int
    rows: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The parts of a sentence-transformers model. pool: "" when it has no pooling. answers: ids of (no, yes) of a logit score."""

    pool: str = ""
    layers: tuple[DenseFile, ...] = ()
    is_normalised: bool = False
    answers: tuple[int, int] | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    max_tokens: int = 0


def read_modules(folder: Path) -> SentenceModules | None:
    """The modules of a folder; None when it has none. Raises: FileError (damaged), UnsupportedError naming an unknown module or pooling."""
    listed = folder / "modules.json"
    if not listed.is_file():
        return None
    pool, layers, is_normalised = "", [], False
    answers: tuple[int, int] | None = None
    for entry in _list(listed):
        kind = str(entry.get("type", "")).rpartition(".")[2]
        within = _inside(folder, entry.get("path", ""), listed)
        if kind == "Transformer":
            continue
        if kind == "Normalize":
            is_normalised = True
            continue
        config = Fields(read_json(within / "config.json"), str(within / "config.json"), "field")
        if kind == "Pooling":
            pool = _pool(config)
        elif kind == "Dense":
            layers.append(_dense(config, within))
        elif kind == "LogitScore":
            answers = config.integer("false_token_id"), config.integer("true_token_id")
        else:
            raise UnsupportedError(f"{listed}: the module {kind[:40]} is not supported; supported: Transformer, Pooling, Dense, Normalize, LogitScore", what=kind[:40])
    return SentenceModules(pool, tuple(layers), is_normalised, answers, _prompts(folder), _max_tokens(folder))


def _list(path: Path) -> list[dict[str, Any]]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise FileError(f"{path}: too large for a list of modules", path=str(path))
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not valid JSON: {str(error)[:80]}", path=str(path)) from None
    if not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
        raise FileError(f"{path}: expected a list of modules", path=str(path))
    return value


def _inside(folder: Path, name: object, where: Path) -> Path:
    if not isinstance(name, str) or name.startswith("/") or any(part in ("..", "~") for part in name.split("/")) or "\0" in name:
        raise FileError(f"{where}: the path {name!r:.60} leads out of the folder", path=str(where), field="path")
    return folder / name


def _pool(config: Fields) -> str:
    chosen = [name for key, name in POOLS.items() if config.flag(key, False)]
    if "pooling_mode" in config:
        chosen = [POOL_NAMES.get(config.text("pooling_mode"), config.text("pooling_mode"))]
    if len(chosen) != 1 or chosen[0] not in ("first", "mean", "last"):
        what = " and ".join(chosen) or "none"
        raise UnsupportedError(f"{config.where}: pooling {what:.60} is not supported; supported: one of cls, mean, last token", what=f"pooling {what}")
    if not config.flag("include_prompt", True):
        raise UnsupportedError(f"{config.where}: pooling without the prompt's tokens is not supported", what="include_prompt")
    return chosen[0]


def _dense(config: Fields, within: Path) -> DenseFile:
    path = within / "model.safetensors"
    if not path.is_file():
        raise FileError(f"{within}: model.safetensors is missing", path=str(path))
    name = config.text("activation_function", "torch.nn.modules.linear.Identity").rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"{config.where}: the activation {name:.40} is not supported; supported: {', '.join(ACTIVATIONS)}", what=name[:40])
    cols, rows = (config.integer(key, low=1, high=1 << 20) for key in ("in_features", "out_features"))
    return DenseFile(path, cols, rows, config.flag("bias", True), ACTIVATIONS[name])


def _prompts(folder: Path) -> tuple[tuple[str, str], ...]:
    path = folder / "config_sentence_transformers.json"
    found = read_json(path).get("prompts") if path.is_file() else None
    if not isinstance(found, dict):
        return ()
    return tuple((str(k), v) for k, v in found.items() if isinstance(v, str))


def _max_tokens(folder: Path) -> int:
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return 0
    return Fields(read_json(path), str(path), "field").integer("max_seq_length", 0)
