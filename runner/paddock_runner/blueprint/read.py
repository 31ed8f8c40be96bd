"""Checkpoint in, Blueprint out: picks the family, and refuses what no family reads, naming the nearest."""

from __future__ import annotations

from dataclasses import replace

from ..errors import FileError, UnsupportedError
from ..files.checkpoint import Checkpoint, require_runnable
from ..files.fields import Fields
from .blueprint import Blueprint
from .families import FAMILIES, Family
from .pooling import with_pooling
from .quantised import require_known_method

TEXT_SECTIONS = ("text_config", "llm_config", "language_config")


def architecture(checkpoint: Checkpoint) -> str:
    """What the checkpoint calls its architecture, or "" when it does not say (general.architecture, or model_type)."""
    value = (
        checkpoint.metadata.get("general.architecture")
        if checkpoint.kind == "gguf"
        else checkpoint.config.get("model_type")
    )
    return value if isinstance(value, str) else ""


def find_family(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint. Raises: UnsupportedError naming the nearest and all, FileError when there is no config."""
    arch = architecture(checkpoint)
    for family in FAMILIES:
        if arch and arch in (family.gguf if checkpoint.kind == "gguf" else family.hf):
            return family
    known = sorted({name for f in FAMILIES for name in (f.gguf if checkpoint.kind == "gguf" else f.hf)})
    if not arch:
        if checkpoint.kind == "safetensors" and not checkpoint.config:
            raise FileError(
                f"{checkpoint.path}: no config.json beside it, so the architecture is unknown",
                "name the folder that holds config.json",
                path=str(checkpoint.path),
            )
        key = "general.architecture" if checkpoint.kind == "gguf" else "model_type"
        raise UnsupportedError(
            f"{checkpoint.path}: unknown architecture: {key} is missing; supported: {', '.join(known)}",
            what="unknown architecture",
            supported=known,
        )
    near = nearest(arch, known)
    raise UnsupportedError(
        f"{checkpoint.path}: the architecture {arch[:60]} is not supported{f'; the nearest is {near}' if near else ''}; supported: {', '.join(known)}",
        what=arch,
        nearest=near,
        supported=known,
    )


def nearest(word: str, known: list[str]) -> str:
    """The known word that looks most like this one, or ""."""
    import difflib

    found = difflib.get_close_matches(word.lower(), known, 1, 0.65)
    return found[0] if found else ""


def read_blueprint(checkpoint: Checkpoint, task: str = "auto") -> Blueprint:
    """The model in a checkpoint. task: what it is wanted for ("auto": what its files say), see pooling.py.

    Raises: UnsupportedError (family, format, a projector or adapter), FileError (a key missing or impossible).
    """
    if checkpoint.kind == "gguf":
        require_runnable(checkpoint)
        return with_pooling(find_family(checkpoint).from_gguf(checkpoint, architecture(checkpoint)), checkpoint, task)
    family = find_family(checkpoint)
    require_known_method(checkpoint)
    require_runnable(checkpoint)
    config, notes = text_config(checkpoint)
    blueprint = with_pooling(family.from_hf(checkpoint, config), checkpoint, task)
    return replace(blueprint, notes=(*blueprint.notes, *notes))


def text_config(checkpoint: Checkpoint) -> tuple[Fields, tuple[str, ...]]:
    """The part of config.json that describes the text model, and notes about what is left out."""
    fields = checkpoint.fields
    for key in TEXT_SECTIONS:
        if key in fields:
            section = fields.section(key)
            merged = {**{k: fields[k] for k in ("tie_word_embeddings", "vocab_size") if k in fields}, **section}
            others = [name for name in ("vision", "audio") if f"{name}_config" in fields]
            notes = (f"the {' and '.join(others)} part is not loaded: text only",) if others else ()
            return Fields(merged, fields.where, "field", key + "."), notes
    return fields, ()
