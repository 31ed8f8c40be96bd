"""GET /api/tags, /api/ps and POST /api/show: the one served model, as Ollama's clients look for it."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from ..http import Exchange
from ..service import Front, Shape
from .fields import OllamaShow, plain_name

SHOW = Shape(OllamaShow)
SHAPES = {"post_show": OllamaShow, "post_pull": OllamaShow}


async def get_tags(front: Front, exchange: Exchange) -> None:
    """GET /api/tags: the served model."""
    await exchange.answer_json({"models": [_entry(front)]})


async def get_running(front: Front, exchange: Exchange) -> None:
    """GET /api/ps: the served model, which stays loaded."""
    size = front.served.facts.get("memory_bytes", 0)
    more = {"expires_at": "2318-01-01T00:00:00Z", "size_vram": size, "context_length": front.served.max_ctx_tokens}
    await exchange.answer_json({"models": [{**_entry(front), **more}]})


async def post_show(front: Front, exchange: Exchange) -> None:
    """POST /api/show: the model's template, family and abilities."""
    body = await SHOW.read(front, exchange)
    front.require_model(plain_name(body.model or body.name))
    served, entry = front.served, _entry(front)
    family = entry["details"]["family"]
    writes = served.vectors is None
    abilities = ["completion"] if writes else ["embedding"] if served.vectors is not None and served.vectors.task == "embed" else []
    abilities += ["tools"] if writes and served.format.takes_tools else []
    abilities += ["insert"] if writes and served.tokenizer.fill_ids is not None else []
    abilities += ["thinking"] if writes and (served.format.marks is not None or served.format.messages is not None) else []
    await exchange.answer_json(
        {
            "modelfile": f"FROM {served.name}\n", "parameters": "", "template": served.template.source, "details": entry["details"],
            "model_info": {
                "general.architecture": family, f"{family}.context_length": served.max_ctx_tokens,
                f"{family}.vocab_size": served.n_rows, "general.basename": served.name,
                **({"general.parameter_count": n} if (n := served.facts.get("parameters")) else {}),
            },
            "capabilities": abilities, "modified_at": entry["modified_at"],
        }
    )  # fmt: skip


async def post_pull(front: Front, exchange: Exchange) -> None:
    """POST /api/pull: says success for the served model; there are no others."""
    body = await SHOW.read(front, exchange)
    front.require_model(plain_name(body.model or body.name))
    await exchange.answer(200, b'{"status":"success"}\n', b"application/x-ndjson")


def _size(n: int) -> str:
    """Parameters as Ollama writes them: "494.03M", "7.6B"; nothing where they are not known."""
    return "" if not n else f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"


def _entry(front: Front) -> dict[str, Any]:
    served, facts = front.served, front.served.facts
    family = str(facts.get("family", "unknown"))
    return {
        "name": served.name, "model": served.name, "modified_at": datetime.fromtimestamp(served.created_s, UTC).isoformat(),
        "size": facts.get("memory_bytes", 0), "digest": sha256(served.name.encode()).hexdigest(),
        "details": {
            "parent_model": "", "format": str(facts.get("files", "gguf")), "family": family, "families": [family],
            "parameter_size": _size(facts.get("parameters", 0)), "quantization_level": str(facts.get("quant", "")),
        },
    }  # fmt: skip
