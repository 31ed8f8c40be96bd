"""Models as OpenAI's, Anthropic's and Ollama's clients list them: the served one of a runner, those of a gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from ..errors import UsageError

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
SPOKEN = "0.12.11"
"""The version of Ollama whose API is spoken here. Clients refuse servers that are below the one they need (VS Code's: 0.6.4), so it is what /api/version tells."""
FOR_EVER = "2318-01-01T00:00:00Z"
"""Until when Ollama's clients are told that a model stays loaded."""
MOST_KEPT_S = 100 * 365 * 86400.0
"""Longer than that is for ever."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A model. created_s: since when it is served. ctx_tokens: of one request, None where it is not known. facts: family, quant and the like. expires: until when it stays loaded."""

    name: str
    created_s: int
    ctx_tokens: int | None
    memory_bytes: int
    facts: Mapping[str, Any]
    expires: str = FOR_EVER

    @property
    def family(self) -> str:
        """Whose architecture it has."""
        return str(self.facts.get("family") or "unknown")

    @property
    def created(self) -> str:
        """Since when it is served."""
        return datetime.fromtimestamp(self.created_s, UTC).isoformat().replace("+00:00", "Z")


def plain_name(name: str) -> str:
    """A model's name without the tag that Ollama's clients append."""
    return name.removesuffix(":latest")


def openai_list(models: Sequence[Listed]) -> dict[str, Any]:
    """The answer at /v1/models, with the fields of OpenAI's clients and of Anthropic's: neither minds the other's."""
    data = [openai_entry(model) for model in models]
    return {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


def openai_entry(model: Listed) -> dict[str, Any]:
    """The answer at /v1/models/NAME."""
    return {
        "id": model.name, "object": "model", "created": model.created_s, "owned_by": "paddock",
        "type": "model", "display_name": model.name, "created_at": model.created,
        "lifecycle": "active",
        "max_model_len": model.ctx_tokens, "context_length": model.ctx_tokens, "max_input_tokens": model.ctx_tokens, "max_tokens": model.ctx_tokens, **model.facts,
    }  # fmt: skip


def ollama_version(ours: str) -> dict[str, Any]:
    """The answer at /api/version. ours: Paddock's."""
    return {"version": SPOKEN, "paddock": ours}


def ollama_entry(model: Listed) -> dict[str, Any]:
    """One of the list at /api/tags."""
    facts = model.facts
    return {
        "name": model.name, "model": model.name, "modified_at": model.created,
        "size": model.memory_bytes, "digest": sha256(model.name.encode()).hexdigest(),
        "details": {
            "parent_model": "", "format": str(facts.get("files", "gguf")), "family": model.family, "families": [model.family],
            "parameter_size": _size(facts.get("parameters") or 0), "quantization_level": str(facts.get("quant") or ""),
        },
    }  # fmt: skip


def ollama_loaded(model: Listed) -> dict[str, Any]:
    """One of the list at /api/ps."""
    return {**ollama_entry(model), "expires_at": model.expires, "size_vram": model.memory_bytes, "context_length": model.ctx_tokens}


def ollama_show(model: Listed, template: str, abilities: Sequence[str], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The answer at /api/show. more: of its header."""
    entry, family = ollama_entry(model), model.family
    count = {"general.parameter_count": n} if (n := model.facts.get("parameters")) else {}
    return {
        "modelfile": f"FROM {model.name}\n", "parameters": "", "template": template, "details": entry["details"],
        "model_info": {
            "general.architecture": family, "general.basename": model.name, f"{family}.context_length": model.ctx_tokens, **count, **(more or {}),
        },
        "capabilities": list(abilities), "modified_at": entry["modified_at"],
    }  # fmt: skip


def keep_s(value: object) -> float | None:
    """Seconds that `keep_alive` asks for: below 0 for ever, None: as long as is usual.

    Ollama takes a number of seconds, or Go's durations ("5m", "1h30m"). Raises: UsageError.
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _kept_s(value)
    text = value.strip() if isinstance(value, str) else ""
    sign, parts = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if re.fullmatch(r"\d+(\.\d+)?", parts):
        return _kept_s(sign * float(parts))
    if not re.fullmatch(r"(\d+(\.\d+)?(ns|us|ms|s|m|h))+", parts):
        raise UsageError(f"keep_alive is {str(value)[:40]!r}, a number of seconds or a duration such as 5m is possible", param="keep_alive")
    return _kept_s(sign * sum(float(n) * _UNITS[unit] for n, unit in re.findall(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h)", parts)))


def _kept_s(seconds: float) -> float:
    """-1 for longer than a date can tell."""
    return float(seconds) if -MOST_KEPT_S <= seconds <= MOST_KEPT_S else -1.0


def _size(n: int) -> str:
    """Parameters as Ollama writes them: "494.03M", "7.6B"; nothing where they are not known."""
    return "" if not n else f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"
