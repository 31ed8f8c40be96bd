"""Small tokenizers as GGUF metadata, and a plain reference of SPM's merging."""

from __future__ import annotations

import heapq
from typing import Any

from paddock_runner.text.vocabulary import byte_characters

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
WORDS = ("th", "the", "he", "in", "er", "Ġt", "Ġth", "Ġthe", "ing", "ð", "Ċ", "ĊĊ", "aa", "aaa", "ab")


def byte_level_metadata(pre: str = "qwen2", **more: Any) -> dict[str, Any]:
    """All bytes, a few merges, <|im_start|>, <|im_end|>, <|endoftext|> and a user-defined <tool_call>."""
    tokens = list(byte_characters())
    merges = []
    for word in WORDS:
        for cut in range(1, len(word)):
            if word not in tokens and word[:cut] in tokens and word[cut:] in tokens:
                merges.append(f"{word[:cut]} {word[cut:]}")
                tokens.append(word)
                break
    n_normal = len(tokens)
    tokens += ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * n_normal + [CONTROL] * 3 + [USER_DEFINED] * 2,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": n_normal + 2,
        **more,
    }


def sentence_metadata(words: dict[str, float], **more: Any) -> dict[str, Any]:
    """<unk> <s> </s>, the 256 bytes, then `words` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words),
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()),
        **more,
    }


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SPM: merge the neighbours whose union has the best score, leftmost first, until nothing merges."""
    symbols, n = list(text), len(text)
    before, after = list(range(-1, n - 1)), [*range(1, n), -1]
    queue: list[tuple[float, int, int, int]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and (score := scores.get(symbols[left] + symbols[right])) is not None:
            heapq.heappush(queue, (-score, left, right, len(symbols[left] + symbols[right])))

    for i in range(1, n):
        offer(i - 1, i)
    while queue:
        _, left, right, size = heapq.heappop(queue)
        if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != size:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [s for s in symbols if s]
