"""Every kind of odd, damaged or hostile safetensors file and folder gets its right answer, quickly and in little memory."""

from __future__ import annotations

import json
import random
import struct

import pytest
from paddock_runner.blueprint.names import tensors_by_name
from paddock_runner.blueprint.read import read_blueprint
from paddock_runner.errors import FileError, PaddockError, UnknownModel, UnsupportedError
from paddock_runner.files.checkpoint import open_checkpoint
from paddock_runner.files.safetensors import DTYPE_BITS, scan_safetensors

from tests.checkpoint_bytes import checkpoint, safetensors, source
from tests.hostile.test_gguf_cases import limited

ACCEPTED = {
    "00_ok": "", "05_meta_int": "no strings", "06_meta_nested": "no strings", "07_rank0": "", "08_zerodim": "", "16_trailing_space": "",
    "25_extra_field": "", "33_meta_only": "", "09_BF16": "", "09_C64": "", "09_F4": "", "09_F6_E2M3": "", "09_F8_E4M3": "",
    "09_F8_E4M3FNUZ": "", "09_F8_E5M2": "", "09_U16": "", "15_leading_space": "white space",
}  # fmt: skip
REFUSED = {
    "01_dupkey": (7, "tensor a is there twice"), "03_hole": (7, "hole of 32 bytes before tensor b"), "11_hdrlen_huge": (7, "4611686018427387904"),
    "12_hdrlen_100M1": (7, "100000001"), "14_empty": (7, "0 tensors"), "18_trunc": (7, "have 135 bytes, it has 81"), "19_extra": (7, "should have 135 bytes, it has 199"),
    "21_neg_shape": (7, "[-16]"), "22_float_shape": (7, "[16.0]"), "24_shape_mismatch": (7, "needs 60 bytes, data_offsets give 64"), "32_7bytes": (7, "has 7"),
    "27_name_empty": (7, "name ''"), "30_badutf8": (7, "not UTF-8"), "31_lfs": (7, "Git-LFS pointer for a file of 123 bytes"),
    "09_F8_E4M3FN": (12, "F8_E4M3FN"), "09_I4": (12, "I4"), "09_f32": (12, "f32"),
}  # fmt: skip


@pytest.fixture
def cases(shared_dir):
    return shared_dir / "cases" / "safetensors"


def test_every_stored_case_is_known_here(cases):
    assert {p.stem for p in cases.glob("*.safetensors")} == ACCEPTED.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", ACCEPTED)
def test_odd_but_legal_file_is_accepted(name, cases):
    opened = limited(lambda: open_checkpoint(cases / f"{name}.safetensors"))
    assert len(opened.warnings) == bool(ACCEPTED[name]) and ACCEPTED[name] in "".join(opened.warnings)
    for view in opened.tensors.values():
        assert len(opened.read(view)) == view.n_bytes


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_file_is_refused_with_its_number_and_name(name, cases):
    code, words = REFUSED[name]
    with pytest.raises(PaddockError) as caught:
        limited(lambda: open_checkpoint(cases / f"{name}.safetensors"))
    assert caught.value.exit_code == code
    assert words in str(caught.value) and f"{name}.safetensors" in str(caught.value)


def entry(dtype="F32", shape=(16,), offsets=(0, 64), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


DAMAGED = {
    "header length 0": (struct.pack("<Q", 0) + b"{}" + bytes(64), "0 bytes long"),
    "header that is no object": (safetensors(b"[]"), "expected '{'"),
    "header that ends early": (safetensors(b'{"a":{"dtype":"F32"'), "not valid JSON"),
    "header that goes on": (safetensors(b'{"__metadata__":{}}x'), "goes on after its end"),
    "NUL padding": (safetensors(b'{"__metadata__":{}}\0\0'), "goes on after its end"),
    "duplicate field": (safetensors(b'{"a":{"dtype":"F32","dtype":"F16","shape":[16],"data_offsets":[0,64]}}', 64), "the field dtype twice"),
    "duplicate metadata": (safetensors(b'{"__metadata__":{},"__metadata__":{}}'), "twice"),
    "overlap": (safetensors({"a": entry(), "b": entry(offsets=(32, 96))}, 96), "overlap of 32 bytes with tensor b"),
    "reversed offsets": (safetensors({"a": entry(offsets=(64, 0))}, 64), "two rising"),
    "three offsets": (safetensors({"a": entry(offsets=(0, 32, 64))}, 64), "data_offsets"),
    "no dtype": (safetensors({"a": {"shape": [16], "data_offsets": [0, 64]}}, 64), "dtype is missing"),
    "dtype of a number": (safetensors({"a": entry(dtype=4)}, 64), "dtype is 4"),
    "true as a dimension": (safetensors({"a": entry(shape=(True, 16))}, 64), "shape is [True, 16]"),
    "entry that is a list": (safetensors({"a": []}, 64), "no object"),
    "shape that overflows": (safetensors({"a": entry(shape=(1 << 62, 1 << 62))}, 64), "needs 85070591730234615865843651857942052864 bytes"),
    "dimension of 2^80": (safetensors({"a": entry(shape=(1 << 80,))}, 64), "shape is"),
    "odd number of 4-bit elements": (safetensors({"a": entry("F4", (63,), (0, 32))}, 32), "needs 31.5 bytes"),
    "NUL in a name": (safetensors({"a\0b": entry()}, 64), "without NUL"),
    "thousands of digits": (safetensors(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,64]}}', 64), "cannot be read"),
    "NaN": (safetensors(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,64]}}', 64), "shape is [nan]"),
    "GGUF under the name": (b"GGUF" + bytes(60), "this is a GGUF file"),
    "HTML": (b"<!DOCTYPE html><html><body>sign in</body></html>", "HTML"),
    "pickle": (b"PK\x03\x04" + bytes(64), "zip"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_made_file_is_refused_with_its_number(name):
    data, words = DAMAGED[name]
    with pytest.raises(FileError) as caught:
        limited(lambda: scan_safetensors(source(data, "m.safetensors")))
    assert words in str(caught.value)


@pytest.mark.parametrize("inside", ['{"a":' + "[" * 100_000, '{"a":' + '{"b":' * 100_000, "{" * 100_000])
def test_deep_nesting_is_refused_at_once(inside):
    with pytest.raises(FileError, match=r"nested too deeply|not valid JSON"):
        limited(lambda: scan_safetensors(source(safetensors(inside.encode()), "m.safetensors")))


def test_legitimate_header_over_the_limit_is_unsupported_and_says_why():
    from paddock_runner.files.source import RemoteFile

    big = RemoteFile("m.safetensors", lambda offset, n: (struct.pack("<Q", 132 << 20) + b'{"a":')[offset : offset + n].ljust(n), 1 << 40)
    with pytest.raises(UnsupportedError, match="header is 138412032 bytes long, the limit is 67108864"):
        scan_safetensors(big)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_of_the_format_is_sized(dtype):
    n_bytes = 64 * DTYPE_BITS[dtype] // 8
    header = scan_safetensors(source(safetensors({"a": entry(dtype, (64,), (0, n_bytes))}, n_bytes), "m.safetensors"))
    assert header.tensors["a"].n_bytes == n_bytes


def test_name_that_looks_like_a_path_is_only_a_name():
    assert list(scan_safetensors(source(safetensors({"../../x": entry()}, 64), "m.safetensors")).tensors) == ["../../x"]


LLAMA_CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 40, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (40, 64), "model.norm.weight": (64,), "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_proj.weight": (64, 64), "model.layers.0.self_attn.k_proj.weight": (32, 64), "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.self_attn.o_proj.weight": (64, 64), "model.layers.0.post_attention_layernorm.weight": (64,), "model.layers.0.mlp.gate_proj.weight": (96, 64),
    "model.layers.0.mlp.up_proj.weight": (96, 64), "model.layers.0.mlp.down_proj.weight": (64, 96),
}  # fmt: skip


def shard(names):
    """A bf16 shard of these tensors."""
    entries, at = {}, 0
    for name in names:
        n = 2
        for d in SHAPES[name]:
            n *= d
        entries[name] = entry("BF16", SHAPES[name], (at, at + n))
        at += n
    return safetensors(entries, at)


NAMES = list(SHAPES)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = {"weight_map": {**dict.fromkeys(NAMES[:6], FIRST), **dict.fromkeys(NAMES[6:], SECOND)}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / FIRST).write_bytes(shard(NAMES[:6]))
    (tmp_path / SECOND).write_bytes(shard(NAMES[6:]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    return tmp_path


def test_sharded_folder_opens_as_one_model(folder):
    opened = open_checkpoint(folder)
    assert opened.warnings == [] and opened.kind == "safetensors"
    assert len(tensors_by_name(opened, read_blueprint(opened))) == len(SHAPES)


@pytest.mark.parametrize("name", ["../up.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\0.safetensors", "c:\\m.safetensors", 7, "model.bin"])
def test_shard_name_that_leads_elsewhere_is_refused(name, folder):
    index = {"weight_map": {**INDEX["weight_map"], NAMES[0]: name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match="the index names the shard"):
        open_checkpoint(folder)


def test_missing_shard_is_named(folder):
    (folder / SECOND).unlink()
    with pytest.raises(FileError, match=f"1 of 2 shards are missing: {SECOND}"):
        open_checkpoint(folder)


def test_tensor_that_the_shard_lacks_is_named(folder):
    (folder / SECOND).write_bytes(shard(NAMES[7:]))
    with pytest.raises(FileError, match=f"1 tensors are not in the shard that the index names, among them {NAMES[6]}"):
        open_checkpoint(folder)


def test_tensor_that_the_index_lacks_is_used_and_reported(folder):
    index = {"weight_map": {k: v for k, v in INDEX["weight_map"].items() if k != NAMES[3]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = open_checkpoint(folder)
    assert "not in the index, among them " + NAMES[3] in opened.warnings[0]
    assert NAMES[3] in opened.tensors


def test_tensor_in_two_shards_is_refused(folder):
    (folder / SECOND).write_bytes(shard(NAMES[5:]))
    with pytest.raises(FileError, match=f"tensor {NAMES[5]} is also in {FIRST}"):
        open_checkpoint(folder)


def test_stale_index_yields_to_the_single_file_that_is_there(folder):
    (folder / FIRST).unlink()
    (folder / SECOND).unlink()
    (folder / "model.safetensors").write_bytes(shard(NAMES))
    opened = open_checkpoint(folder)
    assert len(opened.tensors) == len(SHAPES) and "model.safetensors is used instead" in opened.warnings[0]


def test_numbered_set_without_an_index_is_complete_or_refused(folder):
    (folder / "model.safetensors.index.json").unlink()
    assert len(open_checkpoint(folder).tensors) == len(SHAPES)
    (folder / SECOND).unlink()
    with pytest.raises(FileError, match="model has 1 of 2 shards"):
        open_checkpoint(folder)


def test_stray_files_are_listed_and_not_loaded(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"not even a header")
    (folder / "consolidated.safetensors").write_bytes(b"")
    opened = open_checkpoint(folder)
    assert opened.warnings == ["not part of the model, not loaded: adapter_model.safetensors, consolidated.safetensors"]


@pytest.mark.parametrize(
    "config, words",
    [("{", "not valid JSON"), ("[]", "expected a JSON object"), ("[" * 100_000, "nested too deeply"), ("\ufffd", "not valid JSON"), ("", "not valid JSON")],
)
def test_damaged_config_is_named(config, words, folder):
    (folder / "config.json").write_text(config)
    with pytest.raises(FileError, match=words) as caught:
        open_checkpoint(folder)
    assert "config.json" in str(caught.value)


def test_folder_without_a_config_is_refused_by_what_is_missing(folder, tmp_path_factory):
    (folder / "config.json").unlink()
    with pytest.raises(FileError, match=r"config.json is missing"):
        open_checkpoint(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="an adapter"):
        open_checkpoint(folder)
    with pytest.raises(UnknownModel, match="the folder is empty"):
        open_checkpoint(tmp_path_factory.mktemp("nothing"))
    with pytest.raises(UnknownModel, match="No such file"):
        open_checkpoint(folder / "absent.gguf")


def test_bare_file_without_a_config_cannot_run_and_says_what_to_name(cases):
    with pytest.raises(FileError, match=r"no config.json beside it"):
        read_blueprint(open_checkpoint(cases / "00_ok.safetensors"))


def test_quantised_folder_is_unsupported_by_its_method(folder):
    (folder / "config.json").write_text(json.dumps({**LLAMA_CONFIG, "quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UnsupportedError, match="quantization awq"):
        read_blueprint(open_checkpoint(folder))


def allowed(action) -> None:
    """May fail, but only with an error of ours that is a file's fault."""
    try:
        action()
    except (FileError, UnsupportedError):
        pass


def test_file_cut_at_every_byte_ends_in_a_typed_error(cases):
    for data in [*(p.read_bytes() for p in sorted(cases.glob("*.safetensors"))), shard(NAMES)[:4096]]:
        for n in range(1, min(len(data), 4096)):
            allowed(lambda cut=data[:n]: scan_safetensors(source(cut, "m.safetensors")))


def test_changed_bytes_end_in_a_typed_error(cases):
    rng = random.Random(11)
    for data in [*(p.read_bytes() for p in sorted(cases.glob("*.safetensors")) if p.stat().st_size), *[shard(NAMES)] * 4]:
        for _ in range(300):
            changed = bytearray(data)
            changed[rng.randrange(min(len(data), 1500))] = rng.choice((0, 32, 34, 44, 45, 46, 48, 57, 58, 91, 93, 123, 125, 255, rng.randrange(256)))
            allowed(lambda c=bytes(changed): scan_safetensors(source(c, "m.safetensors")))


def test_changed_configs_end_in_a_typed_error():
    rng = random.Random(13)
    odd = [None, -1, 0, 1, 3, 1 << 70, 1e400, float("nan"), 0.5, "x", "", [], [1], {}, True, {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 0}, {"type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4}]
    keys = [*LLAMA_CONFIG, "rope_scaling", "rope_theta", "rope_parameters", "head_dim", "sliding_window", "layer_types", "text_config", "hidden_act", "hidden_activation", "sliding_window_pattern", "query_pre_attn_scalar", "use_sliding_window", "partial_rotary_factor", "max_window_layers", "rope_local_base_freq"]
    data = shard(NAMES)
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3"):
        for _ in range(400):
            config = {**LLAMA_CONFIG, "model_type": family}
            for _ in range(rng.choice((1, 2))):
                config[rng.choice(keys)] = rng.choice(odd)
            opened = checkpoint(data, "m.safetensors", config)
            allowed(lambda opened=opened: tensors_by_name(opened, read_blueprint(opened)))
