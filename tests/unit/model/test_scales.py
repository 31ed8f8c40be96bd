"""Values of scales are checked when they are read: a NaN, an infinity or a zero is refused by tensor name."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from paddock_runner.errors import FileError
from paddock_runner.files.view import Scales, TensorView
from paddock_runner.model.staging import Staging
from paddock_runner.model.weights import read_scales, source_of


def weight(path, data: bytes, format: str, shape, kind="row", **more):
    path.write_bytes(data)
    scales = TensorView("q.weight_scale", shape, format, path, 0, len(data))
    return TensorView("q.weight", (4, 64), "fp8_e4m3", path, 0, 256, Scales(kind, scales, **more))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scale_that_is_no_positive_number_is_refused(tmp_path, value):
    view = weight(tmp_path / "s", struct.pack("<4f", 1, 2, value, 3), "f32", (4, 1))
    with pytest.raises(FileError, match=r"tensor q.weight_scale holds the scale (nan|inf|0.0|-1.0)"):
        read_scales(Staging(), view)


@pytest.mark.parametrize("format, code", [("fp8_e4m3", 0x7F), ("fp8_e4m3", 0x81), ("u8", 0xFF)])
def test_group_scale_that_is_no_number_is_refused(tmp_path, format, code):
    view = weight(tmp_path / "s", bytes([1, 2, code, 3]), format, (4, 1), "group")
    with pytest.raises(FileError, match=f"tensor q.weight_scale holds the scale code {code:#04x}"):
        read_scales(Staging(), view)


def test_scales_reach_the_pack_as_f32_with_their_factor(tmp_path):
    view = weight(tmp_path / "s", np.array([0x3F80, 0x4000, 0x4040, 0x4080], "<u2").tobytes(), "bf16", (4, 1))
    scales = read_scales(Staging(), view)
    assert scales.values.tolist() == [1, 2, 3, 4] and scales.whole == 1.0
    whole = replace(view.scales.view, name="g", format="f32", shape=(1,), n_bytes=4)
    (tmp_path / "s").write_bytes(struct.pack("<f", 4.0) + bytes([0x38] * 12))
    divided = replace(view, scales=Scales("group", replace(view.scales.view, format="fp8_e4m3", shape=(4, 3), offset=4, n_bytes=12), (1, 16), whole, True))
    scales = read_scales(Staging(), divided)
    source = source_of(divided, 0, scales)
    assert (source.global_scale, source.scale_rows, source.scale_cols, scales.values.tolist()) == (0.25, 4, 3, [0x38] * 12)


def test_e8m0_scales_are_powers_of_two(tmp_path):
    view = weight(tmp_path / "s", bytes([127, 128, 126, 130]), "e8m0", (4, 1))
    assert read_scales(Staging(), view).values.tolist() == [1, 2, 0.5, 8]
