"""Tokenizers: special tokens, segments and their cache, bytes of tokens, refusals."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddock_runner.errors import FileError, UnsupportedError, UsageError
from paddock_runner.text.folder_tokenizer import tokenizer_from_folder, tokenizer_from_json
from paddock_runner.text.gguf_tokenizer import tokenizer_from_gguf
from paddock_runner.text.pretokenizers import KINDS
from paddock_runner.text.tokenizer import Tokenizer
from paddock_runner.text.vocabulary import AddedToken, Cutter, sentence_piece, sentence_pieces

from tests.unit.text.small import byte_level_metadata, merge_by_score, sentence_metadata

SMALL = tokenizer_from_gguf(byte_level_metadata())
MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "<|im_", "the", " the", "\n", "é", "👩‍👩‍👧", "<", "aaa", "\ud7ff")
texts = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=6)), max_size=12).map("".join)


@given(texts)
@settings(max_examples=150, deadline=None)
def test_cached_encoding_equals_uncached_encoding(text: str) -> None:
    fresh = tokenizer_from_gguf(byte_level_metadata()) if not text else SMALL
    first = fresh.encode(text)
    uncached = Tokenizer(fresh._parts, cache_bytes=0)
    assert uncached.encode(text) == first == fresh.encode(text)


@given(texts)
@settings(max_examples=150, deadline=None)
def test_decoding_gives_the_text_back(text: str) -> None:
    plain = tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe")) if not text else PLAIN
    assert plain.decode(plain.encode(text, add_special=False), skip_special=False) == text
    assert plain.decode(plain.encode(text, False, parse_special=False), skip_special=False) == text


PLAIN = tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe", **{"tokenizer.ggml.bos_token_id": 5}))


def test_special_tokens_in_text_are_ordinary_text_unless_asked_for() -> None:
    im_end = SMALL.id_of("<|im_end|>")
    assert im_end in SMALL.encode("a<|im_end|>")
    assert im_end not in SMALL.encode("a<|im_end|>", parse_special=False)
    assert SMALL.id_of("<tool_call>") in SMALL.encode("<tool_call>", parse_special=False)


def test_special_tokens_are_left_out_of_text_and_user_defined_ones_are_not() -> None:
    ids = SMALL.encode("<|im_start|>the<tool_call><|im_end|>")
    assert SMALL.decode(ids) == "the<tool_call>"
    assert [SMALL.is_special(i) for i in ids] == [True, False, False, True]


def test_end_of_turn_tokens_stop_generation() -> None:
    assert {SMALL.pieces[i] for i in SMALL.stop_ids} == {b"<|im_end|>", b"<|endoftext|>"}
    assert SMALL.eot_id == SMALL.eos_id == SMALL.id_of("<|im_end|>")


def test_harmony_end_of_message_does_not_stop_generation() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<|return|>", "<|call|>", "<|end|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 3]
    stops = {t.pieces[i] for t in [tokenizer_from_gguf(metadata)] for i in t.stop_ids}
    assert b"<|return|>" in stops and b"<|call|>" in stops and b"<|end|>" not in stops


def test_ids_beyond_the_embedding_are_never_produced() -> None:
    metadata = byte_level_metadata()
    n = len(metadata["tokenizer.ggml.tokens"])
    small = tokenizer_from_gguf(metadata, n_rows=n - 2)
    text = "<|im_end|><tool_call></tool_call>"
    assert max(small.encode(text)) < n - 2
    assert small.decode(small.encode(text), skip_special=False) == text
    with pytest.raises(UsageError, match="embedding rows"):
        tokenizer_from_gguf(metadata, n_rows=50).encode("the ~ é")
    with pytest.raises(FileError, match="embedding rows"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.bos_token_id": n - 1, "tokenizer.ggml.add_bos_token": True}, n_rows=9)


def test_bos_is_added_only_when_the_file_or_its_kind_says_so() -> None:
    metadata = byte_level_metadata("llama-bpe", **{"tokenizer.ggml.bos_token_id": 3})
    assert tokenizer_from_gguf(metadata).encode("x")[0] == 3
    assert tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_bos_token": False}).encode("x")[0] != 3
    assert tokenizer_from_gguf(metadata).encode("x", add_special=False)[0] != 3


def test_cache_stays_within_its_bytes_and_forgets_the_oldest() -> None:
    tokenizer = Tokenizer(SMALL._parts, cache_bytes=4000)
    for i in range(200):
        tokenizer.encode(f"<|im_start|>message {i}<|im_end|>")
    assert tokenizer.cache.used_bytes <= 4000
    misses = tokenizer.cache.misses
    tokenizer.encode("<|im_start|>message 199<|im_end|>")
    assert tokenizer.cache.misses == misses
    tokenizer.encode("<|im_start|>message 0<|im_end|>")
    assert tokenizer.cache.misses == misses + 1


def test_every_kind_of_pre_tokenizer_builds_and_loses_no_text() -> None:
    text = "Hello  world's 12345 \r\n\n\tЖ日本語テキスト한국어 naïve… don't I'LL $%^ \U0001f600 end  "
    for name, kind in KINDS.items():
        tokenizer = tokenizer_from_gguf(byte_level_metadata(name, **{"tokenizer.ggml.bos_token_id": 0}))
        if kind.is_byte_level:
            assert tokenizer.decode(tokenizer.encode(text, False), False) == text, name


def test_unknown_pre_tokenizer_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"'martian'.*qwen2"):
        tokenizer_from_gguf(byte_level_metadata("martian"))
    with pytest.raises(UnsupportedError, match="names no pre-tokenizer"):
        tokenizer_from_gguf(byte_level_metadata(""))
    with pytest.raises(UnsupportedError, match=r"'rwkv'.*gpt2"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "rwkv"})


def test_damaged_metadata_is_a_file_error() -> None:
    good = byte_level_metadata()
    for key, value in (("tokens", []), ("token_type", [1, 2]), ("merges", []), ("tokens", ["x" * 5000])):
        with pytest.raises(FileError):
            tokenizer_from_gguf({**good, f"tokenizer.ggml.{key}": value})
    with pytest.raises(FileError):
        tokenizer_from_gguf(sentence_metadata({"a": 0.0}, **{"tokenizer.ggml.scores": [1.0]}))


def test_half_a_surrogate_pair_and_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(UsageError, match="surrogate"):
        SMALL.encode("a\ud800b")
    for bad in (-1, SMALL.n_vocab):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            SMALL.decode([1, bad])


letters = st.text("ab▁", max_size=14)


@given(st.dictionaries(st.text("ab▁", min_size=2, max_size=5), st.integers(-30, 30), max_size=20), letters)
@settings(max_examples=200, deadline=None)
def test_merges_made_of_distinct_scores_give_what_merging_by_score_gives(words: dict[str, int], text: str) -> None:
    scores = {c: -1000.0 for c in "ab▁"}
    scores.update({w: s - i / 1000 for i, (w, s) in enumerate(words.items())})
    tokenizer = tokenizer_from_gguf(sentence_metadata(scores, **{"tokenizer.ggml.add_space_prefix": False}))
    reachable = {w: s for w, s in scores.items() if len(w) == 1 or _is_reachable(w, scores)}
    got = [tokenizer.pieces[i].decode().replace(" ", "▁") for i in tokenizer.encode(text, add_special=False)]
    if _overlaps_itself(reachable):
        assert "".join(got) == text
    else:
        assert got == merge_by_score(text, scores)


def _is_reachable(word: str, scores: dict[str, float]) -> bool:
    return any(word[:i] in scores and word[i:] in scores for i in range(1, len(word)))


def _overlaps_itself(words: dict[str, float]) -> bool:
    return any(w[:i] == w[-i:] for w in words for i in range(1, len(w)))


def test_runs_of_equal_scores_grow_from_the_left() -> None:
    scores = {"▁": -1.0, "a": -2.0, **{"▁" * n: -1000.0 for n in range(2, 8)}}
    tokenizer = tokenizer_from_gguf(sentence_metadata(scores, **{"tokenizer.ggml.add_space_prefix": False}))
    for n in range(1, 20):
        got = [tokenizer.pieces[i].decode().replace(" ", "▁") for i in tokenizer.encode(" " * n + "a", add_special=False)]
        assert got == merge_by_score("▁" * n + "a", scores)


def test_unknown_characters_become_bytes_and_come_back() -> None:
    tokenizer = tokenizer_from_gguf(sentence_metadata({"▁": -1.0, "a": -2.0}))
    ids = tokenizer.encode("a é\n👩", add_special=False)
    assert [tokenizer.pieces[i] for i in ids[:4]] == [b" ", b"a", b" ", b"\xc3"]
    assert tokenizer.decode(ids) == "a é\n👩"
    assert tokenizer.encode("a")[0] == tokenizer.bos_id == 1


def test_leftmost_longest_special_token_wins() -> None:
    cutter = Cutter([AddedToken(1, "<a", False), AddedToken(2, "<ab>", False), AddedToken(3, "b>", False)])
    assert list(cutter.cut("x<ab><ac<ab")) == [("x", -1), ("", 2), ("", 1), ("c", -1), ("", 1), ("b", -1)]


def test_many_nested_special_tokens_are_no_problem() -> None:
    cutter = Cutter([AddedToken(n, "a" * n, False) for n in range(1, 300)])
    assert [i for _, i in cutter.cut("a" * 700)] == [299, 299, 102]


def test_stripping_and_whole_word_tokens_are_honoured() -> None:
    tokens = [
        AddedToken(1, "<l>", True, strips_left=True),
        AddedToken(2, "<r>", True, strips_right=True),
        AddedToken(3, "word", False, is_word=True),
    ]
    pieces = list(Cutter(tokens).cut("a \n<l> b<r> \tc word sword word"))
    assert pieces == [("a", -1), ("", 1), (" b", -1), ("", 2), ("c ", -1), ("", 3), (" sword ", -1), ("", 3)]


def _folder_spec(**more: object) -> dict[str, object]:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": True},
            {"id": 9, "content": "<eos>", "special": True, "single_word": False, "lstrip": False, "rstrip": False},
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["▁", "a"]], "unk_token": "<unk>", "byte_fallback": False},
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"},
        **more,
    }


def test_built_in_truncation_and_padding_are_ignored_and_only_the_start_gets_a_space() -> None:
    tokenizer = tokenizer_from_json(_folder_spec())
    assert list(tokenizer.encode("a a a a<eos>a")) == [3, 3, 3, 3, 9, 2]
    assert tokenizer.decode([3, 3, 9]) == "a a"


def test_tokenizer_config_says_which_ends_are_added() -> None:
    config = {"bos_token": {"content": "<unk>"}, "eos_token": "<eos>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = tokenizer_from_json(_folder_spec(), config, {"eos_token_id": [9, 2]})
    assert list(tokenizer.encode("a")) == [0, 3, 9]
    assert tokenizer.stop_ids == (2, 9)


def test_a_folder_without_tokenizer_json_says_what_it_has(tmp_path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match=r"no tokenizer.json \(it has tokenizer.model\)"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FileError, match="not JSON"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Martian"}}')
    with pytest.raises(FileError, match="refused by the tokenizers library"):
        tokenizer_from_folder(tmp_path)
    with pytest.raises(FileError, match="added_tokens"):
        tokenizer_from_json({"added_tokens": [{"id": "x"}]})


def test_marks_for_filling_in_the_middle_are_found() -> None:
    assert SMALL.fill_ids is None
    metadata = byte_level_metadata()
    n = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 3]
    assert tokenizer_from_gguf(metadata).fill_ids == (n, n + 2, n + 1)


def test_rows_of_the_embedding_that_no_token_has_are_empty_text() -> None:
    padded = tokenizer_from_gguf(byte_level_metadata(), n_rows=SMALL.n_vocab + 10)
    assert padded.decode([SMALL.n_vocab + 3]) == "" and padded.n_vocab == SMALL.n_vocab
    assert padded.texts()[SMALL.n_vocab + 9] == ""


@given(st.lists(st.one_of(st.sampled_from(["<0x0A>", "<0xff>", "<0xZZ>", "<0x0A>b", "▁the", "\0", "\1", "\2", ""]), st.text(max_size=4)), max_size=20), st.booleans())
def test_many_pieces_are_what_each_is_alone(texts: list[str], has_bytes: bool) -> None:
    assert sentence_pieces(texts, has_bytes) == [sentence_piece(text, has_bytes) for text in texts]


def test_a_model_left_as_json_is_the_same_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(_folder_spec()))
    one, other = tokenizer_from_folder(tmp_path), tokenizer_from_json(_folder_spec())
    assert list(one.pieces) == list(other.pieces) and one.encode("hello <|im_start|>") == other.encode("hello <|im_start|>")


def test_long_text_is_cut_without_the_interpreters_lock_and_alike() -> None:
    """Who streams beside it goes on meanwhile: a thread that beats every millisecond does so while a megabyte is read."""
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    text = "some words, and more; " * 50_000
    beats, is_done = 0, threading.Event()

    def beat() -> None:
        nonlocal beats
        while not is_done.wait(0.001):
            beats += 1

    thread = threading.Thread(target=beat)
    thread.start()
    before = beats
    ids = tokenizer.encode(text)
    during = beats - before
    is_done.set()
    thread.join()
    assert during > 10
    assert list(ids) == tokenizer._parts.encoder.encode(text, add_special_tokens=False).ids and tokenizer.decode(ids) == text
