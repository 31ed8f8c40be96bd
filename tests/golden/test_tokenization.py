"""Ids of hard strings equal those of the reference tokenizers, for every tokenizer at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.text.folder_tokenizer import tokenizer_from_json
from paddock_runner.text.load import load_tokenizer
from paddock_runner.text.tokenizer import Tokenizer

FAMILIES = (
    "deepseek_v3", "deepseek_v4", "gemma3", "gptoss", "llama3", "llama3_1", "qwen3", "embeddinggemma-300m",
    "all-MiniLM-L6-v2", "whisper-base-hf", "whisper-tiny.en-hf",
)  # fmt: skip
SERVED = {
    "smollm2-135m-instruct-q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m-q4_k_m": "gemma3-270m-q4_k_m.gguf",
    "qwen2.5-coder-0.5b-instruct-q4_k_m": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "qwen2.5-coder-1.5b-instruct-q4_k_m": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}
# llama.cpp takes Gemma's "</s>" (HTML strike-through there, a user-defined token) for an end of generation and so does not match
# it in plain text; the model's own tokenizer.json does, and so do we.
LLAMACPP_ERRS = {("gemma3-270m-q4_k_m", "<s></s><unk><bos><eos>")}


@pytest.mark.models
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_decoded_text_equal_the_tokenizers_library(name: str, shared_dir: Path, models_dir: Path) -> None:
    golden = json.loads((shared_dir / "golden/tokenization.json").read_text())["tokenizers"][name]
    path = models_dir / golden["file"]
    if not path.is_file():
        pytest.skip(f"{golden['file']} is not at hand")
    tokenizer = tokenizer_from_json(json.loads(path.read_text()))
    assert tokenizer.n_vocab == golden["vocab"]
    for row in golden["rows"]:
        text, ids = row["text"], row["ids"]
        with_special = ids if row["ids_with_special"] is None else row["ids_with_special"]
        assert list(tokenizer.encode(text, add_special=False)) == ids, text
        assert list(tokenizer.encode(text, add_special=True)) == with_special, text
        assert tokenizer.decode(ids, skip_special=False) == row["decoded"], text
        assert tokenizer.decode(ids, skip_special=True) == row["decoded_skip"], text


def _tokenizer(models_dir: Path, file: str) -> Tokenizer:
    if not (models_dir / file).is_file():
        pytest.skip(f"{file} is not at hand")
    return load_tokenizer(open_checkpoint(models_dir / file))


@pytest.mark.models
@pytest.mark.parametrize("name", SERVED)
def test_gguf_tokenizers_equal_llamacpp(name: str, shared_dir: Path, models_dir: Path) -> None:
    tokenizer = _tokenizer(models_dir, SERVED[name])
    server = shared_dir / f"golden/{name}.server.json"
    for row in json.loads(server.read_text())["tokenize"] if server.is_file() else []:
        assert list(tokenizer.encode(row["text"], True, True)) == row["ids_special"], row["text"]
        if (name, row["text"]) not in LLAMACPP_ERRS:
            assert list(tokenizer.encode(row["text"], False, False)) == row["ids_plain"], row["text"]
    for kind in ("llamacpp", "hf_fp32"):
        for case in json.loads((shared_dir / f"golden/{name}.{kind}.json").read_text())["cases"]:
            assert list(tokenizer.encode(case["prompt"])) == case["prompt_ids"]
            assert tokenizer.decode(case["generated_ids"], skip_special=False) == case["text"]


@pytest.mark.models
def test_gemma_from_gguf_equals_gemma_from_tokenizer_json(shared_dir: Path, models_dir: Path) -> None:
    """Scores turned into merges (GGUF) against the publisher's own merges (tokenizer.json)."""
    path = models_dir / "tokenizers/gemma3/tokenizer.json"
    if not path.is_file():
        pytest.skip("tokenizers/gemma3 is not at hand")
    ours = _tokenizer(models_dir, SERVED["gemma3-270m-q4_k_m"])
    theirs = tokenizer_from_json(json.loads(path.read_text()), n_rows=ours.n_vocab)
    prose = [p.read_text() for p in sorted((shared_dir / "research").glob("*.md"))]
    rows = json.loads((shared_dir / "golden/tokenization.json").read_text())["tokenizers"].values()
    for text in (*prose, *(row["text"] for family in rows for row in family["rows"])):
        assert ours.encode(text, False, False) == theirs.encode(text, False, False), text[:60]
    assert ours.encode("<s></s><unk><bos>", False) == theirs.encode("<s></s><unk><bos>", False)
    assert ours.stop_ids == theirs.stop_ids


@pytest.mark.models
def test_qwen_from_gguf_equals_qwen_from_tokenizer_json(shared_dir: Path, models_dir: Path) -> None:
    path = models_dir / "tokenizers/qwen3/tokenizer.json"
    if not path.is_file():
        pytest.skip("tokenizers/qwen3 is not at hand")
    ours = _tokenizer(models_dir, SERVED["qwen2.5-coder-0.5b-instruct-q4_k_m"])
    theirs = tokenizer_from_json(json.loads(path.read_text()))
    for row in json.loads((shared_dir / "golden/tokenization.json").read_text())["tokenizers"]["qwen3"]["rows"]:
        assert ours.encode(row["text"], False, False) == theirs.encode(row["text"], False, False), row["text"]


@pytest.mark.models
def test_vocabulary_files_of_llamacpp_equal_their_recorded_vectors(models_dir: Path) -> None:
    """`llamacpp-sdist/ggml-vocab-*.gguf` with .inp and .out files beside them, where somebody unpacked them."""
    files = [p for p in sorted(models_dir.glob("llamacpp-sdist/**/ggml-vocab-*.gguf")) if p.with_name(p.name + ".out").is_file()]
    if not files:
        pytest.skip("llama.cpp's vocabulary files are not at hand (sdist of llama-cpp-python, vendor/llama.cpp/models)")
    for path in files:
        tokenizer = load_tokenizer(open_checkpoint(path))
        texts = path.with_name(path.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        ids = path.with_name(path.name + ".out").read_text().split("\n")
        for text, wanted in zip(texts, ids, strict=False):
            assert list(tokenizer.encode(text, False, False)) == [int(i) for i in wanted.split()], (path.name, text)
