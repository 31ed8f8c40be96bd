"""Embeddings, reranking and scores over HTTP: real runners with tiny encoders, the openai client, and what must be refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from paddock_runner.edge.lists import SPOKEN
from paddock_runner.text.folder_tokenizer import tokenizer_from_folder

from tests.conformance.test_runner_process import ASK, Runner, pytestmark, running
from tests.golden.test_encoders import ENCODERS, Vectors

__all__ = ["pytestmark"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "capital", "of", "france", "is", "paris", "a", "dog", "##s", "what", "?", "."]
TOKENS = {"cls": ["[CLS]", 2], "sep": ["[SEP]", 3]}


def with_tokenizer(name: str, folder: Path) -> Path:
    """A tiny encoder, with a WordPiece tokenizer beside it."""
    shutil.copytree(ENCODERS / name, folder)
    added = [{"id": i, "content": w, "special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False} for i, w in enumerate(WORDS[:4])]
    spec = {
        "version": "1.0", "added_tokens": added, "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": {"type": "BertProcessing", **TOKENS}, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}, "padding": None,
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": {w: i for i, w in enumerate(WORDS)}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "what is ", "document": ""}}))
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    at = tmp_path_factory.mktemp("embedder")
    with running(at, with_tokenizer("bert", at / "bert"), "--no-auth", "--max-batch", "4") as found:
        yield found


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    at = tmp_path_factory.mktemp("ranker")
    with running(at, with_tokenizer("bert-rank", at / "bert-rank"), "--no-auth", "--max-batch", "4") as found:
        yield found


@pytest.fixture
def client(embedder: Runner) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=embedder.url + "/v1", api_key="x", max_retries=0) as found:
        yield found


def post(runner: Runner, path: str, body: object) -> tuple[int, dict]:
    answer = httpx.post(runner.url + path, json=body, timeout=20)
    return answer.status_code, answer.json()


def test_texts_and_ids_give_the_model_s_vectors_in_order(client: openai.OpenAI) -> None:
    ids = [2, 4, 5, 6, 7, 3]
    with Vectors(ENCODERS / "bert") as model:
        (want,) = model.of([ids])
    answer = client.embeddings.create(model="bert", input=["the capital of france", "dogs", "the capital of france"])
    assert [d.index for d in answer.data] == [0, 1, 2] and answer.model == "bert" and answer.object == "list"
    np.testing.assert_allclose(answer.data[0].embedding, want / np.linalg.norm(want), atol=2e-4)
    np.testing.assert_allclose(answer.data[0].embedding, answer.data[2].embedding, atol=1e-4)
    assert np.abs(np.subtract(answer.data[0].embedding, answer.data[1].embedding)).max() > 1e-3
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 6 + 4 + 6
    for given in (ids, [ids]):
        np.testing.assert_allclose(client.embeddings.create(model="bert", input=given).data[0].embedding, answer.data[0].embedding, atol=1e-4)


def test_base64_and_float_are_the_same_numbers_and_dimensions_cut_and_normalise(embedder: Runner, client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="bert", input="paris is a dog .", encoding_format="float").data[0].embedding
    packed = client.embeddings.create(model="bert", input="paris is a dog .").data[0].embedding
    np.testing.assert_allclose(plain, packed, atol=1e-4)
    assert len(plain) == 48 and abs(np.linalg.norm(plain) - 1) < 1e-6
    raw = post(embedder, "/v1/embeddings", {"input": "paris is a dog .", "encoding_format": "base64"})[1]["data"][0]["embedding"]
    assert isinstance(raw, str)
    short = client.embeddings.create(model="bert", input="paris is a dog .", dimensions=8).data[0].embedding
    np.testing.assert_allclose(short, np.array(plain[:8]) / np.linalg.norm(plain[:8]), rtol=1e-5)


def test_many_inputs_at_once_equal_one_at_a_time(embedder: Runner) -> None:
    texts = ["dog" + " dogs" * (i % 29) for i in range(150)]
    status, answer = post(embedder, "/v1/embeddings", {"input": texts})
    assert status == 200 and [d["index"] for d in answer["data"]] == list(range(150))
    for i in (0, 28, 77, 149):
        alone = post(embedder, "/v1/embeddings", {"input": texts[i]})[1]["data"][0]["embedding"]
        np.testing.assert_allclose(answer["data"][i]["embedding"], alone, atol=1e-4)


def test_the_tokens_of_inputs_are_counted(embedder: Runner) -> None:
    def counted() -> int:
        return next(int(line.split()[1]) for line in httpx.get(embedder.url + "/metrics").text.splitlines() if line.startswith("paddock_prompt_tokens_total "))

    before = counted()
    n = sum(post(embedder, path, body)[1]["usage"]["prompt_tokens"] for path, body in (
        ("/v1/embeddings", {"input": ["paris", "a dog"]}), ("/v1/rerank", {"query": "paris", "documents": ["a", "dog"]}), ("/v1/score", {"text_1": "paris", "text_2": "dog"}),
    ))  # fmt: skip
    n += post(embedder, "/api/embed", {"input": "paris"})[1]["prompt_eval_count"]
    assert post(embedder, "/v1/embeddings", {"input": "dog " * 70})[0] == 400
    assert counted() == before + n and n > 10


def test_a_request_of_many_inputs_that_has_begun_is_finished_when_the_runner_shuts_down(tmp_path: Path) -> None:
    with running(tmp_path, with_tokenizer("bert", tmp_path / "bert"), "--no-auth", "--max-batch", "2") as found, ThreadPoolExecutor(1) as threads:
        work = threads.submit(post, found, "/v1/embeddings", {"input": ["dog" + " dogs" * (i % 29) for i in range(2000)]})
        until = time.monotonic() + 10
        while httpx.get(found.url + "/v1/paddock/state").json()["engine"]["counters"]["requests"] < 70 and time.monotonic() < until:
            pass
        os.killpg(found.process.pid, signal.SIGTERM)  # as `paddock stop` and systemd do
        status, answer = work.result(60)
        assert status == 200, answer
        assert len(answer["data"]) == 2000 and found.process.wait(20) == 0


def test_an_input_type_puts_the_model_s_prompt_before_the_text(embedder: Runner) -> None:
    asked = post(embedder, "/v1/embeddings", {"input": "paris", "input_type": "search_query"})[1]
    plain = post(embedder, "/v1/embeddings", {"input": "what is paris"})[1]
    np.testing.assert_allclose(asked["data"][0]["embedding"], plain["data"][0]["embedding"], atol=1e-4)
    assert asked["usage"] == plain["usage"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"input": "dog " * 70}, "has 72 tokens, this model reads at most 64"),
        ({"input": [[4] * 65]}, "has 65 tokens, this model reads at most 64"),
        ({"input": []}, "0 inputs"), ({"input": ""}, "input 0 is empty"), ({"input": [[]]}, "input 0 is empty"), ({"input": [128]}, "token id 128 does not exist"),
        ({"input": ["a", 5]}, "mixed"), ({"input": "a", "dimensions": 0}, "dimensions is 0"), ({"input": "a", "dimensions": 49}, "have 1 to 48"),
        ({"input": "a", "encoding_format": "hex"}, "float and base64"), ({"input": "a", "input_type": "poem"}, "it knows query, document"), ({}, "input"),
    ],
)  # fmt: skip
def test_bad_embedding_requests_are_400_with_the_reason(embedder: Runner, body: dict, sentence: str) -> None:
    status, answer = post(embedder, "/v1/embeddings", body)
    assert status == 400 and sentence in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK}), ("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 5, "model": "bert"}), ("/api/chat", {"model": "bert", "messages": ASK}),
    ],
)  # fmt: skip
def test_a_model_that_gives_vectors_says_so_where_text_is_wanted(embedder: Runner, path: str, body: dict) -> None:
    status, answer = post(embedder, path, body)
    assert status == 400 and "gives vectors and writes no text" in json.dumps(answer)


def test_reranking_sorts_by_the_classifier_s_score(ranker: Runner) -> None:
    query, documents = "what is the capital of france ?", ["a dog .", "paris is the capital of france .", "dogs", "the the the the"]
    tokenizer = tokenizer_from_folder(ranker.folder / "bert-rank", 128)
    prompts = []
    for document in documents:
        ids, types = tokenizer.encode_pair(query, document)
        assert ids[0] == 2 and list(ids).count(3) == 2 and types[-1] == 1 and types[0] == 0
        prompts.append([i + 128 * t for i, t in zip(ids, types, strict=True)])
    with Vectors(ENCODERS / "bert-rank") as model:
        want = [1 / (1 + np.exp(-float(v[0]))) for v in model.of(prompts)]
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        status, answer = post(ranker, path, {"query": query, "documents": [documents[0], {"text": documents[1]}, *documents[2:]]})
        assert status == 200 and [r["index"] for r in answer["results"]] == np.argsort(-np.array(want)).tolist()
        for result in answer["results"]:
            assert abs(result["relevance_score"] - want[result["index"]]) < 1e-3
            assert result.get("document") == (None if path == "/v2/rerank" else {"text": documents[result["index"]]})
        assert answer["usage"]["total_tokens"] == sum(map(len, prompts))
    best = post(ranker, "/v1/rerank", {"query": query, "documents": documents, "top_n": 1, "return_documents": False})[1]["results"]
    assert len(best) == 1 and best[0]["index"] == int(np.argmax(want)) and "document" not in best[0]
    scores = post(ranker, "/v1/score", {"text_1": query, "text_2": documents})[1]["data"]
    np.testing.assert_allclose([s["score"] for s in scores], want, atol=1e-3)


def test_an_embedding_model_ranks_by_cosine(embedder: Runner) -> None:
    data = [post(embedder, "/v1/embeddings", {"input": t})[1]["data"][0]["embedding"] for t in ("what is paris", "dogs", "paris")]
    status, answer = post(embedder, "/v1/rerank", {"query": "paris", "documents": ["dogs", "paris"]})
    assert status == 200
    for result in answer["results"]:
        assert abs(result["relevance_score"] - np.dot(data[0], data[1 + result["index"]])) < 1e-5
    pairs = post(embedder, "/score", {"text_1": ["dogs", "a"], "text_2": ["dogs", "dog"]})[1]["data"]
    assert [p["index"] for p in pairs] == [0, 1] and all(-1 <= p["score"] <= 1.0001 for p in pairs)


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/embeddings", {"input": "a"}, "ranks documents and gives no embeddings"), ("/v1/rerank", {"query": "a", "documents": []}, "0 documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n is 0"), ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "dog " * 40, "documents": ["dog " * 40]}, "has 83 tokens, this model reads at most 64"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts, text_2 has 3"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "takes no instruction"),
    ],
)  # fmt: skip
def test_bad_ranking_requests_are_400_with_the_reason(ranker: Runner, path: str, body: dict, sentence: str) -> None:
    status, answer = post(ranker, path, body)
    assert status == 400 and sentence in answer["error"]["message"]


def test_models_list_says_what_the_model_is_for(embedder: Runner, ranker: Runner) -> None:
    tasks = [httpx.get(r.url + "/v1/models").json()["data"][0] for r in (embedder, ranker)]
    assert [(t["task"], t["family"], t["max_model_len"]) for t in tasks] == [("embed", "bert", 64), ("rank", "bert", 64)]


def test_mcp_clients_embed_and_rerank(embedder: Runner) -> None:
    pytest.importorskip("mcp")
    from paddock_manager.fleet.mcp import Toolbox, ToolServer

    box = Toolbox([ToolServer("paddock", url=embedder.url + "/mcp")])
    try:
        text, is_error = box.call("embed", {"texts": ["the capital of france", "a dog"], "input_type": "query"})
        found = json.loads(text)
        plain = post(embedder, "/v1/embeddings", {"input": ["the capital of france", "a dog"], "input_type": "query"})[1]
        assert not is_error and len(found["vectors"]) == 2 and found["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        np.testing.assert_allclose(found["vectors"], [d["embedding"] for d in plain["data"]], atol=1e-4)
        told = {"query": "what is the capital", "documents": ["a dog", "the capital of france"]}
        ranked = json.loads(box.call("rerank", {**told, "top_n": 1})[0])["results"]
        assert ranked[0]["index"] == post(embedder, "/v1/rerank", told)[1]["results"][0]["index"] and len(ranked) == 1
        assert box.call("generate", {"prompt": "Hi"})[1] and box.call("rerank", {"query": "x", "documents": []})[1]
    finally:
        box.close()


def test_ollamas_clients_get_the_same_vectors_and_nothing_is_cut(embedder: Runner, client: openai.OpenAI) -> None:
    import ollama

    texts = ["the capital of france", "a dog"]
    wanted = [d.embedding for d in client.embeddings.create(model="bert", input=texts, encoding_format="float").data]
    with ollama.Client(embedder.url) as asked:
        found = asked.embed("bert:latest", texts, truncate=True)
        assert found["embeddings"] == wanted and found["prompt_eval_count"] > 4
        assert asked.embeddings("bert", texts[1])["embedding"] == wanted[1]
        assert asked.show("bert")["capabilities"] == ["embedding"]
    status, body = post(embedder, "/api/embed", {"input": "dog " * 900, "truncate": True})
    assert status == 400 and "input 0 has" in body["error"]
    status, body = post(embedder, "/api/embed", {"input": 5})
    assert status == 400 and body["error"] == "input is 5, and must be a text or a list"


def test_paths_that_are_looked_at_first_need_no_key(embedder: Runner) -> None:
    assert httpx.get(embedder.url + "/").text == "Paddock is running" and httpx.head(embedder.url + "/").status_code == 200
    assert httpx.get(embedder.url + "/ping").json()["status"] == "ready"
    ours, spoken = (httpx.get(embedder.url + path).json() for path in ("/version", "/api/version"))
    assert spoken == {"version": SPOKEN, "paddock": ours["version"]} and tuple(map(int, SPOKEN.split("."))) >= (0, 6, 4)
    assert httpx.get(embedder.url + "/nothing").json()["error"]["code"] == "unknown_path"
