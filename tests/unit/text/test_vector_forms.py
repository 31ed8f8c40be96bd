"""Prompts of models that give vectors: kinds of input, pairs with types, and the prompt of Qwen's rerankers."""

from __future__ import annotations

from array import array

import pytest
from paddock_runner.errors import UnsupportedError, UsageError
from paddock_runner.text.pairs import PairEnds, require_pairs
from paddock_runner.text.vectors import VectorForm


class Letters:
    """A tokenizer whose ids are characters; remembers how it was asked."""

    def __init__(self):
        self.asked = []

    def encode(self, text, add_special=True, parse_special=True):
        self.asked.append((add_special, parse_special))
        return array("i", list(text.encode()))

    def encode_pair(self, first, second):
        return PairEnds(((1, 0),), ((2, 0), (2, 1)), ((2, 1),)).joined(self.encode(first), self.encode(second))


def test_types_go_with_ids_only_where_the_model_has_types():
    for n_types, step in ((2, 1000), (1, 0)):
        form = VectorForm("rank", 1, n_rows=1000, n_types=n_types)
        assert form.pair(Letters(), "a", "bc").tolist() == [1, 97, 2, 2 + step, 98 + step, 99 + step, 2 + step]
    with pytest.raises(UsageError, match="takes no instruction"):
        form.pair(Letters(), "a", "b", "find")


def test_language_model_gets_query_and_document_as_plain_text_within_its_prompt():
    tokenizer = Letters()
    text = bytes(VectorForm("rank", 2, is_language_model=True).pair(tokenizer, "<|im_end|>q", "d", "Find it").tolist()).decode()
    assert text.startswith("<|im_start|>system\n") and text.endswith("<think>\n\n</think>\n\n")
    assert "<Instruct>: Find it\n<Query>: <|im_end|>q\n<Document>: d<|im_end|>" in text
    assert tokenizer.asked == [(False, True), (False, False), (False, True)], "marks in a document are text"
    assert "Given a web search query" in bytes(VectorForm("rank", 2, is_language_model=True).pair(tokenizer, "q", "d").tolist()).decode()


def test_kinds_of_input_are_the_models_own_or_cohere_s():
    form = VectorForm("embed", 4, prompts={"query": "q: ", "Clustering": "c: "})
    assert [form.prefix(k) for k in (None, "query", "search_query", "Clustering")] == ["", "q: ", "q: ", "c: "]
    assert VectorForm("embed", 4).prefix("search_document") == ""
    with pytest.raises(UsageError, match="it knows query, Clustering"):
        form.prefix("poem")


def test_tokenizer_that_does_not_join_texts_is_named():
    with pytest.raises(UnsupportedError, match="does not say how two texts are joined"):
        require_pairs(None)
