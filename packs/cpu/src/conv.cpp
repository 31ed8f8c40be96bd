// Gated short convolution (pk_op_conv in pack.h).
#include <algorithm>
#include <cstring>

#include "rare_ops.h"
#include "recurrent.h"

namespace pk {
namespace {

// The product that is convolved, of the row's token `t` (negative: of the tail) and channel c.
float product(const pk_op_conv &op, const RecurrentRow &q, int64_t t, int64_t c) {
    int64_t width = op.out.cols;
    if (t < 0) return q.begins ? 0.0f : q.tail[(op.conv_width - 1 + t) * width + c];
    const float *x = row_of(op.x, q.first + t);
    return x[c] * x[2 * width + c];
}

void convolve(const pk_op_conv &op, const RecurrentRow &q, int64_t t) {
    const auto *conv = numbers<const float>(op.conv.data), *bias = numbers<const float>(op.bias.data);
    const float *gate = row_of(op.x, q.first + t) + op.out.cols;
    auto *out = numbers<float>(op.out.data + (q.first + t) * op.out.stride);
    for (int64_t c = 0; c < op.out.cols; ++c) {
        float sum = bias ? bias[c] : 0.0f;
        for (int32_t i = 0; i < op.conv_width; ++i) sum += conv[c * op.conv_width + i] * product(op, q, t - op.conv_width + 1 + i, c);
        out[c] = gate[c] * sum;
    }
}

// An older product is read before it is overwritten: tokens move upwards.
void keep_tail(const pk_op_conv &op, const RecurrentRow &q) {
    int64_t n_tail = op.conv_width - 1, width = op.out.cols;
    for (int64_t i = 0; i < n_tail; ++i)
        for (int64_t c = 0; c < width; ++c) q.tail[i * width + c] = product(op, q, q.n - n_tail + i, c);
}

}  // namespace

void run_conv(Run &run, const pk_op_conv &op) {
    Pool &pool = run.context.pool;
    const auto *token_row = numbers<const int32_t>(run.state.token_row);
    pool.parallel_for(run.n_tokens, std::max<int64_t>(pool.grain(run.n_tokens), 1 + 4096 / op.out.cols), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            RecurrentRow q = row_at(run, 0, op.conv_offset, token_row[t]);
            if (q.is_dead)
                std::fill_n(numbers<float>(op.out.data + t * op.out.stride), op.out.cols, 0.0f);
            else
                convolve(op, q, t - q.first);
        }
    });
    for (int64_t r = 0; r < run.n_rows; ++r) {
        RecurrentRow q = row_at(run, 0, op.conv_offset, r);
        if (!q.is_dead && q.n > 0) keep_tail(op, q);
    }
}

void run_settle(Run &run, const pk_op_settle_conv &op) {
    settle_rows(run, op, [&](uint8_t *slot, int64_t n_right) {
        pk_op_conv conv = op.conv;
        conv.x = kept_rows(slot + op.rows_offset, conv.x.cols);
        keep_tail(conv, {0, n_right, false, false, nullptr, reinterpret_cast<float *>(slot + conv.conv_offset)});
    });
}

}  // namespace pk
