"""What a model that gives vectors wants as text: prompts for kinds of input, and query and document as one prompt."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UsageError
from .tokenizer import Tokenizer

KINDS = {"search_query": "query", "search_document": "document"}
"""Cohere's names for kinds of input."""
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_PARTS = (
    '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
    "<|im_end|>\n<|im_start|>user\n",
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""The prompt that Qwen's rerankers were trained with. Source: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B, model card."""


@dataclass(frozen=True, slots=True)
class VectorForm:
    """What a model that gives vectors is for.

    task: "embed" or "rank". width: numbers of a vector. prompts: by name, what belongs before a text of that kind. n_rows: ids of one type.
    n_types: how many types tokens may have. is_language_model: pairs are put into a prompt, not given as two segments.
    """

    task: str
    width: int
    is_normalised: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    n_rows: int = 0
    n_types: int = 1
    is_language_model: bool = False

    def prefix(self, kind: str | None) -> str:
        """What belongs before a text of that kind. Raises: UsageError naming the kinds there are."""
        if kind is None:
            return ""
        name = kind if kind in self.prompts else KINDS.get(kind, kind)
        if name in self.prompts:
            return self.prompts[name]
        if not self.prompts and name in ("query", "document"):
            return ""
        kinds = ", ".join(self.prompts) or "query, document"
        raise UsageError(f"this model knows no input of the type {kind[:60]!r}; it knows {kinds}", param="input_type")

    def pair(self, tokenizer: Tokenizer, query: str, document: str, instruction: str | None = None) -> array[int]:
        """Ids of a query with a document, as the ranking model reads them. A token's type goes with its id. Raises: UsageError, UnsupportedError."""
        if self.is_language_model:
            head, body, tail = QWEN3_PARTS
            text = body.format(instruction=instruction or QWEN3_INSTRUCTION, query=query, document=document)
            parts = [tokenizer.encode(head, False), tokenizer.encode(text, False, False), tokenizer.encode(tail, False)]
            return _joined(parts)
        if instruction is not None:
            raise UsageError("this model takes no instruction", "leave it out", param="instruction")
        ids, types = tokenizer.encode_pair(query, document)
        step = self.n_rows if self.n_types > 1 else 0
        return array("i", [i + step * min(t, self.n_types - 1) for i, t in zip(ids, types, strict=True)])


def _joined(parts: Sequence[array[int]]) -> array[int]:
    out = array("i")
    for part in parts:
        out.extend(part)
    return out
