// Ops that few families need (rare.h).
#include "../../rare.h"

#include <algorithm>
#include <cmath>

#include "ops.h"
#include "recurrent.h"

namespace pk {
namespace {

void run_softplus(Run &run, const pk_op_softplus &op) {
    int64_t n = resolve_rows(op.x.rows, run.n_tokens, run.n_samples), share = op.x.cols / op.g.cols;
    run.context.pool.parallel_for(n, std::max<int64_t>(run.context.pool.grain(n), 1 + 4096 / op.x.cols), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            const float *x = row_of(op.x, t), *g = row_of(op.g, t);
            auto *out = numbers<float>(op.out.data + t * op.out.stride);
            for (int64_t j = 0; j < op.g.cols; ++j) {
                const auto factor = static_cast<float>(softplus(g[j]));
                for (int64_t i = j * share; i < (j + 1) * share; ++i) out[i] = x[i] * factor;
            }
        }
    });
}

void weigh_row(const pk_op_weigh &op, int64_t t) {
    const auto *ids = numbers<const int32_t>(op.ids.data + t * op.ids.stride);
    auto *weights = numbers<float>(op.weights.data + t * op.weights.stride);
    const int64_t k = op.ids.cols;
    if (op.logits.data) {
        const auto *logits = numbers<const float>(op.logits.data + t * op.logits.stride);
        double sum = 0;
        for (int64_t i = 0; i < k; ++i) sum += weights[i] = static_cast<float>(1 / (1 + std::exp(-static_cast<double>(logits[ids[i]]))));
        for (int64_t i = 0; i < k && op.is_normalised; ++i) weights[i] = static_cast<float>(weights[i] / sum);
    }
    if (!op.scales.data) return;
    const auto *scales = numbers<const float>(op.scales.data);
    for (int64_t i = 0; i < k; ++i) weights[i] *= scales[ids[i]];
}

void run_weigh(Run &run, const pk_op_weigh &op) {
    int64_t n = resolve_rows(op.ids.rows, run.n_tokens, run.n_samples);
    run.context.pool.parallel_for(n, std::max<int64_t>(run.context.pool.grain(n), 256), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) weigh_row(op, t);
    });
}

}  // namespace

bool has_rare_op(int32_t op) { return op == PK_OP_SOFTPLUS || op == PK_OP_WEIGH; }

void run_rare(Run &run, const Record &record) {
    switch (record.op) {
        case PK_OP_SOFTPLUS: run_softplus(run, record.as<pk_op_softplus>()); break;
        case PK_OP_WEIGH: run_weigh(run, record.as<pk_op_weigh>()); break;
        default: break;
    }
}

}  // namespace pk
