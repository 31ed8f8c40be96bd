"""POST /v1/embeddings: texts or token ids in, vectors out."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from ...errors import UsageError
from ...text.vectors import VectorForm
from ...turns.vectors import Rows, unit, vectors
from ..http import Exchange
from ..service import Front, Shape, account_vectors, caller, run_alone
from .fields import refuse

MAX_INPUTS = 2048
"""As many as OpenAI's API takes."""


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Inputs, and how their vectors are wanted. input_type: "query", "document" or another kind of text that the model has a prompt for."""

    input: str | list[int | str | list[int]]
    model: str = ""
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    input_type: str | None = None
    cache_salt: str | None = None


SHAPE = Shape(EmbeddingRequest)
SHAPES = {"post_embeddings": EmbeddingRequest}


async def post_embeddings(front: Front, exchange: Exchange) -> None:
    """POST /v1/embeddings"""
    body = await SHAPE.read(front, exchange)
    front.require_ready()
    front.require_model(body.model)
    form = front.require_vectors("embed")
    if body.encoding_format not in (None, "float", "base64"):
        raise refuse("encoding_format", f"encoding_format is {body.encoding_format[:40]!r}, float and base64 are possible")
    width = checked_width(form, body.dimensions)
    prompts = await prompts_of(front, form, await front.understand(exchange, lambda: inputs_of(body.input)), body.input_type)
    whose = caller(exchange, exchange.client, body.cache_salt)
    rows = finished(form, await run_alone(exchange, vectors(front.desk, prompts, whose)), width)
    n_tokens = sum(map(len, prompts))
    account_vectors(front, exchange, len(prompts), n_tokens)
    data = [{"object": "embedding", "index": i, "embedding": _encoded(row, body.encoding_format)} for i, row in enumerate(rows)]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    await exchange.answer_json({"object": "list", "data": data, "model": front.served.name, "usage": usage})


def checked_width(form: VectorForm, dimensions: int | None) -> int:
    """How many numbers are wanted. Raises: UsageError."""
    if dimensions is None:
        return form.width
    if not 1 <= dimensions <= form.width:
        raise UsageError(f"dimensions is {dimensions}, this model's vectors have 1 to {form.width}", param="dimensions")
    return dimensions


def finished(form: VectorForm, rows: Rows, width: int) -> Rows:
    """Vectors as the model's files want them: of length 1 where they say so, and always when they are shortened."""
    if width < form.width:
        return unit(rows, width)
    return unit(rows) if form.is_normalised else rows


def inputs_of(given: str | list[int | str | list[int]]) -> Sequence[Any]:
    """The inputs: texts, or lists of ids. Raises: UsageError."""
    if isinstance(given, list) and given and all(isinstance(item, int) for item in given):
        given = [cast("list[int]", given)]
    items: Sequence[Any] = given if isinstance(given, list) else [given]
    if any(isinstance(item, int) for item in items):
        raise refuse("input", "token ids and texts are mixed: send a text, ids, a list of texts or a list of lists of ids")
    if not 1 <= len(items) <= MAX_INPUTS:
        raise refuse("input", f"{len(items)} inputs were sent, 1 to {MAX_INPUTS} are possible")
    if "" in items:
        raise refuse("input", f"input {items.index('')} is empty")
    return items


async def prompts_of(front: Front, form: VectorForm, items: Sequence[Any], input_type: str | None) -> list[array[int]]:
    """The ids of inputs, behind the model's prompt for their kind. Raises: UsageError naming the input."""
    prefix, out = form.prefix(input_type), []
    made = iter(await front.served.text_prompts([prefix + item for item in items if isinstance(item, str)]))
    for i, item in enumerate(items):
        prompt = next(made) if isinstance(item, str) else await front.served.id_prompt_of(item, "input")
        front.served.require_input(len(prompt), f"input {i}")
        out.append(prompt)
    return out


def _encoded(row: Rows, encoding: str | None) -> str | list[float]:
    return base64.b64encode(row.astype("<f4").tobytes()).decode() if encoding == "base64" else row.tolist()
