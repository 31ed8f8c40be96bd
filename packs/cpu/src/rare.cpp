// Ops that few families need (rare.h).
#include "../../rare.h"

#include <algorithm>
#include <cmath>

#include "ops.h"
#include "rare_ops.h"
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

bool has_rare_op(int32_t op) { return op >= PK_OP_SOFTPLUS && op <= PK_OP_POOL; }
bool needs_rare_rows(int32_t op) { return op == PK_OP_NGRAM || op == PK_OP_DILATED || op == PK_OP_SPARSE || (op >= PK_OP_DELTA_SIGMOID && op <= PK_OP_SETTLE_CONV); }

int64_t rare_workspace_bytes(const Context &context, const Record &record, const pk_state &state) {
    if (record.op == PK_OP_SPARSE) return sparse_workspace_bytes(context, record.as<pk_op_sparse>(), state);
    if (record.op == PK_OP_SETTLE_MAMBA) return settle_workspace_bytes(record.as<pk_op_settle_mamba>());
    if (record.op == PK_OP_SETTLE) return settle_workspace_bytes(context, record.as<pk_op_settle>(), state);
    if (record.op == PK_OP_EXPERTS_FETCHED) return experts_workspace_bytes(context, record.as<pk_op_experts_fetched>().experts, state.max_step_tokens);
    return record.op == PK_OP_DELTA_SIGMOID ? delta_workspace_bytes(context, record.as<pk_op_delta>(), state) : 0;
}

void run_rare(Run &run, const Record &record) {
    switch (record.op) {
        case PK_OP_SOFTPLUS: run_softplus(run, record.as<pk_op_softplus>()); break;
        case PK_OP_WEIGH: run_weigh(run, record.as<pk_op_weigh>()); break;
        case PK_OP_NGRAM: run_ngram(run, record.as<pk_op_ngram>()); break;
        case PK_OP_STREAMS: run_streams(run, record.as<pk_op_streams>()); break;
        case PK_OP_DILATED: run_dilated(run, record.as<pk_op_dilated>()); break;
        case PK_OP_SPARSE: run_sparse(run, record.as<pk_op_sparse>()); break;
        case PK_OP_DELTA_SIGMOID: run_delta(run, record.as<pk_op_delta>()); break;
        case PK_OP_KEEP: run_keep(run, record.as<pk_op_keep>()); break;
        case PK_OP_SETTLE: run_settle(run, record.as<pk_op_settle>()); break;
        case PK_OP_SETTLE_MAMBA: run_settle(run, record.as<pk_op_settle_mamba>()); break;
        case PK_OP_SETTLE_CONV: run_settle(run, record.as<pk_op_settle_conv>()); break;
        case PK_OP_SHIFT: run_shift(run); break;
        case PK_OP_GUESS: run_guess(run, record.as<pk_op_guess>()); break;
        case PK_OP_EXPERTS_FETCHED: run_experts_fetched(run, record.as<pk_op_experts_fetched>()); break;
        default: break;  // pool: who walks the records sees to it
    }
}

}  // namespace pk
