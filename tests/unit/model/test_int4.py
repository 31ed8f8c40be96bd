"""Int4 of GPTQ, AWQ and compressed-tensors becomes q4_0, q4_z or f16, value for value; what would not be exact is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.blueprint.quantised import join_scales, require_known_method
from paddock_runner.errors import FileError, UnsupportedError
from paddock_runner.formats.reference import dequantize
from paddock_runner.model.int4 import converted

from tests.checkpoint_bytes import checkpoint, safetensors

N, K, GROUP = 16, 128, 64
BYTES = {"I32": 4, "F16": 2, "BF16": 2, "I64": 8}
ORDER_MAP = [0, 2, 4, 6, 1, 3, 5, 7]


def opened(tensors, config):
    entries, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        n = BYTES[dtype] * int(np.prod(shape))
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    return checkpoint(safetensors(entries, at), "m.safetensors", {"quantization_config": config} if config else {})


def joined(tensors, config=None):
    found = opened(tensors, config)
    return join_scales(found.tensors, found)


def words(codes):
    """[..., 8 n] codes -> [..., n] words, the first code lowest."""
    return (codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)


def awq_words(codes):
    """As AutoAWQ packs: nibble i of a word is column ORDER_MAP[i] of eight."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for i, at in enumerate(ORDER_MAP):
        packed |= codes[:, at::8].astype(np.uint32) << np.uint32(4 * i)
    return packed


GPTQ = {"q.qweight": ("I32", (K // 8, N)), "q.scales": ("F16", (K // GROUP, N)), "q.qzeros": ("I32", (K // GROUP, N // 8)), "q.g_idx": ("I32", (K,))}
AWQ = {"q.qweight": ("I32", (K, N // 8)), "q.scales": ("F16", (K // GROUP, N)), "q.qzeros": ("I32", (K // GROUP, N // 8))}
PACKED = {"q.weight_packed": ("I32", (N, K // 8)), "q.weight_scale": ("BF16", (N, K // GROUP)), "q.weight_shape": ("I64", (2,))}
ZEROED = {**PACKED, "q.weight_zero_point": ("I32", (N // 8, K // GROUP))}
SHUFFLED = {**ZEROED, "q.weight_g_idx": ("I32", (K,))}
CASES = {
    "gptq": (GPTQ, {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False}, "q4_0"),
    "gptq-asymmetric": (GPTQ, {"quant_method": "gptq", "bits": 4, "sym": False}, "q4_z"),
    "gptq-v2": (GPTQ, {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"}, "q4_z"),
    "gptq-act-order": (GPTQ, {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True}, "f16"),
    "gptq-act-order-symmetric": (GPTQ, {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": True}, "f16"),
    "awq": (AWQ, {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "GEMM"}, "q4_z"),
    "compressed-tensors": (PACKED, {"quant_method": "compressed-tensors"}, "q4_0"),
    "compressed-tensors-asymmetric": (ZEROED, {"quant_method": "compressed-tensors"}, "q4_z"),
    "compressed-tensors-shuffled": (SHUFFLED, {"quant_method": "compressed-tensors"}, "f16"),
}


class Stored:
    """A random weight, stored as a case wants it; `values` is what it stands for."""

    def __init__(self, name, rng, order=None):
        tensors, config, self.format = CASES[name]
        self.view = joined(tensors, config)["q.weight"]
        n = K // GROUP
        self.codes = rng.integers(0, 16, (N, K))
        self.scales = (rng.random((N, n)) * 0.1 + 0.01).astype(np.float16).astype(np.float32)
        offset = int(name.startswith("gptq") and "v2" not in name)
        zeros = np.full((N, n), 8) if self.format == "q4_0" or "symmetric" in name.split("-") else rng.integers(offset, 16, (N, n))
        groups = np.arange(K) // GROUP if order is None else order
        self.values = (self.codes - zeros[:, groups]).astype(np.float32) * self.scales[:, groups]
        is_rows = name.startswith("compressed")
        by_eight = words if not name.startswith("awq") else awq_words
        self.tensors = {
            self.view.name: words(self.codes) if is_rows else awq_words(self.codes.T) if name == "awq" else words(self.codes.T.reshape(K // 8, 8, N).swapaxes(1, 2)).reshape(K // 8, N),
            "q.qzeros": by_eight((zeros - offset).T), "q.weight_zero_point": words(np.ascontiguousarray(zeros.T)).T, "q.g_idx": groups.astype(np.int32), "q.weight_g_idx": groups.astype(np.int32),
        }  # fmt: skip
        self.is_rows = is_rows

    def read(self, view):
        return np.ascontiguousarray(self.tensors[view.name]).view(np.uint8).reshape(-1)

    def converted(self):
        return converted(self.view, self.read, lambda v: self.scales.reshape(-1) if self.is_rows else self.scales.T.reshape(-1))


@pytest.mark.parametrize("name", CASES)
def test_codes_scales_and_zero_points_become_the_same_values(name):
    rng = np.random.default_rng(3)
    order = rng.permutation(np.arange(K) // GROUP) if CASES[name][2] == "f16" else None
    stored = Stored(name, rng, order)
    view, raw = stored.view, stored.converted()
    assert (view.format, view.shape) == (CASES[name][2], (N, K)) and raw.nbytes == view.weight_bytes
    wanted = stored.values if view.format != "f16" else stored.values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(dequantize(view.format, raw, (N, K)), wanted)


def test_scale_that_is_no_f16_number_is_refused():
    stored = Stored("compressed-tensors", np.random.default_rng(1))
    stored.scales = np.full_like(stored.scales, 1e-9)
    with pytest.raises(UnsupportedError, match=r"tensor q.weight_scale holds 9.99\d*e-10, which is no f16 number"):
        stored.converted()


def test_what_the_config_does_not_say_is_refused_by_tensor():
    stored = Stored("gptq", np.random.default_rng(1))
    stored.tensors["q.qzeros"] = np.full((2, 2), 0x77777877, np.uint32)
    with pytest.raises(UnsupportedError, match=r"q.qzeros holds zero points other than 8, but config.json says sym"):
        stored.converted()
    shuffled = Stored("gptq-asymmetric", np.random.default_rng(1), np.arange(K)[::-1] // GROUP)
    with pytest.raises(UnsupportedError, match=r"in the order of activations, but config\.json does not say desc_act"):
        shuffled.converted()
    wild = Stored("gptq-act-order", np.random.default_rng(1), np.arange(K) // GROUP)
    wild.tensors["q.g_idx"] = np.full(K, 2, np.int32)
    with pytest.raises(FileError, match=r"tensor q.g_idx names group 2 of 2"):
        wild.converted()


@pytest.mark.parametrize(
    ("tensors", "config", "sentence"),
    [
        ({"q.qweight": GPTQ["q.qweight"]}, None, r"tensor q.qweight holds 4-bit codes and has no scales"),
        ({**GPTQ, "q.scales": ("F16", (3, N))}, None, r"tensor q.scales is f16 \[3, 16\]; expected one number per"),
        ({**AWQ, "q.scales": ("F16", (2, 17))}, CASES["awq"][1], r"tensor q.scales is f16 \[2, 17\]"),
        ({**AWQ, "q.qzeros": ("I32", (2, 3))}, CASES["awq"][1], r"tensor q.qzeros is i32 \[2, 3\]; expected i32 \[2, 2\]"),
        ({**GPTQ, "q.qzeros": ("F16", (2, 2))}, None, r"tensor q.qzeros is f16 \[2, 2\]"),
        ({**ZEROED, "q.weight_zero_point": ("I32", (1, 2))}, None, r"tensor q.weight_zero_point is i32 \[1, 2\]"),
        ({k: v for k, v in AWQ.items() if k != "q.qzeros"}, CASES["awq"][1], r"tensor q.qweight holds 4-bit codes and has no zero points"),
        ({**GPTQ, "q.g_idx": ("I32", (64,))}, None, r"tensor q.g_idx is i32 \[64\]; expected the group of each of 128 columns"),
    ],
)
def test_missing_or_wrong_parts_are_refused_by_tensor_name(tensors, config, sentence):
    with pytest.raises(FileError, match=sentence):
        joined(tensors, config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 8}, "gptq int8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in the layout gemv"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 8}}}}, "compressed-tensors int8"),
    ],
)
def test_other_integers_are_refused_by_name(config, said):
    with pytest.raises(UnsupportedError, match=said):
        require_known_method(opened({"a": ("I32", (1,))}, config))
