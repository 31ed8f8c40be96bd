"""Codes and scales of safetensors checkpoints become one weight; scales that are wrong are refused by tensor name."""

from __future__ import annotations

import pytest
from paddock_runner.blueprint.quantised import join_scales, require_known_method, rows_of
from paddock_runner.errors import FileError, UnsupportedError

from tests.checkpoint_bytes import checkpoint, safetensors

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "F8_E8M0": 1, "I8": 1}


def opened(tensors, config=None):
    entries, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        n = BYTES[dtype]
        for d in shape:
            n *= d
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    return checkpoint(safetensors(entries, at), "m.safetensors", {"quantization_config": config or {"quant_method": "fp8"}})


def joined(tensors, config=None):
    found = opened(tensors, config)
    return join_scales(found.tensors, found)


@pytest.mark.parametrize("spelling", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize(
    "shape, kind", [((3, 2), "block"), ((260, 1), "row"), ((260,), "row"), ((1,), "tensor"), ((), "tensor"), ((1, 1), "tensor")]
)
def test_kind_of_fp8_scales_follows_from_their_shape(spelling, shape, kind):
    out = joined({"l.q.weight": ("F8_E4M3", (260, 256)), f"l.q.{spelling}": ("F32", shape), "l.q.input_scale": ("F32", ())})
    assert list(out) == ["l.q.weight"]
    assert out["l.q.weight"].scales.kind == kind and out["l.q.weight"].shape == (260, 256)


def test_blocks_may_have_another_size():
    config = {"quant_method": "fp8", "weight_block_size": [64, 128]}
    weight = joined({"q.weight": ("F8_E5M2", (130, 200)), "q.weight_scale_inv": ("BF16", (3, 2))}, config)["q.weight"]
    assert (weight.scales.kind, weight.scales.block, weight.format) == ("block", (64, 128), "fp8_e5m2")


def test_nvfp4_of_compressed_tensors_is_divided_and_that_of_modelopt_multiplied():
    scale = {"q.weight_scale": ("F8_E4M3", (8, 4))}
    a = joined({"q.weight_packed": ("U8", (8, 32)), **scale, "q.weight_global_scale": ("F32", (1,)), "q.input_global_scale": ("F32", (1,))})
    b = joined({"q.weight": ("U8", (8, 32)), **scale, "q.weight_scale_2": ("F32", ())})
    for out, divides in ((a, True), (b, False)):
        assert list(out) == ["q.weight"] and (out["q.weight"].format, out["q.weight"].shape) == ("nvfp4", (8, 64))
        assert out["q.weight"].scales.is_divisor == divides


def test_mxfp4_has_a_byte_per_32():
    for dtype in ("U8", "F8_E8M0"):
        weight = joined({"q.weight_packed": ("U8", (8, 32)), "q.weight_scale": (dtype, (8, 2))})["q.weight"]
        assert (weight.format, weight.shape, weight.scales.whole) == ("mxfp4", (8, 64), None)


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({"q.weight": ("F8_E4M3", (8, 64))}, "tensor q.weight is fp8_e4m3 and has no scales beside it; expected q.weight_scale_inv"),
        ({"q.weight": ("F8_E4M3", (260, 256)), "q.weight_scale": ("F32", (2, 2))}, r"tensor q.weight_scale has the shape \[2, 2\]; expected .* \[3, 2\]"),
        ({"q.weight": ("F8_E4M3", (8, 64)), "q.weight_scale": ("U8", (8, 1))}, "tensor q.weight_scale is u8"),
        ({"q.weight_packed": ("U8", (8, 32))}, "tensor q.weight_packed holds 4-bit codes and has no scales"),
        ({"q.weight_packed": ("U8", (8, 32)), "q.weight_scale": ("F8_E4M3", (8, 4))}, "tensor q.weight_packed is nvfp4 and has no scale for the whole"),
        ({"q.weight_packed": ("U8", (8, 32)), "q.weight_scale": ("U8", (8, 4))}, r"tensor q.weight_scale is u8 \[8, 4\]; expected one byte per 32"),
    ],
)  # fmt: skip
def test_missing_or_wrong_scales_are_refused_by_tensor_name(tensors, said):
    with pytest.raises(FileError, match=said):
        joined(tensors)


def test_rows_of_a_weight_take_their_scales_with_them():
    blocks = joined({"q.weight": ("F8_E4M3", (384, 256)), "q.weight_scale_inv": ("F32", (3, 2))})["q.weight"]
    part = rows_of(blocks, 128, 200)
    assert (part.shape, part.scales.view.shape, part.offset - blocks.offset) == ((200, 256), (2, 2), 128 * 256)
    assert part.scales.view.offset - blocks.scales.view.offset == 8
    with pytest.raises(UnsupportedError, match="row 100, within a block of 128"):
        rows_of(blocks, 100, 100)
    groups = joined({"q.weight_packed": ("U8", (8, 32)), "q.weight_scale": ("U8", (8, 2))})["q.weight"]
    assert rows_of(groups, 4, 4).scales.view.offset - groups.scales.view.offset == 8


@pytest.mark.parametrize(
    "config, said",
    [
        ({"quant_method": "aqlm"}, "quantization aqlm"),
        ({"quant_method": "auto-round", "bits": 4}, "quantization auto-round in a packing of its own"),
        ({"quant_method": "bitsandbytes"}, "quantization bitsandbytes"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 8}}}}, "compressed-tensors int8"),
    ],
)
def test_other_methods_are_refused_by_name(config, said):
    with pytest.raises(UnsupportedError, match=f"{said} of safetensors is not supported"):
        require_known_method(opened({"q.weight": ("U8", (8, 32))}, config))
