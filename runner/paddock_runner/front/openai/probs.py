"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from ...text.tokenizer import Tokenizer
from ...turns.choice import Prob, Top

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


def prompt_entries(tokenizer: Tokenizer, prompt: Sequence[int], probs: Sequence[Prob]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: null for the first token; of the others their own and the best, by id. rank: null beyond the best."""
    out: list[dict[str, Any] | None] = [None] if prompt else []
    for token, value, top in probs:
        entries = {t: _ranked(tokenizer, t, v, i) for i, (t, v) in enumerate(top, 1)}
        entries.setdefault(token, _ranked(tokenizer, token, value, None))
        out.append({str(t): entry for t, entry in entries.items()})
    return out


def _ranked(tokenizer: Tokenizer, token: int, value: float, rank: int | None) -> dict[str, Any]:
    text = piece_of(tokenizer, token).decode("utf-8", "replace")
    return {"logprob": max(value, LOWEST), "rank": rank, "decoded_token": text}


def echoed(prompt: Sequence[int], probs: Sequence[Prob], n_best: int, has_added: bool) -> list[Prob | tuple[int, None, Top]]:
    """A prompt's tokens as `text_logprobs` takes them. has_added: its first token is not in the text that the client sent."""
    rated = [(token, value, top[:n_best]) for token, value, top in probs]
    return [*rated] if has_added else [(prompt[0], None, ()), *rated]


def text_logprobs(
    tokenizer: Tokenizer, probs: Sequence[Prob | tuple[int, None, Top]], offset: int
) -> dict[str, Any]:
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
    values = [None if value is None else max(value, LOWEST) for _, value, _ in probs]
    has_tops = any(top is not None for top in tops)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if has_tops else None,
        "text_offset": offsets,
    }
