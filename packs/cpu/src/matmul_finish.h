// What happens to sums on their way to y. For level sources only.
#pragma once
#include "matmul_kernels.h"
#include "simd.h"

namespace pk {
namespace {

// True when sums are stored as they are.
inline bool is_bare(const Finish &f) {
    return !f.bias[0] && f.op->act == PK_ACT_NONE && f.op->scale == 1.0f && !(f.op->softcap > 0.0f) && !f.op->add.data;
}

template <bool kGated, bool kBare>
inline __attribute__((always_inline)) void finish_columns(const Finish &f, int64_t row, int64_t n_rows, const float *sums, const float *gated_sums, int64_t sum_stride, int64_t i) {
    const pk_op_matmul &op = *f.op;
    const int64_t n = f.n_columns - i < kLanes ? f.n_columns - i : kLanes;
    const vf scale = v_set(op.scale), cap = v_set(op.softcap);
    const vf bias = f.bias[0] ? v_load(f.bias[0] + i, n) : v_zero(), up_bias = kGated && f.bias[1] ? v_load(f.bias[1] + i, n) : v_zero();
    const bool is_capped = op.softcap > 0.0f, is_added = op.add.data != 0;
    for (int64_t r = 0; r < n_rows; ++r) {
        vf x = v_load(sums + r * sum_stride + i);
        if constexpr (!kBare) {
            x = v_add(x, bias);
            if constexpr (kGated) x = v_mul(v_act(x, op.act), v_add(v_load(gated_sums + r * sum_stride + i), up_bias));
            x = v_mul(x, scale);
            if (is_capped) x = v_mul(cap, v_tanh(v_div(x, cap)));
            if (is_added) x = v_add(x, v_load(reinterpret_cast<const float *>(op.add.data + (row + r) * op.add.stride) + f.column + i, n));
        }
        v_store(reinterpret_cast<float *>(op.y.data + (row + r) * op.y.stride) + f.column + i, x, n);
    }
}

[[maybe_unused]] void finish_rows(const Finish &f, int64_t row, int64_t n_rows, const float *sums, const float *gated_sums, int64_t sum_stride) {
    for (int64_t i = 0; i < f.n_columns; i += kLanes) {
        if (gated_sums)
            finish_columns<true, false>(f, row, n_rows, sums, gated_sums, sum_stride, i);
        else if (is_bare(f))
            finish_columns<false, true>(f, row, n_rows, sums, nullptr, sum_stride, i);
        else
            finish_columns<false, false>(f, row, n_rows, sums, nullptr, sum_stride, i);
    }
}

}  // namespace
}  // namespace pk
