// What happens to sums on their way to y. For level sources only.
#pragma once
#include "matmul_kernels.h"
#include "simd.h"

namespace pk {
namespace {

inline vf finished(const pk_op_matmul &op, vf x) {
    if (op.scale != 1.0f) x = v_mul(x, v_set(op.scale));
    if (op.softcap > 0.0f) x = v_mul(v_set(op.softcap), v_tanh(v_div(x, v_set(op.softcap))));
    return x;
}

void finish_rows(const Finish &f, int64_t row, int64_t n_rows, const float *sums, const float *gated_sums, int64_t sum_stride) {
    const pk_op_matmul &op = *f.op;
    for (int64_t r = 0; r < n_rows; ++r) {
        float *y = reinterpret_cast<float *>(op.y.data + (row + r) * op.y.stride) + f.column;
        const float *add = op.add.data ? reinterpret_cast<const float *>(op.add.data + (row + r) * op.add.stride) + f.column : nullptr;
        for (int64_t i = 0; i < f.n_columns; i += kLanes) {
            int64_t n = f.n_columns - i < kLanes ? f.n_columns - i : kLanes;
            vf x = v_load(sums + r * sum_stride + i);
            if (f.bias[0]) x = v_add(x, v_load(f.bias[0] + i, n));
            if (gated_sums) {
                vf up = v_load(gated_sums + r * sum_stride + i);
                if (f.bias[1]) up = v_add(up, v_load(f.bias[1] + i, n));
                x = v_mul(v_act(x, op.act), up);
            }
            x = finished(op, x);
            if (add) x = v_add(x, v_load(add + i, n));
            v_store(y + i, x, n);
        }
    }
}

}  // namespace
}  // namespace pk
