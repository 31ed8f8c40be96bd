"""POST /v1/rerank and /v1/score: how well documents answer a query, by a ranking model, or by the cosine of an embedding model's vectors."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence

import msgspec

from ..errors import UsageError
from ..text.vectors import VectorForm
from ..turns.turn import Caller
from ..turns.vectors import unit, vectors
from .http import Exchange
from .service import Front, Shape, account_vectors, caller, run_alone

MAX_DOCUMENTS = 2048


class DocumentText(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """A query and documents, in the shape of Cohere and Jina. instruction: for ranking models that take one."""

    query: str
    documents: list[str | DocumentText]
    model: str = ""
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class ScoreRequest(msgspec.Struct, kw_only=True):
    """Two texts, a text and many, or two lists of equal length, in vLLM's shape."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str = ""
    instruction: str | None = None


RERANK, SCORE = Shape(RerankRequest), Shape(ScoreRequest)
SHAPES = {"post_rerank": RerankRequest, "post_score": ScoreRequest}


async def post_rerank(front: Front, exchange: Exchange) -> None:
    """POST /v1/rerank: documents in the order of their relevance to a query"""
    body = await RERANK.read(front, exchange)
    front.require_ready()
    front.require_model(body.model)
    front.require_vectors()
    texts = [d if isinstance(d, str) else d.text for d in body.documents]
    if not 1 <= len(texts) <= MAX_DOCUMENTS:
        raise UsageError(f"{len(texts)} documents were sent, 1 to {MAX_DOCUMENTS} are possible", param="documents")
    if body.top_n is not None and body.top_n < 1:
        raise UsageError(f"top_n is {body.top_n}, at least 1 is needed", param="top_n")
    pairs = [(body.query, text) for text in texts]
    scores, n_tokens = await run_alone(exchange, scores_of(front, pairs, body.instruction, caller(exchange, exchange.client)))
    account_vectors(front, exchange, len(texts), n_tokens)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    wants_text = exchange.path != "/v2/rerank" if body.return_documents is None else body.return_documents
    results = [{"index": i, "relevance_score": scores[i], **({"document": {"text": texts[i]}} if wants_text else {})} for i in order]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    await exchange.answer_json({"id": "rerank-" + secrets.token_hex(12), "model": front.served.name, "usage": usage, "results": results})


async def post_score(front: Front, exchange: Exchange) -> None:
    """POST /v1/score: how well pairs of texts fit"""
    body = await SCORE.read(front, exchange)
    front.require_ready()
    front.require_model(body.model)
    front.require_vectors()
    first, second = ([t] if isinstance(t, str) else t for t in (body.text_1, body.text_2))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not 1 <= len(first) <= MAX_DOCUMENTS:
        raise UsageError(f"text_1 has {len(first)} texts, text_2 has {len(second)}: send one and many, or as many of both, at most {MAX_DOCUMENTS}", param="text_2")
    pairs = list(zip(first, second, strict=True))
    scores, n_tokens = await run_alone(exchange, scores_of(front, pairs, body.instruction, caller(exchange, exchange.client)))
    account_vectors(front, exchange, len(pairs), n_tokens)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    head = {"id": "score-" + secrets.token_hex(12), "object": "list", "created": int(time.time()), "model": front.served.name}
    await exchange.answer_json({**head, "data": data, "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}})


async def scores_of(front: Front, pairs: Sequence[tuple[str, str]], instruction: str | None, whose: Caller) -> tuple[list[float], int]:
    """A score for every pair, and the tokens that were read. Raises: UsageError, what the engine refuses."""
    form = front.require_vectors()
    if form.task == "embed":
        if instruction is not None:
            raise UsageError("an embedding model takes no instruction", "leave it out", param="instruction")
        return await _cosines(front, form, pairs, whose)
    served = front.served
    prompts = []
    for i, (query, document) in enumerate(pairs):
        ids = await served.run(lambda q=query, d=document: form.pair(served.tokenizer, q, d, instruction), len(query) + len(document))  # type: ignore[misc]
        served.require_input(len(ids), f"query and document {i}")
        prompts.append(ids)
    rows = (await vectors(front.desk, prompts, whose)).astype("float64")
    logits = rows[:, 1] - rows[:, 0] if form.width == 2 else rows[:, 0]
    return [_share(x) for x in logits.tolist()], sum(map(len, prompts))


def _share(logit: float) -> float:
    """The logistic function."""
    small = math.exp(-abs(logit))
    return (1 if logit >= 0 else small) / (1 + small)


async def _cosines(
    front: Front, form: VectorForm, pairs: Sequence[tuple[str, str]], whose: Caller
) -> tuple[list[float], int]:
    """Every text is embedded once, however many pairs it is in."""
    prefixes = [form.prefix(kind) if kind in form.prompts else "" for kind in ("query", "document")]
    texts = list(dict.fromkeys(prefix + text for pair in pairs for prefix, text in zip(prefixes, pair, strict=True)))
    prompts = await front.served.text_prompts(texts)
    for i, ids in enumerate(prompts):
        front.served.require_input(len(ids), f"text {i}")
    rows = unit(await vectors(front.desk, prompts, whose)).astype("float64")
    at = {text: i for i, text in enumerate(texts)}
    found = [float(rows[at[prefixes[0] + a]] @ rows[at[prefixes[1] + b]]) for a, b in pairs]
    return found, sum(map(len, prompts))
