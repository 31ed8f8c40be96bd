"""Numbers that belong in the blueprint are read from plain tensors, and from nothing else."""

from __future__ import annotations

import struct

import pytest
from paddock_runner.blueprint.stored import stored_numbers
from paddock_runner.errors import FileError
from paddock_runner.files.checkpoint import open_checkpoint

from tests.checkpoint_bytes import checkpoint, safetensors


def entry(dtype, n, size):
    return {"scale": {"dtype": dtype, "shape": [n], "data_offsets": [0, n * size]}}


@pytest.mark.parametrize(("dtype", "data"), [("F32", struct.pack("<2f", 0.25, -3)), ("F16", struct.pack("<2e", 0.25, -3)), ("BF16", struct.pack("<2H", 0x3E80, 0xC040))])
def test_plain_formats_are_read(tmp_path, dtype, data):
    (tmp_path / "m.safetensors").write_bytes(safetensors(entry(dtype, 2, len(data) // 2)) + data)
    assert stored_numbers(open_checkpoint(tmp_path / "m.safetensors"), "scale") == (0.25, -3.0)


def test_what_is_not_here_gives_no_numbers():
    assert stored_numbers(checkpoint(safetensors(entry("F32", 2, 4), 8), "m.safetensors"), "scale") == ()


def test_a_number_that_is_none_and_a_large_tensor_are_refused(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(safetensors(entry("F32", 1, 4)) + struct.pack("<f", float("nan")))
    with pytest.raises(FileError, match="scale holds a number that is not finite"):
        stored_numbers(open_checkpoint(tmp_path / "m.safetensors"), "scale")
    with pytest.raises(FileError, match="expected at most 65536 plain numbers"):
        stored_numbers(checkpoint(safetensors(entry("F32", 70000, 4), 280000), "m.safetensors"), "scale")
