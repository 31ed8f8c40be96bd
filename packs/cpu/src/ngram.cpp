// What the last few tokens choose and say: a table's rows, their weight in every residual stream, a convolution over every few tokens
// (pk_op_ngram, pk_op_streams, pk_op_dilated in rare.h).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "matmul.h"
#include "rare_ops.h"
#include "recurrent.h"

namespace pk {
namespace {

// x_0 .. x_(n - 1) of a token at `position`; history points at the token itself.
void last_tokens(const pk_op_ngram &op, const int32_t *history, int64_t position, uint64_t *x) {
    bool is_open = true;
    x[0] = static_cast<uint64_t>(history[0]);
    for (int64_t k = 1; k < op.n_tokens; ++k) {
        is_open = is_open && position >= k && history[-k] != op.end_token;
        x[k] = static_cast<uint64_t>(is_open ? history[-k] : op.end_token);
    }
}

void choose_row(Run &run, const pk_op_ngram &op, const int32_t *history, int64_t position, float *out) {
    uint64_t x[8];
    last_tokens(op, history, position, x);
    uint64_t mixed = x[0] * static_cast<uint64_t>(op.multipliers[0]);
    int64_t first = 0;
    for (int32_t g = 2, h = 0; g <= op.n_tokens; ++g) {
        mixed ^= x[g - 1] * static_cast<uint64_t>(op.multipliers[g - 1]);
        for (int32_t i = 0; i < op.n_each; ++i, ++h) {
            int64_t rest = static_cast<int64_t>(mixed) % op.sizes[h], id = first + (rest < 0 ? rest + op.sizes[h] : rest);
            pk_tensor piece = op.table;
            piece.data += id / op.table.rows * op.table.stride;
            packed_row_to_f32(run.context, piece, id % op.table.rows, out + h * op.table.cols);
            first += op.sizes[h];
        }
    }
}

}  // namespace

void run_ngram(Run &run, const pk_op_ngram &op) {
    const pk_state &s = run.state;
    const auto *rows = numbers<const int32_t>(s.token_row), *positions = numbers<const int32_t>(s.token_position);
    const auto *slots = numbers<const int32_t>(s.row_slot), *flags = numbers<const int32_t>(s.row_flags);
    run.context.pool.parallel_for(run.n_tokens, std::max<int64_t>(run.context.pool.grain(run.n_tokens), 16), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            auto *out = numbers<float>(op.out.data + t * op.out.stride);
            if (flags[rows[t]] & PK_ROW_DEAD) {
                std::fill_n(out, op.out.cols, 0.0f);
                continue;
            }
            const auto *tokens = numbers<const int32_t>(s.tokens) + int64_t{slots[rows[t]]} * (s.max_ctx_tokens + 1);
            choose_row(run, op, tokens + positions[t], positions[t], out);
        }
    });
}

void run_streams(Run &run, const pk_op_streams &op) {
    int64_t n = resolve_rows(op.q.rows, run.n_tokens, run.n_samples), width = op.v.cols;
    run.context.pool.parallel_for(n, std::max<int64_t>(run.context.pool.grain(n), 1 + 4096 / op.q.cols), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            const float *v = row_of(op.v, t);
            for (int64_t at = 0; at < op.q.cols; at += width) {
                const float *q = row_of(op.q, t) + at, *k = row_of(op.k, t) + at;
                double sum = 0;
                for (int64_t i = 0; i < width; ++i) sum += static_cast<double>(q[i]) * k[i];
                sum /= std::sqrt(static_cast<double>(width));
                double root = std::sqrt(std::max(std::fabs(sum), 1e-6)), gate = sum > 0 ? root : sum < 0 ? -root : 0;
                auto factor = static_cast<float>(1 / (1 + std::exp(-gate)));
                auto *out = numbers<float>(op.out.data + t * op.out.stride) + at;
                for (int64_t i = 0; i < width; ++i) out[i] = factor * v[i];
            }
        }
    });
}

void run_dilated(Run &run, const pk_op_dilated &op) {
    const auto *conv = numbers<const float>(op.conv.data);
    const auto *token_row = numbers<const int32_t>(run.state.token_row);
    const int64_t width = op.conv_width, channels = op.x.cols;
    Taps taps{op.x, conv, nullptr, channels, (op.conv_width - 1) * op.dilation + 1};
    Pool &pool = run.context.pool;
    pool.parallel_for(run.n_tokens, std::max<int64_t>(pool.grain(run.n_tokens), 1 + 1024 / channels), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            RecurrentRow q = row_at(run, 0, op.conv_offset, token_row[t]);
            const float *from[16], *add = row_of(op.add, t);
            for (int64_t i = 0; i < width; ++i) from[i] = q.is_dead ? nullptr : taps.input(q, t - q.first - (width - 1 - i) * op.dilation);
            auto *out = numbers<float>(op.out.data + t * op.out.stride);
            for (int64_t c = 0; c < channels; ++c) {
                float sum = 0;
                for (int64_t i = 0; i < width; ++i) sum += from[i] ? conv[c * width + i] * from[i][c] : 0.0f;
                out[c] = add[c] + silu(sum);
            }
        }
    });
    keep_tails(run, taps, 0, op.conv_offset);
}

}  // namespace pk
