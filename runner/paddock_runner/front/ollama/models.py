"""GET /api/tags, /api/ps and POST /api/show: the one served model, as Ollama's clients look for it."""

from __future__ import annotations

from ...edge.lists import ollama_entry, ollama_loaded, ollama_show, ollama_version
from ...version import our_version
from ..http import Exchange
from ..service import Front, Shape
from .fields import OllamaShow

SHOW = Shape(OllamaShow)
SHAPES = {"post_show": OllamaShow, "post_pull": OllamaShow}


async def get_version(front: Front, exchange: Exchange) -> None:
    """GET /api/version: the version of Ollama whose API is spoken, and Paddock's own."""
    await exchange.answer_json(ollama_version(our_version()))


async def get_tags(front: Front, exchange: Exchange) -> None:
    """GET /api/tags: the served model."""
    await exchange.answer_json({"models": [ollama_entry(front.listed)]})


async def get_running(front: Front, exchange: Exchange) -> None:
    """GET /api/ps: the served model, which stays loaded."""
    await exchange.answer_json({"models": [ollama_loaded(front.listed)]})


async def post_show(front: Front, exchange: Exchange) -> None:
    """POST /api/show: the model's template, family and abilities."""
    body = await SHOW.read(front, exchange)
    front.require_model(body.model or body.name)
    served, listed = front.served, front.listed
    writes = served.vectors is None
    abilities = ["completion"] if writes else ["embedding"] if served.vectors is not None and served.vectors.task == "embed" else []
    abilities += ["tools"] if writes and served.format.takes_tools else []
    abilities += ["insert"] if writes and served.tokenizer.fill_ids is not None else []
    abilities += ["thinking"] if writes and (served.format.marks is not None or served.format.messages is not None) else []
    await exchange.answer_json(ollama_show(listed, served.template.source, abilities, {f"{listed.family}.vocab_size": served.n_rows}))


async def post_pull(front: Front, exchange: Exchange) -> None:
    """POST /api/pull: says success for the served model; there are no others."""
    body = await SHOW.read(front, exchange)
    front.require_model(body.model or body.name)
    await exchange.answer(200, b'{"status":"success"}\n', b"application/x-ndjson")
