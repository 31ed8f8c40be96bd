"""Symmetric int4 of GPTQ and compressed-tensors becomes q4_0, value for value; what would not be exact is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from paddock_runner.blueprint.quantised import join_scales, require_known_method
from paddock_runner.errors import FileError, UnsupportedError
from paddock_runner.formats.reference import dequantize
from paddock_runner.model.int4 import blocks, require_in_order, require_symmetric

from tests.checkpoint_bytes import checkpoint, safetensors

N, K, GROUP = 16, 128, 64
BYTES = {"I32": 4, "F16": 2, "BF16": 2, "I64": 8}


def joined(tensors):
    entries, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        n = BYTES[dtype] * int(np.prod(shape))
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    opened = checkpoint(safetensors(entries, at), "m.safetensors", {})
    return join_scales(opened.tensors, opened)


def words(codes):
    """[..., 8 n] codes -> [..., n] words, the first code lowest."""
    return (codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)


GPTQ = {"q.qweight": ("I32", (K // 8, N)), "q.scales": ("F16", (K // GROUP, N)), "q.qzeros": ("I32", (K // GROUP, N // 8)), "q.g_idx": ("I32", (K,))}
PACKED = {"q.weight_packed": ("I32", (N, K // 8)), "q.weight_scale": ("BF16", (N, K // GROUP)), "q.weight_shape": ("I64", (2,))}


@pytest.mark.parametrize("tensors", [GPTQ, PACKED], ids=["gptq", "compressed-tensors"])
def test_codes_and_scales_become_the_same_values_in_q4_0(tensors):
    out = joined(tensors)
    view = out["q.weight"]
    assert list(out) == ["q.weight"] and (view.format, view.shape, view.weight_bytes) == ("q4_0", (N, K), N * K // 32 * 18)
    rng = np.random.default_rng(3)
    codes, scales = rng.integers(0, 16, (N, K)), (rng.random((N, K // GROUP)) * 0.1).astype(np.float16).astype(np.float32)
    if view.int4.is_by_columns:
        raw = blocks(view, words(codes.T.reshape(K // 8, 8, N).swapaxes(1, 2).reshape(K // 8, N * 8)).view(np.uint8).reshape(-1), scales.T.copy())
    else:
        raw = blocks(view, words(codes).view(np.uint8).reshape(-1), scales)
    np.testing.assert_array_equal(dequantize("q4_0", raw, (N, K)), (codes - 8.0).astype(np.float32) * np.repeat(scales, GROUP, 1))


def test_scale_that_is_no_f16_number_is_refused():
    view = joined(PACKED)["q.weight"]
    with pytest.raises(UnsupportedError, match=r"tensor q.weight_scale holds 9.99\d*e-10, which is no f16 number"):
        blocks(view, np.zeros(N * K // 2, np.uint8), np.full((N, K // GROUP), 1e-9, np.float32))


def test_other_zero_points_and_other_orders_are_refused():
    view = joined(GPTQ)["q.weight"]
    eights, order = np.full(4, 0x77777777, np.uint32).view(np.uint8), (np.arange(K, dtype=np.int32) // GROUP)
    require_symmetric(view, eights)
    require_in_order(view, order.view(np.uint8))
    with pytest.raises(UnsupportedError, match=r"q.qzeros holds zero points other than 8"):
        require_symmetric(view, np.array([0x77777877], np.uint32).view(np.uint8))
    with pytest.raises(UnsupportedError, match="in the order of activations"):
        require_in_order(view, order[::-1].copy().view(np.uint8))
    with pytest.raises(FileError, match="64 group numbers for 128 columns"):
        require_in_order(view, order[:64].copy().view(np.uint8))


def test_missing_or_wrong_scales_are_refused_by_tensor_name():
    with pytest.raises(FileError, match=r"tensor q.qweight holds 4-bit codes and has no scales"):
        joined({"q.qweight": GPTQ["q.qweight"]})
    with pytest.raises(FileError, match=r"tensor q.scales is f16 \[3, 16\]; expected one number per"):
        joined({**GPTQ, "q.scales": ("F16", (3, N))})


@pytest.mark.parametrize(
    "config, said",
    [
        ({"quant_method": "gptq", "bits": 8}, "gptq int8"),
        ({"quant_method": "gptq", "bits": 4, "sym": False}, "gptq int4, asymmetric"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4, "symmetric": False}}}}, "asymmetric int4"),
    ],
)
def test_other_integers_are_refused_by_name(config, said):
    opened = replace(checkpoint(safetensors({"a": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}, 4), "m.safetensors", {"quantization_config": config}))
    with pytest.raises(UnsupportedError, match=said):
        require_known_method(opened)
