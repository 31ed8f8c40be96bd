"""Log-probabilities as OpenAI's shapes have them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from paddock_runner.front.openai.probs import LOWEST, chat_entries, piece_of
from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf

from tests.unit.text.small import byte_level_metadata

TOKENIZER = tokenizer_from_gguf(byte_level_metadata(), None)


def test_entries_are_json_of_every_token_s_text_and_bytes() -> None:
    def plain(token: int, value: float) -> dict[str, Any]:
        piece = piece_of(TOKENIZER, token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": max(value, LOWEST), "bytes": list(piece)}

    values = (0.0, -0.1, -1e-9, -math.inf)
    probs = [(i, v, tuple((i + k, v - k) for k in range(n))) for i in range(TOKENIZER.n_vocab + 3) for n in (0, 1, 5) for v in values]
    wanted = [{**plain(t, v), "top_logprobs": [plain(*best) for best in top]} for t, v, top in probs]
    entries = chat_entries(TOKENIZER, probs)
    assert msgspec.json.decode(msgspec.json.encode(entries)) == wanted
    assert all(type(entry) is msgspec.Raw for entry in entries), "made as JSON: dictionaries take four times as long, and nobody is served meanwhile"
