"""POST /api/embed and /api/embeddings: vectors, as Ollama's clients ask for them. Inputs that are too long are refused, whatever `truncate` says."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ...turns.vectors import Rows, vectors
from ..http import Exchange
from ..openai.embeddings import checked_width, finished, inputs_of, prompts_of
from ..service import Front, Shape, account_vectors, caller, run_alone


class OllamaEmbed(msgspec.Struct, kw_only=True):
    """POST /api/embed. truncate, keep_alive and options are accepted: nothing is cut, and the model stays as it is."""

    input: str | list[str]
    model: str = ""
    dimensions: int | None = None
    truncate: bool | None = None
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None


class OllamaEmbedding(msgspec.Struct, kw_only=True):
    """POST /api/embeddings: one prompt."""

    prompt: str
    model: str = ""
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None


EMBED, EMBEDDING = Shape(OllamaEmbed), Shape(OllamaEmbedding)
SHAPES = {"post_embed": OllamaEmbed, "post_embeddings": OllamaEmbedding}


async def post_embed(front: Front, exchange: Exchange) -> None:
    """POST /api/embed: vectors of one text or several."""
    body = await EMBED.read(front, exchange)
    begun = time.monotonic_ns()
    rows, n_tokens = await _rows(front, exchange, body.model, body.input, body.dimensions)
    times = {"total_duration": time.monotonic_ns() - begun, "load_duration": 0, "prompt_eval_count": n_tokens}
    await exchange.answer_json({"model": front.served.name, "embeddings": [row.tolist() for row in rows], **times})


async def post_embeddings(front: Front, exchange: Exchange) -> None:
    """POST /api/embeddings: the vector of one text, in the older shape."""
    body = await EMBEDDING.read(front, exchange)
    rows, _ = await _rows(front, exchange, body.model, body.prompt, None)
    await exchange.answer_json({"embedding": rows[0].tolist()})


async def _rows(front: Front, exchange: Exchange, model: str, given: str | list[str], dimensions: int | None) -> tuple[Rows, int]:
    """The vectors and how many tokens they took. Raises: UsageError."""
    front.require_ready()
    front.require_model(model)
    form = front.require_vectors("embed")
    width = checked_width(form, dimensions)
    prompts = await prompts_of(front, form, inputs_of([given] if isinstance(given, str) else list(given)), None)
    rows = await run_alone(exchange, vectors(front.desk, prompts, caller(exchange, exchange.client)))
    n_tokens = sum(map(len, prompts))
    account_vectors(front, exchange, len(prompts), n_tokens)
    return finished(form, rows, width), n_tokens
