// Mixture of experts: choosing experts, and their gated feed-forward, expert by expert over the rows that chose it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "matmul.h"
#include "ops.h"

namespace pk {
namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Scores of one token, into score[E].
void score_row(const pk_op_route &op, const float *logits, float *score) {
    int64_t n = op.logits.cols;
    if (op.score == PK_SCORE_SIGMOID) {
        for (int64_t e = 0; e < n; ++e) score[e] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(logits[e]))));
        return;
    }
    if (op.score == PK_SCORE_CHOSEN) {
        std::memcpy(score, logits, n * sizeof(float));
        return;
    }
    double largest = *std::max_element(logits, logits + n), sum = 0;
    for (int64_t e = 0; e < n; ++e) sum += std::exp(logits[e] - largest);
    for (int64_t e = 0; e < n; ++e) score[e] = static_cast<float>(std::exp(logits[e] - largest) / sum);
}

// Takes the experts of groups that are not used out of the choice.
void drop_groups(const pk_op_route &op, float *key) {
    int64_t size = op.logits.cols / op.n_groups;
    float sums[4096];
    for (int32_t g = 0; g < op.n_groups; ++g) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; ++i) {
            if (key[i] > first) {
                second = first;
                first = key[i];
            } else if (key[i] > second) {
                second = key[i];
            }
        }
        sums[g] = size > 1 && op.n_group_best > 1 ? first + second : first;
    }
    for (int32_t g = 0; g < op.n_groups; ++g) {
        int32_t better = 0;
        for (int32_t h = 0; h < op.n_groups; ++h) better += sums[h] > sums[g] || (sums[h] == sums[g] && h < g);
        if (better >= op.n_groups_used) std::fill(key + g * size, key + (g + 1) * size, -INFINITY);
    }
}

void route_row(const pk_op_route &op, const float *logits, int32_t *ids, float *weights) {
    float score[4096], key[4096];
    int64_t n = op.logits.cols, k = op.ids.cols;
    const auto *bias = numbers<const float>(op.bias.data);
    score_row(op, logits, score);
    for (int64_t e = 0; e < n; ++e) key[e] = score[e] + (bias ? bias[e] : 0.0f);
    if (op.n_groups > 1) drop_groups(op, key);
    double sum = 0, largest = 0;
    for (int64_t i = 0; i < k; ++i) {
        int64_t best = 0;
        for (int64_t e = 1; e < n; ++e)
            if (key[e] > key[best] || std::isnan(key[best])) best = e;
        key[best] = -INFINITY;
        ids[i] = static_cast<int32_t>(best);
        if (i == 0) largest = score[best];
        weights[i] = op.score == PK_SCORE_CHOSEN ? static_cast<float>(std::exp(score[best] - largest)) : score[best];
        sum += weights[i];
    }
    bool divides = op.is_normalised || op.score == PK_SCORE_CHOSEN;
    for (int64_t i = 0; i < k; ++i) weights[i] = static_cast<float>((divides ? weights[i] / (sum > 0 ? sum : 1) : weights[i]) * static_cast<double>(op.scale));
}

// Where the parts of the workspace of an experts record lie, for n_rows tokens.
struct Scratch {
    int64_t starts, rows, factors, x, hidden, out, matmul, bytes;
};

pk_tensor dense(uint64_t data, int64_t cols) { return {data, PK_ROWS_T, cols, cols * 4, PK_F32, PK_ROWS}; }

// Expert e's matrix of a stack.
uint64_t matrix_of(const pk_tensor &stack, const ExpertPlaces &places, int64_t e) {
    return stack.data + (places.at ? places.shift + places.at[e] * stack.stride : e * stack.stride);
}

pk_op_matmul first_product(const pk_op_experts &op, const ExpertPlaces &places, uint64_t x, uint64_t hidden, int64_t e) {
    pk_op_matmul m{};
    int64_t width = op.up.rows;
    bool is_clamped = op.act == PK_ACT_SWIGLU_CLAMP;
    m.op = PK_OP_MATMUL, m.size = sizeof m, m.n_w = 2, m.act = is_clamped ? PK_ACT_NONE : op.act, m.scale = 1;
    m.x = dense(x, op.x.cols);
    m.y = dense(hidden, is_clamped ? 2 * width : width);
    const pk_tensor *weights[] = {&op.gate, &op.up}, *biases[] = {&op.gate_bias, &op.up_bias};
    if (op.act == PK_ACT_RELU2) {
        m.n_w = 1, m.act = PK_ACT_NONE;
        weights[0] = &op.up, biases[0] = &op.up_bias;
    }
    for (int i = 0; i < m.n_w; ++i) {
        m.w[i] = *weights[i];
        m.w[i].data = matrix_of(*weights[i], places, e);
        if (biases[i]->data) m.bias[i] = {biases[i]->data + e * width * 4, 1, width, width * 4, PK_F32, PK_ROWS};
    }
    return m;
}

pk_op_matmul second_product(const pk_op_experts &op, const ExpertPlaces &places, uint64_t hidden, uint64_t out, int64_t e) {
    pk_op_matmul m{};
    int64_t width = op.up.rows, cols = op.y.cols;
    m.op = PK_OP_MATMUL, m.size = sizeof m, m.n_w = 1, m.act = PK_ACT_NONE, m.scale = 1;
    m.x = dense(hidden, width);
    if (op.act == PK_ACT_SWIGLU_CLAMP) m.x.stride = 2 * width * 4;
    m.y = dense(out, cols);
    m.w[0] = op.down;
    m.w[0].data = matrix_of(op.down, places, e);
    if (op.down_bias.data) m.bias[0] = {op.down_bias.data + e * cols * 4, 1, cols, cols * 4, PK_F32, PK_ROWS};
    return m;
}

Scratch scratch_of(const Context &context, const pk_op_experts &op, int64_t n_rows) {
    Scratch s;
    int64_t pairs = n_rows * op.ids.cols, at = 0;
    auto take = [&](int64_t bytes) {
        int64_t start = at;
        at += round_up(bytes, 64);
        return start;
    };
    s.starts = take((op.n_experts + 1) * 4);
    s.rows = take(pairs * 4);
    s.factors = take(pairs * 4);
    s.x = take(n_rows * op.x.cols * 4);
    s.hidden = take(n_rows * op.up.rows * 4 * (op.act == PK_ACT_SWIGLU_CLAMP ? 2 : 1));
    s.out = take(n_rows * op.y.cols * 4);
    s.matmul = at;
    int64_t first = matmul_workspace_bytes(context, first_product(op, {}, 0, 0, 0), n_rows), second = matmul_workspace_bytes(context, second_product(op, {}, 0, 0, 0), n_rows);
    s.bytes = at + std::max(first, second);
    return s;
}

// Counting sort of (token, expert) pairs by expert; tokens in order.
void sort_pairs(const pk_op_experts &op, int64_t n_rows, int32_t *starts, int32_t *rows, float *factors) {
    int64_t k = op.ids.cols;
    auto ids = [&](int64_t t) { return numbers<const int32_t>(op.ids.data + t * op.ids.stride); };
    auto weights = [&](int64_t t) { return numbers<const float>(op.weights.data + t * op.weights.stride); };
    std::fill(starts, starts + op.n_experts + 1, 0);
    for (int64_t t = 0; t < n_rows; ++t)
        for (int64_t i = 0; i < k; ++i)
            if (ids(t)[i] >= 0 && ids(t)[i] < op.n_experts) ++starts[ids(t)[i] + 1];
    for (int32_t e = 0; e < op.n_experts; ++e) starts[e + 1] += starts[e];
    for (int64_t t = 0; t < n_rows; ++t)
        for (int64_t i = 0; i < k; ++i) {
            int32_t e = ids(t)[i];
            if (e < 0 || e >= op.n_experts) continue;
            rows[starts[e]] = static_cast<int32_t>(t);
            factors[starts[e]++] = weights(t)[i];
        }
    for (int32_t e = op.n_experts; e > 0; --e) starts[e] = starts[e - 1];
    starts[0] = 0;
}

void clamp_row(const pk_op_experts &op, float *hidden) {
    int64_t width = op.up.rows;
    for (int64_t j = 0; j < width; ++j) {
        float gate = std::min(hidden[j], op.limit), up = std::min(std::max(hidden[width + j], -op.limit), op.limit);
        hidden[j] = gate / (1.0f + std::exp(-op.alpha * gate)) * (up + 1.0f);
    }
}

void start_rows(const pk_op_experts &op, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        auto *y = numbers<float>(op.y.data + t * op.y.stride);
        if (!op.add.data)
            std::fill(y, y + op.y.cols, 0.0f);
        else if (op.add.data != op.y.data)
            std::memcpy(y, numbers<const float>(op.add.data + t * op.add.stride), op.y.cols * sizeof(float));
    }
}

}  // namespace

int64_t experts_workspace_bytes(const Context &context, const pk_op_experts &op, int64_t n_rows) { return scratch_of(context, op, n_rows).bytes; }

void run_route(Run &run, const pk_op_route &op) {
    int64_t n = resolve_rows(op.logits.rows, run.n_tokens, run.n_samples);
    run.context.pool.parallel_for(n, std::max<int64_t>(run.context.pool.grain(n), 4), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t)
            route_row(op, numbers<const float>(op.logits.data + t * op.logits.stride), numbers<int32_t>(op.ids.data + t * op.ids.stride),
                      numbers<float>(op.weights.data + t * op.weights.stride));
    });
}

void run_experts(Run &run, const pk_op_experts &op, const ExpertPlaces &places) {
    int64_t n_rows = resolve_rows(op.x.rows, run.n_tokens, run.n_samples), cols = op.x.cols, width = op.up.rows;
    Scratch s = scratch_of(run.context, op, n_rows);
    auto *starts = reinterpret_cast<int32_t *>(run.shared + s.starts), *rows = reinterpret_cast<int32_t *>(run.shared + s.rows);
    auto *factors = reinterpret_cast<float *>(run.shared + s.factors);
    auto *x = reinterpret_cast<float *>(run.shared + s.x), *hidden = reinterpret_cast<float *>(run.shared + s.hidden), *out = reinterpret_cast<float *>(run.shared + s.out);
    auto address = [](const void *p) { return reinterpret_cast<uint64_t>(p); };
    sort_pairs(op, n_rows, starts, rows, factors);
    Pool &pool = run.context.pool;
    auto by_rows = [&](int64_t n, const auto &body) { pool.parallel_for(n, std::max<int64_t>(pool.grain(n), 1 + 8192 / cols), body); };
    by_rows(n_rows, [&](int64_t begin, int64_t end, int32_t) { start_rows(op, begin, end); });
    for (int32_t e = 0; e < op.n_experts; ++e) {
        int64_t first = starts[e], n = starts[e + 1] - first;
        if (n == 0) continue;
        by_rows(n, [&](int64_t begin, int64_t end, int32_t) {
            for (int64_t i = begin; i < end; ++i) std::memcpy(x + i * cols, numbers<const float>(op.x.data + rows[first + i] * op.x.stride), cols * sizeof(float));
        });
        matmul(run.context, first_product(op, places, address(x), address(hidden), e), n, run.shared + s.matmul);
        if (op.act == PK_ACT_SWIGLU_CLAMP)
            by_rows(n, [&](int64_t begin, int64_t end, int32_t) {
                for (int64_t i = begin; i < end; ++i) clamp_row(op, hidden + i * 2 * width);
            });
        if (op.act == PK_ACT_RELU2)
            by_rows(n, [&](int64_t begin, int64_t end, int32_t) {
                for (int64_t i = begin * width; i < end * width; ++i) hidden[i] = hidden[i] > 0 ? hidden[i] * hidden[i] : 0.0f;
            });
        matmul(run.context, second_product(op, places, address(hidden), address(out), e), n, run.shared + s.matmul);
        by_rows(n, [&](int64_t begin, int64_t end, int32_t) {
            for (int64_t i = begin; i < end; ++i) {
                auto *y = numbers<float>(op.y.data + rows[first + i] * op.y.stride);
                float factor = factors[first + i] * op.scale;
                for (int64_t j = 0; j < op.y.cols; ++j) y[j] += factor * out[i * op.y.cols + j];
            }
        });
    }
}

void run_sigmoid(Run &run, const pk_op_sigmoid &op) {
    int64_t n = resolve_rows(op.x.rows, run.n_tokens, run.n_samples);
    run.context.pool.parallel_for(n, std::max<int64_t>(run.context.pool.grain(n), 1 + 4096 / op.x.cols), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            const auto *x = numbers<const float>(op.x.data + t * op.x.stride), *g = numbers<const float>(op.g.data + t * op.g.stride);
            auto *out = numbers<float>(op.out.data + t * op.out.stride);
            float one = 1.0f / (1.0f + std::exp(-g[0]));
            for (int64_t j = 0; j < op.x.cols; ++j) out[j] = x[j] * (op.g.cols == 1 ? one : 1.0f / (1.0f + std::exp(-g[j])));
        }
    });
}

}  // namespace pk
