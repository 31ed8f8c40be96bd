"""Recording: shapes are checked where the program is written, and records come out as pack.h says."""

from __future__ import annotations

import ctypes

import pytest
from paddock_runner.pack import abi
from paddock_runner.pack.program import Epilogue, Program, ShapeError
from paddock_runner.pack.tensor import S, T, Tensor

X = Tensor(4096, T, 64, abi.PK_F32)


def weight(rows, cols):
    return Tensor(8192, rows, cols, abi.PK_Q8_0, 0, abi.PK_PACKED)


def test_records_follow_each_other_with_their_own_sizes():
    program = Program()
    program.prepare()
    program.norm(X, Tensor(1, 1, 64, abi.PK_F32), X, 1e-5)
    program.commit()
    data, at, ops = program.bytes(), 0, []
    while at < len(data):
        op, size = int.from_bytes(data[at : at + 4], "little"), int.from_bytes(data[at + 4 : at + 8], "little")
        ops.append(op)
        at += size
    assert ops == [abi.PK_OP_PREPARE, abi.PK_OP_NORM, abi.PK_OP_COMMIT] and at == len(data)


def test_product_of_wrong_width_is_refused_with_both_numbers():
    with pytest.raises(ShapeError, match="x width is 64, w\\[0\\] columns is 96"):
        Program().matmul(X, [weight(32, 96)], Tensor(0, T, 32, abi.PK_F32))


def test_gated_product_is_as_wide_as_one_weight():
    program = Program()
    program.matmul(X, [weight(48, 64), weight(48, 64)], Tensor(16, T, 48, abi.PK_F32), (), Epilogue(act="silu"))
    record = abi.pk_op_matmul.from_buffer_copy(program.bytes())
    assert (record.n_w, record.act, record.y.cols, record.w[1].rows) == (2, abi.PK_ACT_SILU, 48, 48)
    assert record.x.rows == abi.PK_ROWS_T and record.x.stride == 256 and record.w[0].stride == 0


def test_view_of_columns_keeps_the_row_stride():
    part = Tensor(1000, S, 64, abi.PK_BF16).columns(16, 8)
    record = abi.pk_tensor()
    part.fill(record)
    assert (record.data, record.cols, record.stride, record.rows) == (1032, 8, 128, abi.PK_ROWS_S)


def test_every_record_of_the_header_is_used_by_a_method():
    names = {n for n in vars(abi) if n.startswith("pk_op_")}
    sizes = {ctypes.sizeof(getattr(abi, n)) for n in names}
    assert len(names) == 32 and min(sizes) == 8
