"""Opening checkpoints: values on demand, remote headers in at most three requests, reading bytes, chat templates."""

from __future__ import annotations

import json
import os

import pytest
from paddock_runner.errors import AmbiguousModel, FileError, UnsupportedError
from paddock_runner.files.checkpoint import open_checkpoint, open_remote
from paddock_runner.files.gguf import scan_gguf
from paddock_runner.files.source import RemoteFile

from tests.checkpoint_bytes import (
    ARR,
    F32,
    F64,
    I8,
    I64,
    LLAMA,
    STR,
    U8,
    U64,
    auto,
    checkpoint,
    gguf,
    gguf_model,
    key,
    llama_shapes,
    safetensors,
    source,
    tensor,
)

ARCH = key("general.architecture", STR, "llama")


def test_metadata_values_have_their_types():
    keys = [key("a", U8, 200), key("b", I8, -3), key("c", U64, 1 << 63), key("d", I64, -(1 << 62)), key("e", F64, 0.1), key("f", F32, 0.5), key("g", STR, "naïve")]
    values = dict(scan_gguf(source(gguf(keys, []))).metadata)
    assert values == {"a": 200, "b": -3, "c": 1 << 63, "d": -(1 << 62), "e": 0.1, "f": 0.5, "g": "naïve"}


def test_arrays_are_sequences_decoded_on_demand():
    found = scan_gguf(source(gguf([key("s", ARR, ["a", b"\xff", ""], STR), key("n", ARR, [1.5, -2.0], F32)], []))).metadata
    strings, numbers = found["s"], found["n"]
    assert len(strings) == 3 and strings.is_strings and not numbers.is_strings
    assert list(strings) == ["a", "\ufffd", ""] and strings.raw() == [b"a", b"\xff", b""]
    assert list(numbers) == [1.5, -2.0] and numbers[1:] == [-2.0] and numbers.raw() == []
    assert repr(strings) == "Array of 3"


def test_shape_is_outermost_first():
    opened = checkpoint(gguf([ARCH], [tensor("a", (32, 3, 2), 0, 0)], 768))
    assert opened.tensors["a"].shape == (2, 3, 32) and opened.tensors["a"].n_bytes == 768


def test_alignment_of_the_file_is_honoured():
    data = gguf([key("general.alignment", 4, 256)], [tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 256)], 384, align=256)
    opened = checkpoint(data)
    assert [v.offset % 256 for v in opened.tensors.values()] == [0, 0] and opened.warnings == []


def test_read_gives_the_bytes_of_one_tensor(tmp_path):
    data = bytearray(gguf([ARCH], [tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 128)], 256))
    data[-128:] = bytes(range(128))
    (tmp_path / "m.gguf").write_bytes(data)
    opened = open_checkpoint(tmp_path / "m.gguf")
    assert bytes(opened.read(opened.tensors["b"])) == bytes(range(128))


def test_file_that_changes_while_open_is_refused_at_the_next_read(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([ARCH], [tensor("a", (32,), 0, 0)], 128))
    opened = open_checkpoint(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(FileError, match="was changed or removed while it was in use"):
        opened.read(opened.tensors["a"])
    path.unlink()
    with pytest.raises(FileError, match="was changed or removed"):
        opened.read(opened.tensors["a"])


@pytest.mark.parametrize("kind", ["fifo", "folder without models", "socket"])
def test_what_is_no_regular_file_is_refused(kind, tmp_path):
    path = tmp_path / "m.gguf"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o140600)
    else:
        path.mkdir()
        (path / "readme.txt").write_text("hello")
    with pytest.raises(FileError, match=r"not a regular file|config.json is missing"):
        open_checkpoint(path)


def test_folder_with_one_gguf_opens_it_and_with_two_is_ambiguous(tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf([ARCH], [tensor("a", (32,), 0, 0)], 128))
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]
    (tmp_path / "b.gguf").write_bytes(gguf([ARCH], [], 0))
    with pytest.raises(AmbiguousModel, match=r"2 GGUF models here: a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


def test_gguf_is_known_by_its_bytes_whatever_its_name(tmp_path):
    (tmp_path / "sha256-abc").write_bytes(gguf([ARCH], []))
    (tmp_path / "blob").write_bytes(safetensors({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, 1))
    assert open_checkpoint(tmp_path / "sha256-abc").kind == "gguf"
    assert open_checkpoint(tmp_path / "blob").kind == "safetensors"


class Server:
    """Range requests on bytes, counted."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size, self.asked = data, size, []

    def read(self, offset: int, n: int) -> bytes:
        self.asked.append((offset, n))
        return self.data[offset : offset + n] + bytes(min(n, self.size - offset) - len(self.data[offset : offset + n]))


@pytest.mark.parametrize("n_tokens, n_requests", [(10, 1), (300_000, 2), (800_000, 3)])
def test_remote_header_takes_at_most_three_requests(n_tokens, n_requests):
    head = gguf([ARCH, key("tokenizer.ggml.tokens", ARR, ["x" * 32] * n_tokens, STR)], [tensor("a", (1 << 28,), 0, 0)])
    server = Server(head, len(head) + (1 << 30))
    opened = open_remote("m.gguf", [("m.gguf", server.read, server.size)])
    assert len(server.asked) == n_requests and opened.tensors["a"].n_bytes == 1 << 30
    assert len(opened.metadata["tokenizer.ggml.tokens"]) == n_tokens
    with pytest.raises(UnsupportedError, match="only the header is here"):
        opened.read(opened.tensors["a"])


def test_remote_header_without_an_end_is_refused_after_three_requests():
    server = Server(gguf([ARCH, key("k", ARR, [0], U8)[:-9] + (1 << 30).to_bytes(8, "little")], []), 1 << 40)
    with pytest.raises(FileError, match="array of 1073741824 bytes"):
        open_remote("m.gguf", [("m.gguf", server.read, server.size)])
    big = Server(gguf([ARCH, *(key(f"k{i}", STR, "") [:-8] + (15 << 20).to_bytes(8, "little") + bytes(15 << 20) for i in range(4))], []), 1 << 40)
    with pytest.raises(FileError, match="header is longer than 41943040 bytes"):
        open_remote("m.gguf", [("m.gguf", big.read, big.size)])
    assert len(big.asked) == 3


def test_remote_file_of_unknown_size_is_read():
    data = gguf([ARCH], [tensor("a", (32,), 0, 0)], 128)
    opened = open_remote("m.gguf", [("m.gguf", lambda offset, n: data[offset : offset + n], None)])
    assert list(opened.tensors) == ["a"]


def test_server_that_sends_less_than_asked_is_named_with_both_numbers():
    with pytest.raises(FileError, match="sent 3 bytes at 0, not 100"):
        RemoteFile("m.gguf", lambda offset, n: b"GGU", 100)


def test_remote_shards_make_one_checkpoint():
    one = safetensors({"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}, 4)
    two = safetensors({"b": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}, 4)
    readers = [(n, lambda offset, k, d=d: d[offset : offset + k], len(d)) for n, d in (("1.safetensors", one), ("2.safetensors", two))]
    opened = open_remote("org/repo", readers, b'{"model_type": "llama"}')
    assert {n: v.format for n, v in opened.tensors.items()} == {"a": "f16", "b": "bf16"} and opened.config["model_type"] == "llama"


def test_vocabulary_oddities_are_warnings():
    odd = {**LLAMA, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.5], "tokenizer.ggml.bos_token_id": 7}
    warnings = checkpoint(gguf_model(odd, llama_shapes())).warnings
    assert warnings == [
        "tokenizer.ggml.scores has 1 entries, the vocabulary 2", "tokenizer.ggml.merges is missing",
        "tokenizer.ggml.bos_token_id is 7, the vocabulary has 2 tokens", "there is no chat template",
    ]  # fmt: skip


def test_chat_template_of_gguf_is_the_metadata_key_and_blank_ones_do_not_count():
    assert checkpoint(gguf([auto("tokenizer.chat_template", "{{ x }}")], [])).chat_template == "{{ x }}"
    assert checkpoint(gguf([auto("tokenizer.chat_template", "  ")], [])).chat_template is None


@pytest.mark.parametrize(
    "files, want",
    [
        ({"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "T"}}, "J"),
        ({"chat_template.json": {"chat_template": "C"}}, "C"),
        ({"tokenizer_config.json": {"chat_template": "T"}}, "T"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]}}, "D"),
        ({"tokenizer_config.json": {}}, None),
        ({}, None),
    ],
)
def test_chat_template_of_a_folder_is_found_where_it_lies(files, want, tmp_path):
    for name, content in {"config.json": {"model_type": "llama"}, **files}.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, 1))
    assert open_checkpoint(tmp_path).chat_template == want


@pytest.mark.models
def test_real_models_agree_with_gguf_py(models_dir):
    import gguf as oracle

    path = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    opened, reader = open_checkpoint(path), oracle.GGUFReader(path)
    assert len(opened.tensors) == len(reader.tensors) and opened.warnings == []
    for t in reader.tensors:
        view = opened.tensors[t.name]
        assert (view.offset, view.n_bytes, view.shape) == (t.data_offset, t.n_bytes, tuple(int(n) for n in reversed(t.shape)))
        assert view.format == t.tensor_type.name.lower()
    tokens = reader.fields["tokenizer.ggml.tokens"]
    assert opened.metadata["tokenizer.ggml.tokens"].raw()[:500] == [bytes(tokens.parts[i]) for i in tokens.data[:500]]
