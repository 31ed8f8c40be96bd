"""Every kind of odd, damaged or hostile GGUF file gets its right answer, quickly and in little memory."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc

import pytest
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.errors import FileError, PaddockError, UnsupportedError
from paddock_runner.files.checkpoint import open_checkpoint, require_runnable
from paddock_runner.files.gguf import Array, scan_gguf

from tests.checkpoint_bytes import (
    ARR,
    BOOL,
    F32,
    I32,
    LLAMA,
    STR,
    U8,
    U16,
    U32,
    auto,
    checkpoint,
    gguf,
    gguf_model,
    key,
    llama_shapes,
    source,
    tensor,
)

ARCH = key("general.architecture", STR, "llama")
ACCEPTED = {
    "00_ok": [], "10_ndims0": [], "11_dim0": [], "29_badutf8": [], "34_noarch": [], "36_no_tensors_ok": [], "39_arr_mixed_zero": [],
    "28_longname": [], "14_type156": [], "37_type42": [], "18_off_hole": ["unused bytes before tensor b"], "31_bool_2": ["boolean with the value 2"],
}  # fmt: skip
REFUSED = {
    "01_arrlen_2p63": (7, "9223372036854775808"), "03_strlen_2p63": (7, "9223372036854775808"), "04_kvcount_2p63": (7, "9223372036854775808"),
    "06_nested5000": (7, "array of arrays"), "07_dupkey": (7, "metadata key k is there twice"), "09_ndims5": (7, "5 dimensions"),
    "12_align_0": (7, "general.alignment is 0"), "12_align_3": (7, "general.alignment is 3"), "12_align_4294967295": (7, "4294967295"),
    "13_align_str": (7, "general.alignment"), "16_row_notblock": (7, "q6_k has rows of 8 elements"), "17_beyond_eof": (7, "needs 4194304 bytes, the file has 4224"),
    "20_dims_overflow": (7, "4835703278458516698824704"), "21_lfs": (7, "Git-LFS pointer for a file of 123 bytes"), "22_html": (7, "HTML"),
    "23_v1": (12, "version 1"), "25_empty": (7, "empty"), "26_trunc8": (7, "truncated"), "32_bigendian": (12, "big-endian"), "33_lowermagic": (7, "b'gguf"),
}  # fmt: skip
CANNOT_RUN = {
    "14_type156": "tensor a: tensor type 156 is not supported", "37_type42": "tensor type 42 is not supported", "36_no_tensors_ok": "without tensors",
    "28_longname": "100 bytes, the limit is 63", "34_noarch": "unknown architecture",
}  # fmt: skip


def limited(action):
    """Runs it, within a second and 64 MiB."""
    tracemalloc.start()
    began = time.perf_counter()
    try:
        return action()
    finally:
        taken, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert taken < 1 and peak < 64 << 20, f"{taken:.2f} s, {peak} bytes"


@pytest.fixture
def cases(shared_dir):
    return shared_dir / "cases" / "gguf"


def test_every_stored_case_is_known_here(cases):
    assert {p.stem for p in cases.glob("*.gguf")} == ACCEPTED.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", ACCEPTED)
def test_odd_but_legal_file_is_accepted(name, cases):
    opened = limited(lambda: open_checkpoint(cases / f"{name}.gguf"))
    assert len(opened.warnings) == len(ACCEPTED[name])
    for got, want in zip(opened.warnings, ACCEPTED[name], strict=True):
        assert want in got
    for value in opened.metadata.values():
        list(value) if isinstance(value, Array) else str(value)


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_file_is_refused_with_its_number_and_name(name, cases):
    code, words = REFUSED[name]
    with pytest.raises(PaddockError) as caught:
        limited(lambda: open_checkpoint(cases / f"{name}.gguf"))
    assert caught.value.exit_code == code
    assert words in str(caught.value) and f"{name}.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CANNOT_RUN)
def test_file_that_can_be_listed_but_not_run_is_unsupported(name, cases):
    opened = open_checkpoint(cases / f"{name}.gguf")
    with pytest.raises(UnsupportedError) as caught:
        read_blueprint(opened)
    assert CANNOT_RUN[name] in str(caught.value)


def huge(count: int, kind: int, element: int = U8) -> bytes:
    """A header whose one array claims `count` elements."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"\1\0\0\0\0\0\0\0k" + struct.pack("<IIQ", kind, element, count)


DAMAGED = {
    "u32 array of 2^62": (huge(1 << 62, ARR, U32), "18446744073709551616 bytes"),
    "string array of 2^61": (huge(1 << 61, ARR, STR), "claims 2305843009213693952 strings"),
    "array of 2^63 strings of which two are there": (huge(1 << 63, ARR, STR) + bytes(16), "claims 9223372036854775808 strings"),
    "string in an array that leads out of the file": (gguf([key("k", ARR, ["a"], STR)[:-9] + struct.pack("<Q", 1 << 63)], []), "string 0 of metadata key k"),
    "tensor count of 2^60": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims 1152921504606846976 tensors"),
    "tensor count just over what the file can hold": (gguf([ARCH], [])[:8] + struct.pack("<Q", 9) + gguf([ARCH], [])[16:], "tensor 0 has no name"),
    "nested array": (huge(1, ARR, ARR), "array of arrays"),
    "array of an unknown type": (huge(1, ARR, 77), "unknown type 77"),
    "unknown value type": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"\1\0\0\0\0\0\0\0k" + struct.pack("<I", 77), "unknown value type 77"),
    "duplicate tensor": (gguf([ARCH], [tensor("a", (32,), 0, 0), tensor("a", (32,), 0, 128)], 256), "tensor a is there twice"),
    "empty key": (gguf([key("", U32, 1)], []), "has no name"),
    "NUL in a key": (gguf([key("a\0b", U32, 1)], []), "NUL"),
    "NUL in a tensor name": (gguf([ARCH], [tensor("a\0b", (32,), 0, 0)], 128), "NUL"),
    "tensor without a name": (gguf([ARCH], [tensor("", (32,), 0, 0)], 128), "tensor 0 has no name"),
    "key that is no UTF-8": (gguf([key(b"\xff\xfe", U32, 1)], []), "not UTF-8"),
    "2^32-1 dimensions": (gguf([ARCH], [b"\1\0\0\0\0\0\0\0a" + struct.pack("<I", 0xFFFFFFFF) + bytes(64)], 0), "4294967295 dimensions"),
    "dimension of 2^42+1": (gguf([ARCH], [tensor("a", ((1 << 42) + 1, 1 << 40), 0, 0)], 128), "needs 19342813113838"),
    "dimension of 2^64-1": (gguf([ARCH], [tensor("a", ((1 << 64) - 1,), 0, 0)], 128), "73786976294838206460 bytes"),
    "alignment of 2^30": (gguf([key("general.alignment", U32, 1 << 30)], []), "1073741824"),
    "alignment as i32": (gguf([key("general.alignment", I32, 32)], []), "value type 5"),
    "unaligned offset": (gguf([ARCH], [tensor("a", (32,), 0, 5)], 256), "offset 5, not a multiple of the alignment 32"),
    "overlapping tensors": (gguf([ARCH], [tensor("a", (64,), 0, 0), tensor("b", (32,), 0, 128)], 512), "overlaps"),
    "tensors at the same place": (gguf([ARCH], [tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 0)], 512), "overlaps"),
    "tensor data cut off": (gguf([ARCH], [tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 128)], 200), "truncated: tensor b"),
    "offset of 2^63": (gguf([ARCH], [tensor("a", (32,), 0, 1 << 63)], 200), "truncated: tensor a"),
    "unknown type beyond the end": (gguf([ARCH], [tensor("a", (32,), 156, 4096)], 200), "truncated: tensor a"),
    "q4_k rows of 100": (gguf([ARCH], [tensor("a", (100, 4), 12, 0)], 4096), "q4_k has rows of 100 elements, not a multiple of the block of 256"),
    "iq2_xxs rows of 100": (gguf([ARCH], [tensor("a", (100, 4), 16, 0)], 4096), "iq2_xxs has rows of 100"),
    "two files joined": (gguf([ARCH], [tensor("a", (32,), 0, 0)], 128) + gguf([ARCH], []), "joined end to end"),
    "JSON error page": (b'{"error": "Repository not found"}', "JSON text"),
    "gzip": (b"\x1f\x8b\x08" + bytes(40), "gzip"),
    "zip": (b"PK\x03\x04" + bytes(40), "zip"),
    "pickle": (b"\x80\x02}q\0" + bytes(40), "pickle"),
    "zeros of an unfinished download": (bytes(4096), "unfinished download"),
    "GGML from before GGUF": (b"tjgg" + bytes(40), "before GGUF"),
    "three bytes": (b"GGU", "b'GGU'"),
    "magic alone": (b"GGUF", "truncated"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_made_file_is_refused_with_its_number(name):
    data, words = DAMAGED[name]
    with pytest.raises(FileError) as caught:
        limited(lambda: scan_gguf(source(data)))
    assert words in str(caught.value)


@pytest.mark.parametrize("version, words", [(0, "version 0"), (1, "version 1"), (4, "version 4"), (0x03000000, "big-endian"), (0x02000000, "big-endian")])
def test_other_versions_are_unsupported(version, words):
    with pytest.raises(UnsupportedError, match=words):
        scan_gguf(source(gguf([ARCH], [], version=version)))


def test_version_two_is_read():
    assert scan_gguf(source(gguf([ARCH], [], version=2))).version == 2


def test_string_over_the_budget_is_refused_without_being_read():
    with pytest.raises(FileError, match="17825792 bytes, the limit is 16777216"):
        limited(lambda: scan_gguf(sparse(huge(0, STR)[:-12] + struct.pack("<Q", 17 << 20), 1 << 30)))


def test_millions_of_empty_strings_are_refused_at_once():
    with pytest.raises(FileError, match="over 2000000 strings"):
        limited(lambda: scan_gguf(sparse(huge(30_000_000, ARR, STR), 1 << 30)))


def test_numeric_array_over_the_budget_is_refused():
    with pytest.raises(FileError, match="array of 80000000 bytes"):
        limited(lambda: scan_gguf(sparse(huge(20_000_000, ARR, F32), 1 << 30)))


def sparse(head: bytes, size: int):
    """A source that claims `size` bytes: the head, then zeros."""
    from paddock_runner.files.source import RemoteFile

    return RemoteFile("sparse.gguf", lambda offset, n: (head + bytes(4096))[offset : offset + n].ljust(n, b"\0"), size)


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"general.architecture": "clip", "general.type": "mmproj"}, "a projector"),
        ({"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}, "an adapter"),
        ({"general.type": "imatrix"}, "an importance matrix"),
    ],
)
def test_companion_file_is_named_when_it_is_run_as_a_model(keys, words):
    opened = checkpoint(gguf([auto(k, v) for k, v in keys.items()], [tensor("a", (32,), 0, 0)], 128))
    with pytest.raises(UnsupportedError, match=f"this is {words}"):
        read_blueprint(opened)


def test_vocabulary_without_weights_is_named():
    opened = checkpoint(gguf([ARCH, key("tokenizer.ggml.tokens", ARR, ["a"], STR)], []))
    with pytest.raises(UnsupportedError, match="a vocabulary without weights"):
        read_blueprint(opened)


def test_unknown_type_takes_its_size_from_the_next_offset():
    opened = checkpoint(gguf([ARCH], [tensor("b", (32,), 0, 256), tensor("a", (100,), 156, 0)], 384))
    assert opened.tensors["a"].n_bytes == 256 and opened.tensors["a"].format == "unsupported:156"
    assert [v.name for v in opened.unsupported_tensors()] == ["a"]


def test_supported_and_unsupported_types_are_told_apart_by_name():
    opened = checkpoint(gguf([ARCH], [tensor("a", (256,), 16, 0)], 4096))
    assert opened.tensors["a"].format == "unsupported:iq2_xxs"
    with pytest.raises(UnsupportedError, match="tensor a: iq2_xxs is not supported; supported: f32"):
        require_runnable(opened)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"llama.block_count": 100_000}, "llama.block_count is 100000, expected 1 to 1024"),
        ({"llama.block_count": None}, "metadata key llama.block_count is missing"),
        ({"llama.attention.head_count_kv": [2, 2, 2]}, "head_count_kv has 3 entries, expected 2"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "4 heads and 3 key-value heads"),
        ({"llama.embedding_length": "wide"}, "llama.embedding_length is 'wide', expected a whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "expected a finite number"),
        ({"llama.attention.layer_norm_rms_epsilon": 7.0}, "epsilon is 7.0"),
        ({"llama.rope.freq_base": -1.0}, "rope.freq_base is -1.0, expected more than 1"),
        ({"llama.rope.dimension_count": 33}, "rope turns 33 of 16 dimensions"),
        ({"llama.context_length": 0}, "llama.context_length is 0"),
        ({"llama.feed_forward_length": [96, 0]}, "layer 1 has a feed-forward width of 0"),
    ],
)
def test_impossible_metadata_is_refused_by_key(change, words):
    keys = {k: v for k, v in {**LLAMA, **change}.items() if v is not None}
    with pytest.raises(FileError) as caught:
        read_blueprint(checkpoint(gguf_model(keys, llama_shapes())))
    assert words in str(caught.value)


def test_layer_without_attention_is_unsupported():
    with pytest.raises(UnsupportedError, match="layer 1 has no key-value heads"):
        read_blueprint(checkpoint(gguf_model({**LLAMA, "llama.attention.head_count_kv": [2, 0]}, llama_shapes())))


def test_scalars_may_be_arrays_and_arrays_scalars():
    keys = {**LLAMA, "llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [96, 96], "llama.block_count": [2], "llama.embedding_length": [64]}
    assert read_blueprint(checkpoint(gguf_model(keys, llama_shapes()))).n_layers == 2


def shard(no: int, count: int, names: list[str], total: int = 3, more: dict | None = None) -> bytes:
    """One file of a split set."""
    keys = [key("split.no", U16, no), key("split.count", U16, count), key("split.tensors.count", I32, total)]
    keys += [auto(k, v) for k, v in (more or {}).items()]
    return gguf(keys, [tensor(n, (32,), 0, 128 * i) for i, n in enumerate(names)], 128 * len(names))


SHARDS = {"m-00001-of-00003.gguf": shard(0, 3, [], more={"general.architecture": "llama"}), "m-00002-of-00003.gguf": shard(1, 3, ["a", "b"]), "m-00003-of-00003.gguf": shard(2, 3, ["c"])}


def put(folder, files):
    for name, data in files.items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("start", SHARDS)
def test_split_set_opens_from_any_shard(start, tmp_path):
    put(tmp_path, SHARDS)
    opened = open_checkpoint(tmp_path / start)
    assert list(opened.tensors) == ["a", "b", "c"]
    assert opened.metadata["general.architecture"] == "llama"
    assert opened.tensors["c"].path.name == "m-00003-of-00003.gguf"


def test_renamed_shards_are_found_by_what_they_say(tmp_path):
    put(tmp_path, dict(zip(["first.gguf", "x.gguf", "last.gguf"], SHARDS.values(), strict=True)))
    put(tmp_path, {"other.gguf": gguf([ARCH], [tensor("z", (32,), 0, 0)], 128), "broken.gguf": b"GGUF"})
    assert list(open_checkpoint(tmp_path / "x.gguf").tensors) == ["a", "b", "c"]


def test_missing_shard_is_named(tmp_path):
    put(tmp_path, {n: d for n, d in SHARDS.items() if "00002" not in n})
    with pytest.raises(FileError, match="of 3 shards, these are missing: 2"):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


def test_file_repeated_as_a_shard_is_refused(tmp_path):
    small = gguf([key("split.no", U16, 0), key("split.count", U16, 3)], [])
    put(tmp_path, dict.fromkeys(SHARDS, small))
    with pytest.raises(FileError, match="shard 1 of 3 is there twice"):
        open_checkpoint(tmp_path / "m-00002-of-00003.gguf")


def test_tiny_hostile_file_as_every_shard_is_refused_at_once(tmp_path):
    hostile = huge(1 << 63, ARR)
    assert len(hostile) < 50
    put(tmp_path, dict.fromkeys(SHARDS, hostile))
    with pytest.raises(FileError, match="9223372036854775808"):
        limited(lambda: open_checkpoint(tmp_path / "m-00001-of-00003.gguf"))


def test_tensor_in_two_shards_is_refused(tmp_path):
    put(tmp_path, {**SHARDS, "m-00003-of-00003.gguf": shard(2, 3, ["a"])})
    with pytest.raises(FileError, match=r"tensor a is also in m-00002-of-00003\.gguf"):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


def test_wrong_total_of_tensors_is_refused(tmp_path):
    put(tmp_path, {**SHARDS, "m-00001-of-00003.gguf": shard(0, 3, [], total=5)})
    with pytest.raises(FileError, match=r"split.tensors.count is 5, the shards hold 3"):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


def whole(data: bytes) -> None:
    """Everything that reading may touch: header, values, blueprint."""
    opened = checkpoint(data)
    for value in opened.metadata.values():
        list(value) if isinstance(value, Array) else str(value)
    opened.chat_template  # noqa: B018
    read_blueprint(opened)


def allowed(data: bytes) -> None:
    """Reading may fail, but only with an error of ours that is a file's fault."""
    try:
        whole(data)
    except (FileError, UnsupportedError):
        pass


def test_file_cut_at_every_byte_ends_in_a_typed_error(cases):
    model = gguf_model({**LLAMA, "tokenizer.ggml.tokens": ["a", "b"]}, llama_shapes())
    for data in [*(p.read_bytes() for p in sorted(cases.glob("*.gguf"))), model]:
        for n in range(1, min(len(data), 4096)):
            allowed(data[:n])


def test_changed_bytes_end_in_a_typed_error(cases):
    rng = random.Random(7)
    model = gguf_model({**LLAMA, "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.0, 1.0]}, llama_shapes())
    for data in [*(p.read_bytes() for p in sorted(cases.glob("*.gguf")) if p.stat().st_size), *[model] * 8]:
        n = len(data.rstrip(b"\0")) + 16
        for _ in range(250):
            changed = bytearray(data)
            for _ in range(rng.choice((1, 1, 1, 4))):
                changed[rng.randrange(min(n, len(data)))] = rng.choice((0, 1, 2, 4, 8, 9, 12, 127, 128, 255, rng.randrange(256)))
            allowed(bytes(changed))


def test_big_vocabulary_opens_in_a_third_of_a_second_and_64_mib(tmp_path):
    tokens = [f"token{i}" for i in range(250_000)]
    head = [ARCH, key("tokenizer.ggml.model", STR, "gpt2"), key("tokenizer.ggml.tokens", ARR, tokens, STR), key("tokenizer.ggml.merges", ARR, [f"{t} x" for t in tokens], STR)]
    (tmp_path / "big.gguf").write_bytes(gguf(head, [tensor(f"blk.{i}.attn_q.weight", (32,), 0, 128 * i) for i in range(1000)], 128_000))
    script = (
        "import re, sys, time\n"
        "from paddock_runner.files.checkpoint import open_checkpoint\n"
        "times = []\n"
        "for _ in range(3):\n"
        "    t = time.process_time(); c = open_checkpoint(sys.argv[1]); times.append(time.process_time() - t)\n"
        "print(min(times), re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], len(c.tensors), len(c.metadata['tokenizer.ggml.tokens']))"
    )
    out = subprocess.run([sys.executable, "-c", script, tmp_path / "big.gguf"], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    seconds, kib, n_tensors, n_tokens = out.stdout.split()
    assert (n_tensors, n_tokens) == ("1000", "250000")
    assert float(seconds) < 0.3 and int(kib) < 64 << 10
    opened = open_checkpoint(tmp_path / "big.gguf")
    assert opened.metadata["tokenizer.ggml.tokens"][249_999] == "token249999"


def test_bad_utf8_is_shown_with_replacement_characters(cases):
    opened = open_checkpoint(cases / "29_badutf8.gguf")
    assert any("\ufffd" in v for v in opened.metadata.values() if isinstance(v, str))


def test_true_is_any_byte_but_zero():
    opened = checkpoint(gguf([key("a", BOOL, 2), key("b", BOOL, 0), key("c", ARR, [0, 3], BOOL)], []))
    assert [opened.metadata["a"], opened.metadata["b"], list(opened.metadata["c"])] == [True, False, [False, True]]
