"""Ids of hard strings equal those of the reference tokenizers, for every tokenizer at hand."""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.text.folder_tokenizer import tokenizer_from_json
from paddock_runner.text.gguf_tokenizer import _merges_by_rank, tokenizer_from_gguf
from paddock_runner.text.load import load_tokenizer
from paddock_runner.text.tokenizer import Tokenizer
from paddock_runner.text.vocabulary import byte_level_piece
from tokenizers import Tokenizer as Reference

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


FRAGMENTS = [
    "日本語のテキスト。", "中文测试，混合标点！", "한국어 문장", "😀👨‍👩‍👧‍👦🏳️‍🌈", "\U0001f1e9\U0001f1ea", "Ωμέγα", "مرحبا", "हिन्दी", "ไทย", "e\u0301", "ß", "ﬁ", "İ", "ſ", "𝕬𝖇", "\u200b", "\ufeff", "\u00a0",
    "\u3000", "\x00", "\x7f", " ", "  ", "\n\n\n", "\t\t", "   \n  ", "\r\n", "1234567", "3.14e-5", "don't", "I'LL", "_foo_Bar", "http://a.b/c?d=e", "<|im_start|>", "<|endoftext|>", "<s>", "</s>",
    "<bos>", "[INST]", "<｜begin▁of▁sentence｜>", "<|begin_of_text|>", "<|start|>", "a", "A", " a", " 中", "def f(x):\n    return x**2\n",
]  # fmt: skip


def mixed_corpus(shared_dir: Path) -> Iterator[str]:
    """Prose, code, and made-up text of scripts, emoji, whitespace and special tokens."""
    yield from (p.read_text() for p in sorted((shared_dir / "research").glob("*.md")))
    yield from (p.read_text() for p in sorted(Path(__file__).parent.glob("*.py")))
    chance = random.Random(5)
    for _ in range(600):
        yield "".join(chance.choice(FRAGMENTS) + chance.choice(["", "", " ", "\n"]) for _ in range(chance.randint(1, 40)))
    for _ in range(300):
        yield "".join(chr(chance.choice([chance.randint(32, 126), chance.randint(0xA0, 0x24F), chance.randint(0x1F300, 0x1F6FF), chance.randint(0, 0xD7FF)])) for _ in range(60))


@pytest.mark.models
@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixed_corpus_equals_the_tokenizers_library(name: str, shared_dir: Path, models_dir: Path) -> None:
    path = models_dir / json.loads((shared_dir / "golden/tokenization.json").read_text())["tokenizers"][name]["file"]
    if not path.is_file():
        pytest.skip(f"{path.name} of {name} is not at hand")
    reference, ours = Reference.from_file(str(path)), tokenizer_from_json(json.loads(path.read_text()))
    reference.no_truncation()
    reference.no_padding()
    for text in mixed_corpus(shared_dir):
        ids = reference.encode(text, add_special_tokens=False).ids
        assert list(ours.encode(text, add_special=False)) == ids, text[:80]
        assert ours.decode(ids, skip_special=False) == reference.decode(ids, skip_special_tokens=False), text[:80]


def _sentencepiece(path: Path) -> Tokenizer:
    """What a conversion to GGUF makes of a SentencePiece model (its protobuf: field 1 is a piece of text, score and type)."""
    pieces, raw, at = [], path.read_bytes(), 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(raw):
        field = number()
        if field != 0x0A:
            at += number()  # the trainer's and the normalizer's messages
            continue
        end, text, score, kind = number(), "", 0.0, 1
        end += at
        while at < end:
            tag = number()
            if tag == 0x0A:
                size = number()
                text, at = raw[at : at + size].decode(), at + size
            elif tag == 0x15:
                score, at = struct.unpack_from("<f", raw, at)[0], at + 4
            else:
                kind = number()
        pieces.append((text, score, kind))
    texts, scores, kinds = zip(*pieces, strict=True)
    key = "tokenizer.ggml."
    return tokenizer_from_gguf({key + "model": "llama", key + "tokens": texts, key + "scores": scores, key + "token_type": kinds, key + "bos_token_id": 1, key + "eos_token_id": 2, key + "unknown_token_id": 0})


def _tekken(path: Path) -> Tokenizer:
    """What a conversion to GGUF makes of Mistral's own file: special tokens first, then byte strings by rank."""
    told = json.loads(path.read_text())
    n_special = told["config"]["default_num_special_tokens"]
    spelled = {byte_level_piece(chr(i)): chr(i) for i in range(0x180) if len(byte_level_piece(chr(i))) == 1}
    ranks = {"".join(spelled[bytes([b])] for b in base64.b64decode(v["token_bytes"])): v["rank"] for v in told["vocab"][: told["config"]["default_vocab_size"] - n_special]}
    key = "tokenizer.ggml."
    return tokenizer_from_gguf({
        key + "model": "gpt2", key + "pre": "tekken", key + "tokens": ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, n_special)), *ranks],
        key + "token_type": [3] * n_special + [1] * len(ranks), key + "merges": [f"{a} {b}" for a, b in _merges_by_rank(ranks)], key + "bos_token_id": 1, key + "eos_token_id": 2,
    })  # fmt: skip


@pytest.mark.models
@pytest.mark.parametrize("file", ["tekken_240911.json", "mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model.v1"])
def test_mistrals_own_files_equal_tiktoken_and_sentencepiece(file: str, models_dir: Path) -> None:
    """mistral_tokens.json was made with tiktoken 0.14.0 (the file's own pattern and ranks) and sentencepiece 0.2.3."""
    path = models_dir / "tokenizers/mistral" / file
    if not path.is_file():
        pytest.skip(f"{file} is not at hand")
    ours = _tekken(path) if file.endswith(".json") else _sentencepiece(path)
    for text, ids in json.loads((Path(__file__).parent / "mistral_tokens.json").read_text())[file]:
        assert list(ours.encode(text, False, False)) == ids, text


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
