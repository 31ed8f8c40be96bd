"""What a model's authors recommend for sampling: from its files, else what the runner was told (the catalog's words)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import FileError, UsageError
from ..files.checkpoint import Checkpoint

LIMITS = {"temperature": (0.0, 100.0), "top_p": (1e-9, 1.0), "top_k": (0, 1 << 24), "min_p": (0.0, 1.0), "repetition_penalty": (1e-3, 100.0)}
"""Field -> least and largest value."""
GGUF = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "penalty_repeat"}
"""Field -> key after "general.sampling."."""


@dataclass(frozen=True, slots=True)
class Recommended:
    """Sampling of requests that do not say. source: which file, or "--recommended", or "" when nobody recommends anything."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    source: str = ""

    def facts(self) -> dict[str, Any]:
        """For /v1/models; {} when nobody recommends anything."""
        return asdict(self) if self.source else {}


def recommended(checkpoint: Checkpoint, words: Sequence[str] = ()) -> Recommended:
    """What its files recommend; without that, what the words say ("temperature=0.6").

    Raises: UsageError for a word that says nothing; FileError for a generation_config.json that is none. Numbers out of range in files are passed over.
    """
    told = _told(words)
    found, source = (_from_gguf(checkpoint), "GGUF metadata") if checkpoint.kind == "gguf" else (_from_folder(checkpoint), "generation_config.json")
    values = {k: v for k, v in found.items() if _is_possible(k, v)}
    if not values:
        values, source = dict(told), "--recommended" if told else ""
    top_k = int(values.pop("top_k", 0))
    return Recommended(**{k: float(v) for k, v in values.items()}, top_k=top_k, source=source)


def _from_gguf(checkpoint: Checkpoint) -> dict[str, Any]:
    return {field: checkpoint.metadata.get(f"general.sampling.{key}") for field, key in GGUF.items()}


def _from_folder(checkpoint: Checkpoint) -> dict[str, Any]:
    """{} too for the files that transformers makes of a model's config."""
    path = checkpoint.files.get("generation_config.json")
    if path is None:
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: not valid JSON: {str(error)[:80]}", path=str(path)) from None
    if not isinstance(value, Mapping) or value.get("_from_model_config") is True:
        return {}
    return {field: value.get(field) for field in LIMITS}


def _told(words: Sequence[str]) -> dict[str, float]:
    found = {}
    for word in words:
        field, _, number = word.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if field not in LIMITS or not _is_possible(field, value):
            raise UsageError(f"--recommended: {word!r:.60} says nothing", f"write FIELD=NUMBER, fields: {', '.join(LIMITS)}", field="recommended")
        found[field] = value
    return found


def _is_possible(field: str, value: Any) -> bool:
    low, high = LIMITS[field]
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
