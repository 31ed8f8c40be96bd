"""Reading tensors ahead: the same bytes as without, and the same sentence when a file ends early."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.errors import FileError
from paddock_runner.files.view import TensorView
from paddock_runner.model.weights import Staging


def tensors(path, sizes):
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, sum(sizes), np.uint8).tobytes()
    path.write_bytes(data)
    starts = np.cumsum([0, *sizes])
    views = [TensorView(f"t{i}", (n,), "u8", path, int(at), n) for i, (n, at) in enumerate(zip(sizes, starts[:-1], strict=True))]
    return views, [data[v.offset : v.offset + v.n_bytes] for v in views]


def test_tensors_read_ahead_are_what_the_file_holds(tmp_path):
    views, wanted = tensors(tmp_path / "x", [40, 64, 100, 7, 64])
    buffers = [memoryview(bytearray(64)) for _ in range(2)]
    staging = Staging(buffers)
    for i, view in enumerate(views):
        data = staging.read(view)
        if i + 1 < len(views):
            staging.begin(views[i + 1])
        assert bytes(staging.read(views[0])) == wanted[0] if i == 3 else bytes(data) == wanted[i]
    staging.close()


def test_a_tensor_that_ends_early_is_told_when_it_is_asked_for(tmp_path):
    views, _ = tensors(tmp_path / "x", [40, 64])
    (tmp_path / "x").write_bytes(bytes(50))
    staging = Staging([memoryview(bytearray(64)) for _ in range(2)])
    staging.read(views[0])
    staging.begin(views[1])
    with pytest.raises(FileError, match="truncated: tensor t1"):
        staging.read(views[1])
    staging.close()
