"""Every format decodes bit for bit as gguf-py does, and the table agrees with packs/pack.h."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from paddock_runner.errors import FileError, UnsupportedError
from paddock_runner.formats.fp8 import E4M3, E5M2
from paddock_runner.formats.reference import dequantize
from paddock_runner.formats.table import (
    FORMATS,
    OTHER_GGML,
    by_ggml,
    by_id,
    by_name,
    by_safetensors,
    ggml_block,
    packed_bytes,
    unsupported,
)

GGUF_FORMATS = [f for f in FORMATS if f.is_weight and f.ggml is not None]
F16_FIELDS = {
    "q8_0": [0], "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q2_k": [80, 82], "q3_k": [108],
    "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208], "iq4_nl": [0], "iq4_xs": [0],
}


def random_blocks(name: str, n: int) -> np.ndarray:
    """Random bytes with finite f16 scales of both signs, from tiny (subnormal) to large."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    form = by_name(name)
    blocks = rng.integers(0, 256, (n, form.block_bytes), dtype=np.uint8)
    for at in F16_FIELDS.get(name, []):
        scales = (rng.standard_normal(n) * 10.0 ** rng.integers(-7, 3, n)).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(n, 2)
    if name in ("f16", "bf16", "f32"):
        wide = rng.standard_normal(n).astype(np.float32)
        blocks = {"f32": wide.view(np.uint8), "f16": wide.astype("<f2").view(np.uint8), "bf16": (wide.view(np.uint32) >> 16).astype("<u2").view(np.uint8)}[name].reshape(n, -1)
    if name == "mxfp4":
        blocks[:, 0] = rng.integers(0, 250, n)
    if name == "nvfp4":
        blocks[:, :4] &= 127
    return np.ascontiguousarray(blocks)


@pytest.mark.parametrize("form", GGUF_FORMATS, ids=lambda f: f.name)
def test_format_decodes_as_gguf_py_bit_for_bit(form):
    blocks = random_blocks(form.name, 512)
    ours = dequantize(form.name, blocks.reshape(-1), (8, 64 * form.block_elements))
    theirs = gguf.quants.dequantize(blocks.reshape(8, -1), gguf.GGMLQuantizationType(form.ggml)).reshape(ours.shape)
    assert ours.dtype == np.float32
    assert np.array_equal(ours.view(np.uint32) & 0x7FFFFFFF, theirs.view(np.uint32) & 0x7FFFFFFF)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("form", GGUF_FORMATS, ids=lambda f: f.name)
def test_sizes_agree_with_gguf_py(form):
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(form.ggml)] == (form.block_elements, form.block_bytes)


def test_unsupported_ggml_types_have_the_sizes_of_gguf_py_and_every_type_is_known():
    for kind in gguf.GGMLQuantizationType:
        name, elements, n_bytes = ggml_block(int(kind))
        assert name.removeprefix("unsupported:") == kind.name.lower()
        assert (elements, n_bytes) == gguf.GGML_QUANT_SIZES[kind]
        assert name.startswith("unsupported:") == (int(kind) in OTHER_GGML)
    assert ggml_block(156) is None and by_ggml(36) is None


def test_numbers_are_those_of_pack_h():
    header = (Path(__file__).parents[3] / "packs" / "pack.h").read_text()
    enum = re.search(r"typedef enum pk_format \{(.*?)\}", header, re.S).group(1)
    numbers = {name.lower(): int(value) for name, value in re.findall(r"PK_(\w+) = (\d+)", enum)}
    ours = {f.name: f.id for f in FORMATS}
    assert numbers.items() <= ours.items()
    assert all(numbers[f.name] == f.id for f in FORMATS if f.is_weight)


def test_fp8_codes_agree_with_their_definition():
    assert E4M3[0x7E] == 448 and E4M3[0x08] == 2.0**-6 and E4M3[0x01] == 2.0**-9 and np.isnan(E4M3[0x7F]) and E4M3[0xFE] == -448
    assert E5M2[0x7B] == 57344 and E5M2[0x01] == 2.0**-16 and np.isinf(E5M2[0x7C]) and np.isnan(E5M2[0x7D])
    halves = (np.arange(256).astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    assert np.array_equal(E5M2, halves, equal_nan=True)


def test_mxfp4_scale_codes_at_both_ends_stay_exact():
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = 0x71  # elements 0..15 are 0.5, 16..31 are 6
    got = dequantize("mxfp4", blocks.reshape(-1), (256, 32)).astype(np.float64)
    want = 2.0 ** (np.arange(256) - 127.0)
    assert np.array_equal(got[:, 0], want * 0.5)
    assert np.array_equal(got[:252, 31], (want * 6.0)[:252])


def test_lookup_by_name_id_and_dtype():
    assert by_name("q4_k").block_bytes == 144
    assert by_id(20).name == "mxfp4"
    assert by_safetensors("BF16").name == "bf16"
    assert by_safetensors("F8_E4M3FN") is None
    with pytest.raises(UnsupportedError, match="iq2_xxs is not supported; supported: f32, f16"):
        by_name("iq2_xxs")
    assert "tensor type 156 is not supported" in str(unsupported("unsupported:156"))


def test_row_that_is_not_a_multiple_of_the_block_is_refused_with_both_numbers():
    with pytest.raises(UnsupportedError, match="576 elements is not a multiple of q4_k's block of 256"):
        packed_bytes("q4_k", 16, 576)


def test_bytes_that_do_not_fit_the_shape_are_refused_with_both_numbers():
    with pytest.raises(FileError, match="takes 68 bytes, got 34"):
        dequantize("q8_0", bytes(34), (2, 32))
    with pytest.raises(UnsupportedError, match="i32 is not a weight format"):
        dequantize("i32", bytes(4), (1,))


def test_packed_rows_are_padded_to_sixteen():
    assert packed_bytes("q8_0", 17, 64) == 32 * 68


def test_scalar_and_empty_tensors_decode():
    assert dequantize("f32", np.float32(3).tobytes(), ()).item() == 3
    assert dequantize("f16", b"", (4, 0)).shape == (4, 0)
