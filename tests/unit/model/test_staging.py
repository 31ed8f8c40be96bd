"""Reading parts of tensors ahead: the same bytes as without, and the same sentence when a file ends early."""

from __future__ import annotations

import numpy as np
import pytest
from paddock_runner.errors import FileError
from paddock_runner.files.view import TensorView
from paddock_runner.model import staging as rooms
from paddock_runner.model.staging import Staging, parts_of


def tensors(path, sizes):
    """One file of tensors of so many rows of eight bytes each."""
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, sum(sizes) * 8, np.uint8).tobytes()
    path.write_bytes(data)
    starts = np.cumsum([0, *sizes]) * 8
    views = [TensorView(f"t{i}", (n, 8), "u8", path, int(at), n * 8) for i, (n, at) in enumerate(zip(sizes, starts[:-1], strict=True))]
    return views, [data[v.offset : v.offset + v.n_bytes] for v in views]


@pytest.mark.parametrize("n_buffers", [0, 1, 2, 3])
def test_parts_read_ahead_are_what_the_file_holds(tmp_path, monkeypatch, n_buffers):
    monkeypatch.setattr(rooms, "PART_BYTES", 1500)
    views, wanted = tensors(tmp_path / "x", [40, 128, 300, 1, 129])
    parts = [parts_of(view, is_whole=False) for view in views]
    assert [[p.n_rows for p in several] for several in parts] == [[40], [128], [128, 128, 44], [1], [128, 1]]
    staging = Staging([memoryview(bytearray(1024)) for _ in range(n_buffers)], [p for several in parts for p in several])
    for several, whole in zip(parts, wanted, strict=True):
        assert b"".join(bytes(staging.next()) for _ in several) == whole
        assert bytes(staging.read(views[2])) == wanted[2]
    staging.close()


def test_what_was_given_out_stays_while_others_are_read(tmp_path):
    views, wanted = tensors(tmp_path / "x", [16] * 6)
    parts = [part for view in views for part in parts_of(view, is_whole=True)]
    staging = Staging([memoryview(bytearray(128)) for _ in range(3)], parts)
    assert len(parts) == len(wanted)
    for whole in wanted:
        data = staging.next()
        for _, reading in staging._coming:
            for piece in reading:
                piece.result()
        assert bytes(data) == whole
    staging.close()


def test_rows_longer_than_a_part_are_128_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms, "PART_BYTES", 100)
    views, _ = tensors(tmp_path / "x", [300])
    assert [(p.first_row, p.n_rows) for p in parts_of(views[0], is_whole=False)] == [(0, 128), (128, 128), (256, 44)]


@pytest.mark.parametrize("n_buffers", [0, 2])
def test_a_tensor_that_ends_early_is_told_when_it_is_asked_for(tmp_path, n_buffers):
    views, _ = tensors(tmp_path / "x", [5, 8])
    (tmp_path / "x").write_bytes(bytes(50))
    parts = [part for view in views for part in parts_of(view, is_whole=False)]
    staging = Staging([memoryview(bytearray(64)) for _ in range(n_buffers)], parts)
    staging.next()
    with pytest.raises(FileError, match="truncated: tensor t1"):
        staging.next()
    staging.close()
