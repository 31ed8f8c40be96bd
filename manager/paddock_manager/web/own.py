"""What the gateway answers itself, without a runner: that it is there, its version, and its models as OpenAI's and Ollama's clients list them."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import unquote

from paddock_manager.store import headline
from paddock_manager.web.pool import Entry, Pool

OPEN = {"/", "/health", "/health/live", "/health/ready", "/ping", "/version", "/api/version"}
"""Paths that need no key."""
LISTS = {"/v1/models", "/api/tags", "/api/ps"}
ABILITIES = {"generate": ["completion"], "embed": ["embedding"], "rank": []}


class Own:
    """The gateway's own answers. created_s: since when it serves."""

    def __init__(self, pool: Pool, created_s: int):
        self._pool, self._created_s = pool, created_s

    def open(self, path: str) -> dict[str, Any] | str:
        """The answer at a path of OPEN."""
        if path == "/":
            return "Paddock is running"
        if path.endswith("/version"):
            return {"version": _version()}
        return {"status": "ready", "models": len(self._pool.entries)}

    def listed(self, path: str) -> dict[str, Any]:
        """The answer at a path of LISTS."""
        entries = self._pool.entries.values()
        if path == "/v1/models":
            data = [self._model(e) for e in entries]
            return {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
        if path == "/api/tags":
            return {"models": [self._ollama(e) for e in entries]}
        held = {"expires_at": "2318-01-01T00:00:00Z"}
        return {
            "models": [
                {**self._ollama(e), **held, "size_vram": e.need_bytes, "context_length": e.ctx_tokens}
                for e in entries
                if e.server is not None
            ]
        }

    def model(self, path: str) -> dict[str, Any]:
        """The answer at /v1/models/NAME. Raises: UnknownModel."""
        return self._model(self._pool.entry(unquote(path.removeprefix("/v1/models/"))))

    def show(self, name: str) -> dict[str, Any]:
        """The answer to Ollama's /api/show; the model is not loaded for it. Raises: UnknownModel."""
        entry = self._pool.entry(name)
        body, family = self._ollama(entry), str(entry.facts.get("family") or "unknown")
        template = headline.template_at(entry.launch.path)
        abilities = list(ABILITIES.get(str(entry.facts.get("task")), ABILITIES["generate"]))
        if "completion" in abilities and "tools" in template:
            abilities.append("tools")
        info: dict[str, Any] = {
            "general.architecture": family,
            "general.basename": entry.launch.name,
            f"{family}.context_length": entry.ctx_tokens,
        }
        if entry.facts.get("parameters"):
            info["general.parameter_count"] = entry.facts["parameters"]
        return {
            "modelfile": f"FROM {entry.launch.name}\n", "parameters": "", "template": template, "details": body["details"],
            "model_info": info, "capabilities": abilities, "modified_at": body["modified_at"],
        }  # fmt: skip

    def _model(self, entry: Entry) -> dict[str, Any]:
        """With the fields of OpenAI's clients and of Anthropic's."""
        context = entry.ctx_tokens
        return {
            "id": entry.launch.name, "object": "model", "created": self._created_s, "owned_by": "paddock", "state": entry.state,
            "type": "model", "display_name": entry.launch.name, "created_at": self._since(),
            "max_model_len": context, "context_length": context, **entry.facts, "memory_bytes": entry.need_bytes,
        }  # fmt: skip

    def _since(self) -> str:
        return datetime.fromtimestamp(self._created_s, UTC).isoformat().replace("+00:00", "Z")

    def _ollama(self, entry: Entry) -> dict[str, Any]:
        name, facts = entry.launch.name, entry.facts
        family = str(facts.get("family") or "unknown")
        return {
            "name": name, "model": name, "modified_at": self._since(),
            "size": entry.need_bytes, "digest": sha256(name.encode()).hexdigest(),
            "details": {
                "parent_model": "", "format": str(facts.get("files", "gguf")), "family": family, "families": [family],
                "parameter_size": _size(facts.get("parameters") or 0), "quantization_level": str(facts.get("quant") or ""),
            },
        }  # fmt: skip


def _size(n: int) -> str:
    """Parameters as Ollama writes them: "494.03M", "7.6B"; nothing where they are not known."""
    return "" if not n else f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"


def _version() -> str:
    try:
        return version("paddock")
    except PackageNotFoundError:
        return "0"
