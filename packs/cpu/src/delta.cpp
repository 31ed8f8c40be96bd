// Gated delta net: one layer's convolution, state update, output norm and gate, token after token (pk_op_delta in pack.h).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "rare_ops.h"
#include "recurrent.h"

namespace pk {
namespace {

struct Shape {
    int64_t keys, values, channels;  // G * Dk, H * Dv, 2 G * Dk + H * Dv
    explicit Shape(const pk_op_delta &op)
        : keys(static_cast<int64_t>(op.n_k_heads) * op.k_width), values(static_cast<int64_t>(op.n_v_heads) * op.v_width), channels(2 * keys + values) {}
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// x / sqrt(sum(x^2) + 1e-6) * factor, into out.
void unit_vector(const float *x, int64_t n, double factor, float *out) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
    auto by = static_cast<float>(factor / std::sqrt(sum + 1e-6));
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * by;
}

// S = decay S; d = beta (v - S^T k); S += k d^T; out = S^T q. d: [Dv] scratch.
void update(float *state, const float *q, const float *k, const float *v, float decay, float beta, int64_t k_width, int64_t v_width, float *d, float *out) {
    std::fill(d, d + v_width, 0.0f);
    for (int64_t i = 0; i < k_width; ++i) {
        float *s = state + i * v_width;
        for (int64_t j = 0; j < v_width; ++j) {
            s[j] *= decay;
            d[j] += s[j] * k[i];
        }
    }
    for (int64_t j = 0; j < v_width; ++j) d[j] = beta * (v[j] - d[j]);
    std::fill(out, out + v_width, 0.0f);
    for (int64_t i = 0; i < k_width; ++i) {
        float *s = state + i * v_width;
        for (int64_t j = 0; j < v_width; ++j) {
            s[j] += k[i] * d[j];
            out[j] += s[j] * q[i];
        }
    }
}

// Norm and gate of one head's output, in place.
void finish(const pk_op_delta &op, const float *z, float *out) {
    const bool is_sigmoid = op.op == PK_OP_DELTA_SIGMOID;
    const auto *scale = numbers<const float>(op.scale.data);
    double sum = 0;
    for (int64_t j = 0; j < op.v_width; ++j) sum += static_cast<double>(out[j]) * out[j];
    auto by = static_cast<float>(1.0 / std::sqrt(sum / op.v_width + op.eps));
    for (int64_t j = 0; j < op.v_width; ++j) out[j] = out[j] * by * scale[j] * (is_sigmoid ? sigmoid(z[j]) : silu(z[j]));
}

// Value head h over the tokens of a row. mixed: [n, C] convolved inputs. scratch: 2 Dk + Dv floats.
void run_head(const pk_op_delta &op, const Shape &shape, const RecurrentRow &q, int64_t h, const float *mixed, float *scratch) {
    int64_t key_head = op.is_tiled ? h % op.n_k_heads : h / (op.n_v_heads / op.n_k_heads), size = static_cast<int64_t>(op.k_width) * op.v_width;
    float *state = q.state + h * size, *query = scratch, *key = query + op.k_width, *d = key + op.k_width;
    if (q.begins) std::fill(state, state + size, 0.0f);
    double rate = -std::exp(static_cast<double>(numbers<const float>(op.a_log.data)[h])), bias = numbers<const float>(op.dt_bias.data)[h];
    for (int64_t t = 0; t < q.n; ++t) {
        const float *u = mixed + t * shape.channels;
        unit_vector(u + key_head * op.k_width, op.k_width, 1.0 / std::sqrt(static_cast<double>(op.k_width)), query);
        unit_vector(u + shape.keys + key_head * op.k_width, op.k_width, 1.0, key);
        auto decay = static_cast<float>(std::exp(rate * softplus(row_of(op.a, q.first + t)[h] + bias)));
        auto *out = numbers<float>(op.out.data + (q.first + t) * op.out.stride) + h * op.v_width;
        update(state, query, key, u + 2 * shape.keys + h * op.v_width, decay, sigmoid(row_of(op.b, q.first + t)[h]), op.k_width, op.v_width, d, out);
        if (op.z.data) finish(op, row_of(op.z, q.first + t) + h * op.v_width, out);
    }
}

int64_t head_floats(const pk_op_delta &op) { return 2 * op.k_width + op.v_width; }

}  // namespace

int64_t delta_workspace_bytes(const Context &context, const pk_op_delta &op, const pk_state &state) {
    return 4 * (int64_t{state.max_step_tokens} * Shape(op).channels + context.pool.n_threads() * ((head_floats(op) + 15) / 16 * 16));
}

void run_delta(Run &run, const pk_op_delta &op) {
    Shape shape(op);
    Pool &pool = run.context.pool;
    auto *mixed = reinterpret_cast<float *>(run.shared), *scratch = mixed + int64_t{run.state.max_step_tokens} * shape.channels;
    Taps taps{op.qkv, numbers<const float>(op.conv.data), nullptr, shape.channels, op.conv_width};
    convolve_step(run, taps, op.state_offset, op.conv_offset, mixed);
    pool.parallel_for(run.n_rows * op.n_v_heads, 1, [&](int64_t begin, int64_t end, int32_t thread) {
        for (int64_t i = begin; i < end; ++i) {
            RecurrentRow q = row_at(run, op.state_offset, op.conv_offset, i / op.n_v_heads);
            int64_t h = i % op.n_v_heads;
            if (!q.is_dead) {
                run_head(op, shape, q, h, mixed + q.first * shape.channels, scratch + thread * ((head_floats(op) + 15) / 16 * 16));
                continue;
            }
            for (int64_t t = q.first; t < q.first + q.n; ++t)
                std::fill_n(numbers<float>(op.out.data + t * op.out.stride) + h * op.v_width, op.v_width, 0.0f);
        }
    });
    keep_tails(run, taps, op.state_offset, op.conv_offset);
}

int64_t settle_workspace_bytes(const Context &context, const pk_op_settle &op, const pk_state &) {
    return 4 * ((int64_t{op.max_tokens} * Shape(op.delta).channels + Shape(op.delta).values + 31) / 16 * 16 + context.pool.n_threads() * ((head_floats(op.delta) + 15) / 16 * 16));
}

void run_settle(Run &run, const pk_op_settle &op) {
    const Shape shape(op.delta);
    auto *mixed = reinterpret_cast<float *>(run.shared), *out = mixed + int64_t{op.max_tokens} * shape.channels;
    float *scratch = mixed + (int64_t{op.max_tokens} * shape.channels + shape.values + 31) / 16 * 16;
    settle_rows(run, op, [&](uint8_t *slot, int64_t n_right) {
        pk_op_delta delta = op.delta;
        const auto *rows = reinterpret_cast<const float *>(slot + op.rows_offset), *b = rows + op.max_tokens * shape.channels;
        delta.qkv = kept_rows(rows, shape.channels);
        delta.b = kept_rows(b, delta.n_v_heads);
        delta.a = kept_rows(b + int64_t{op.max_tokens} * delta.n_v_heads, delta.n_v_heads);
        delta.z = {};
        delta.out = kept_rows(out, shape.values);
        delta.out.stride = 0;
        const RecurrentRow q{0, n_right, false, false, reinterpret_cast<float *>(slot + delta.state_offset), reinterpret_cast<float *>(slot + delta.conv_offset)};
        const Taps taps{delta.qkv, numbers<const float>(delta.conv.data), nullptr, shape.channels, delta.conv_width};
        for (int64_t t = 0; t < n_right; ++t) taps.convolve(q, t, mixed + t * shape.channels);
        run.context.pool.parallel_for(delta.n_v_heads, 1, [&](int64_t begin, int64_t end, int32_t thread) {
            for (int64_t h = begin; h < end; ++h) run_head(delta, shape, q, h, mixed, scratch + thread * ((head_floats(delta) + 15) / 16 * 16));
        });
        taps.keep_tail(q);
    });
}

}  // namespace pk
