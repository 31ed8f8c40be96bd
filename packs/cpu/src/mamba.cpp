// Mamba 2: one layer's convolution, state update, gate and output norm, token after token (pk_op_mamba in pack.h).
#include <algorithm>
#include <cmath>

#include "rare_ops.h"
#include "recurrent.h"

namespace pk {
namespace {

struct Shape {
    int64_t values, channels;  // H * P, H * P + 2 G N
    explicit Shape(const pk_op_mamba &op)
        : values(static_cast<int64_t>(op.n_heads) * op.head_width), channels(values + 2 * static_cast<int64_t>(op.n_groups) * op.state_width) {}
};

// S = decay S + b (step x)^T; out = S^T c + skip x. S: [N, P].
void update(const pk_op_mamba &op, float *state, const float *x, const float *b, const float *c, float decay, float step, float skip, float *out) {
    for (int32_t j = 0; j < op.head_width; ++j) out[j] = skip * x[j];
    for (int32_t i = 0; i < op.state_width; ++i) {
        float *s = state + static_cast<int64_t>(i) * op.head_width, by = step * b[i];
        for (int32_t j = 0; j < op.head_width; ++j) {
            s[j] = decay * s[j] + by * x[j];
            out[j] += c[i] * s[j];
        }
    }
}

// Head h over the tokens of a row. mixed: [n, C] convolved inputs of the row.
void run_head(const pk_op_mamba &op, const Shape &shape, const RecurrentRow &q, int64_t h, const float *mixed) {
    int64_t group = h / (op.n_heads / op.n_groups), size = static_cast<int64_t>(op.state_width) * op.head_width;
    float *state = q.state + h * size;
    if (q.begins) std::fill(state, state + size, 0.0f);
    double rate = -std::exp(static_cast<double>(numbers<const float>(op.a_log.data)[h])), bias = numbers<const float>(op.dt_bias.data)[h];
    float skip = numbers<const float>(op.d.data)[h];
    for (int64_t t = 0; t < q.n; ++t) {
        const float *u = mixed + t * shape.channels, *b = u + shape.values + group * op.state_width, *c = b + static_cast<int64_t>(op.n_groups) * op.state_width;
        double step = std::clamp(softplus(row_of(op.dt, q.first + t)[h] + bias), static_cast<double>(op.dt_low), static_cast<double>(op.dt_high));
        auto *out = numbers<float>(op.out.data + (q.first + t) * op.out.stride) + h * op.head_width;
        update(op, state, u + h * op.head_width, b, c, static_cast<float>(std::exp(rate * step)), static_cast<float>(step), skip, out);
    }
}

// Gate and norm of one token's output, in place.
void finish(const pk_op_mamba &op, const float *z, float *out, int64_t values) {
    const auto *scale = numbers<const float>(op.scale.data);
    int64_t n = values / op.n_norms;
    for (int64_t at = 0; at < values; at += n) {
        double sum = 0;
        for (int64_t j = at; j < at + n; ++j) {
            out[j] *= silu(z[j]);
            sum += static_cast<double>(out[j]) * out[j];
        }
        auto by = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(n) + op.eps));
        for (int64_t j = at; j < at + n; ++j) out[j] *= by * scale[j];
    }
}

}  // namespace

int64_t mamba_workspace_bytes(const pk_op_mamba &op, const pk_state &state) { return 4 * int64_t{state.max_step_tokens} * Shape(op).channels; }

void run_mamba(Run &run, const pk_op_mamba &op) {
    Shape shape(op);
    Pool &pool = run.context.pool;
    auto *mixed = reinterpret_cast<float *>(run.shared);
    Taps taps{op.xbc, numbers<const float>(op.conv.data), numbers<const float>(op.bias.data), shape.channels, op.conv_width};
    convolve_step(run, taps, op.state_offset, op.conv_offset, mixed);
    pool.parallel_for(run.n_rows * op.n_heads, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t i = begin; i < end; ++i) {
            RecurrentRow q = row_at(run, op.state_offset, op.conv_offset, i / op.n_heads);
            if (!q.is_dead) run_head(op, shape, q, i % op.n_heads, mixed + q.first * shape.channels);
        }
    });
    const auto *token_row = numbers<const int32_t>(run.state.token_row);
    pool.parallel_for(run.n_tokens, pool.grain(run.n_tokens), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            auto *out = numbers<float>(op.out.data + t * op.out.stride);
            if (row_at(run, op.state_offset, op.conv_offset, token_row[t]).is_dead)
                std::fill_n(out, shape.values, 0.0f);
            else
                finish(op, row_of(op.z, t), out, shape.values);
        }
    });
    keep_tails(run, taps, op.state_offset, op.conv_offset);
}

int64_t settle_workspace_bytes(const pk_op_settle_mamba &op) { return 4 * (int64_t{op.max_tokens} * Shape(op.mamba).channels + Shape(op.mamba).values); }

void run_settle(Run &run, const pk_op_settle_mamba &op) {
    const Shape shape(op.mamba);
    auto *mixed = reinterpret_cast<float *>(run.shared), *out = mixed + int64_t{op.max_tokens} * shape.channels;
    settle_rows(run, op, [&](uint8_t *slot, int64_t n_right) {
        pk_op_mamba mamba = op.mamba;
        const auto *rows = reinterpret_cast<const float *>(slot + op.rows_offset);
        mamba.xbc = kept_rows(rows, shape.channels);
        mamba.dt = kept_rows(rows + op.max_tokens * shape.channels, mamba.n_heads);
        mamba.out = kept_rows(out, shape.values);
        mamba.out.stride = 0;
        const RecurrentRow q{0, n_right, false, false, reinterpret_cast<float *>(slot + mamba.state_offset), reinterpret_cast<float *>(slot + mamba.conv_offset)};
        const Taps taps{mamba.xbc, numbers<const float>(mamba.conv.data), numbers<const float>(mamba.bias.data), shape.channels, mamba.conv_width};
        for (int64_t t = 0; t < n_right; ++t) taps.convolve(q, t, mixed + t * shape.channels);
        run.context.pool.parallel_for(mamba.n_heads, 1, [&](int64_t begin, int64_t end, int32_t) {
            for (int64_t h = begin; h < end; ++h) run_head(mamba, shape, q, h, mixed);
        });
        taps.keep_tail(q);
    });
}

}  // namespace pk
