"""Guesses of tokens to come: what a model must keep for them, and its own layer that makes them (MTP), where one is stored.

Source: https://github.com/vllm-project/vllm, models/qwen3_5_mtp (what is read and in which order); transformers, modeling_layers.py, MtpLayer.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import UnsupportedError
from ..files.checkpoint import Checkpoint
from .blueprint import Blueprint

KINDS = ("auto", "off", "lookup", "mtp")
"""auto: by look-up, for models without recurrent layers. lookup: for those too, which then keep their states twice. mtp: by the model's own layer."""
MAX_GUESSES = 8
PREFIXES = ("mtp.", "model.mtp.")
HF = {
    "fc.weight": "draft_fc.weight", "pre_fc_norm_embedding.weight": "draft_embed_norm.weight", "pre_fc_norm_hidden.weight": "draft_hidden_norm.weight",
    "norm.weight": "draft_norm.weight",
}  # fmt: skip
"""Of a part of its own (Qwen)."""
WITHIN = {
    "eh_proj": "draft_fc", "enorm": "draft_embed_norm", "hnorm": "draft_hidden_norm", "shared_head.norm": "draft_norm", "shared_head_norm": "draft_norm",
}  # fmt: skip
"""Of a layer behind the model's own (GLM, DeepSeek; in GGUF after "nextn.")."""
SHARED = ("embed_tokens.weight", "shared_head.head.weight", "shared_head_head.weight")
"""What such a layer has in common with the model."""


def with_guesses(blueprint: Blueprint, checkpoint: Checkpoint, kind: str) -> Blueprint:
    """The blueprint with what guesses of that kind need. Raises: UnsupportedError naming what there is not."""
    if kind in ("auto", "off") or blueprint.pooling is not None:
        return blueprint
    if not blueprint.may_take_back:
        raise UnsupportedError(f"{checkpoint.path}: --guesses {kind}: {blueprint.family} has recurrent layers that cannot take guesses back", what=f"{kind} guesses")
    max_guesses = (1 if kind == "mtp" else MAX_GUESSES) if blueprint.has_states else 0
    blueprint = replace(blueprint, max_guesses=max_guesses)
    if kind != "mtp":
        return blueprint
    own = next((layer for layer in reversed(blueprint.layers) if layer.kind == "attention"), None)
    if own is None or own.attention.index is not None or own.joins_later or not _is_stored(blueprint, checkpoint):
        raise UnsupportedError(f"{checkpoint.path}: --guesses mtp: there is no draft layer in it that is supported", "--guesses lookup", what="mtp")
    return replace(blueprint, draft=own)


def _is_stored(blueprint: Blueprint, checkpoint: Checkpoint) -> bool:
    n = blueprint.n_layers
    names = [f"{p}fc.weight" for p in PREFIXES] + [f"model.layers.{n}.eh_proj.weight", f"blk.{n}.nextn.eh_proj.weight"]
    return any(name in checkpoint.tensors for name in names)


def draft_part(within: str) -> str | None:
    """Our name of what a draft layer behind the model's own has beside any layer; "" for what it shares with the model; None: something else."""
    within = within.removeprefix("nextn.")
    if within in SHARED:
        return ""
    stem, _, kind = within.rpartition(".")
    return f"{WITHIN[stem]}.{kind}" if stem in WITHIN else None


def draft_name(name: str, blueprint: Blueprint) -> str | None:
    """A tensor of the draft layer: as it would be called among the model's layers, or (beginning with "draft_") by our name; None: not one of its own."""
    prefix = next((p for p in PREFIXES if name.startswith(p)), "")
    if not prefix or blueprint.draft is None:
        return None
    within = name.removeprefix(prefix)
    if within.startswith("layers.0."):
        return f"layers.{blueprint.n_layers}.{within.removeprefix('layers.0.')}"
    return HF.get(within)


def draft_shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of what the draft layer has beside those of any layer."""
    m = blueprint.model_width
    if blueprint.draft is None:
        return {}
    return {"draft_fc.weight": (m, 2 * m), **{f"draft_{name}.weight": (m,) for name in ("embed_norm", "hidden_norm", "norm")}}
