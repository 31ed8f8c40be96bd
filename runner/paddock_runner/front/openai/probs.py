"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from ...text.tokenizer import Tokenizer
from ...turns.choice import Prob, Top

_decoder = codecs.getincrementaldecoder("utf-8")
_encode = msgspec.json.Encoder().encode
LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_entries(tokenizer: Tokenizer, probs: Iterable[Prob]) -> list[msgspec.Raw]:
    """`logprobs.content` of chat completions, each token's as JSON: a long answer has tens of thousands of entries, and nobody is served while they are made."""
    out = []
    for token, value, top in probs:
        begin, end = _around(tokenizer, token)
        best = b"},".join([b"%b%b%b" % (a, _encode(max(v, LOWEST)), z) for t, v in top for a, z in (_around(tokenizer, t),)])
        out.append(msgspec.Raw(b'%b%b%b,"top_logprobs":[%b]}' % (begin, _encode(max(value, LOWEST)), end, best + b"}" if top else b"")))
    return out


@lru_cache(maxsize=16384)
def _around(tokenizer: Tokenizer, token: int) -> tuple[bytes, bytes]:
    """What stands before and behind a token's log-probability in its entry, which stays open."""
    piece = piece_of(tokenizer, token)
    return b'{"token":%b,"logprob":' % _encode(piece.decode("utf-8", "replace")), b',"bytes":%b' % _encode(list(piece))


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
