"""Sampling: what `paddock run` takes, and what a model's makers recommend, which it asks for where nobody chose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddock_runner.errors import FileError, PaddockError, UsageError

from paddock_manager import paths
from paddock_manager.catalog import catalog
from paddock_manager.commands.target import Target

NAMES: dict[str, type] = {"temperature": float, "top_p": float, "top_k": int}
GGUF_NAMES = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k"}
KINDS: dict[str, type] = {**NAMES, "min_p": float, "repetition_penalty": float, "seed": int, "max_tokens": int}
BOUNDS = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (-1, 2**31 - 1), "min_p": (0, 1), "repetition_penalty": (0, 10), "seed": (-(2**63), 2**63 - 1), "max_tokens": (1, 2**31 - 1)}
"""What the API takes."""
OVER_0 = ("top_p", "repetition_penalty")


def chosen(name: str, word: object) -> float | int:
    """The value of a setting. Raises: UsageError with the value and what is possible."""
    try:
        value: float | int = KINDS[name](word)
    except (ValueError, OverflowError):
        raise UsageError(f"{name} takes a {'whole ' if KINDS[name] is int else ''}number, not {word!r}") from None
    least, most = BOUNDS[name]
    if not least <= value <= most or (name in OVER_0 and value == 0):
        are = f"at least {least} is needed" if value < least else f"{least} to {most} are possible"
        raise UsageError(f"{name} is {value}, {f'more than 0 and at most {most} is possible' if name in OVER_0 else are}", setting=name)
    return value


def given(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the options of a command line ask for, as fields of a request. Raises: UsageError, FileError."""
    fields: dict[str, Any] = {name: chosen(name, found[name]) for name in KINDS if name in found}
    if "think" in found:
        fields["reasoning_effort"] = found["think"]
    if "format" in found:
        fields["response_format"] = _shape(str(found["format"]))
    return fields


def _shape(word: str) -> dict[str, Any]:
    """json, or the JSON schema in a file. Raises: FileError."""
    if word == "json":
        return {"type": "json_object"}
    path = paths.expanded(word)
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}", "--format takes json, or a file with a JSON schema", path=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is no JSON: {error}", "--format takes json, or a file with a JSON schema", path=str(path)) from None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def recommended(found: Target) -> dict[str, Any]:
    """Temperature, top_p and top_k as the catalog says, else as the checkpoint says; {} where neither does."""
    alias = found.model.alias if found.model is not None else ""
    listed = catalog.sampling(alias or found.name) if alias or found.model is None else {}
    return listed or (_of_folder(found.path) if found.path.is_dir() else _of_gguf(found.path))


def _of_folder(path: Path) -> dict[str, Any]:
    """As generation_config.json says; the likeliest token each time where it says not to sample."""
    try:
        body = json.loads((path / "generation_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(body, dict):
        return {}
    return {"temperature": 0.0} if body.get("do_sample") is False else _kept({name: body.get(name) for name in NAMES})


def _of_gguf(path: Path) -> dict[str, Any]:
    """As the header's general.sampling.* say."""
    from paddock_runner.files.checkpoint import open_checkpoint

    try:
        head = open_checkpoint(path).metadata
    except PaddockError:
        return {}  # the runner says what is wrong with it
    return _kept({name: head.get(f"general.sampling.{word}") for name, word in GGUF_NAMES.items()})


def _kept(body: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that a request may hold."""
    numbers = {k: v for k, v in body.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    good = {"temperature": lambda v: 0 <= v <= 2, "top_p": lambda v: 0 < v <= 1, "top_k": lambda v: 0 < v < 1 << 20}
    return {k: NAMES[k](v) for k, v in numbers.items() if good[k](v)}
