"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from ...text.tokenizer import Tokenizer
from ...turns.choice import Prob

_decoder = codecs.getincrementaldecoder("utf-8")
LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_entries(tokenizer: Tokenizer, probs: Iterable[Prob]) -> list[dict[str, Any]]:
    """`logprobs.content` of chat completions."""
    out = []
    for token, value, top in probs:
        entry = _entry(tokenizer, token, value)
        entry["top_logprobs"] = [_entry(tokenizer, t, v) for t, v in top]
        out.append(entry)
    return out


def _entry(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    piece = piece_of(tokenizer, token)
    return {"token": piece.decode("utf-8", "replace"), "logprob": max(value, LOWEST), "bytes": list(piece)}


def piece_of(tokenizer: Tokenizer, token: int) -> bytes:
    """A token's bytes; nothing for a row of the embedding that the tokenizer does not know."""
    return tokenizer.pieces[token] if token < tokenizer.n_vocab else b""


def text_logprobs(tokenizer: Tokenizer, probs: Sequence[Prob], offset: int) -> dict[str, Any]:
    """`logprobs` of completions. offset: characters of text before the first token."""
    tokens: list[str] = []
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    characters = _decoder("replace")
    for token, _, top in probs:
        piece = piece_of(tokenizer, token)
        tokens.append(piece.decode("utf-8", "replace"))
        offsets.append(offset)
        offset += len(characters.decode(piece))
        best = {piece_of(tokenizer, t).decode("utf-8", "replace"): max(v, LOWEST) for t, v in reversed(top)}
        tops.append(dict(reversed(best.items())) if top else None)
    values = [max(value, LOWEST) for _, value, _ in probs]
    has_tops = any(top is not None for top in tops)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if has_tops else None,
        "text_offset": offsets,
    }
