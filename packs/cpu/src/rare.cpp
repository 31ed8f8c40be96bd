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

}  // namespace

bool has_rare_op(int32_t op) { return op == PK_OP_SOFTPLUS; }

void run_rare(Run &run, const Record &record) {
    switch (record.op) {
        case PK_OP_SOFTPLUS: run_softplus(run, record.as<pk_op_softplus>()); break;
        default: break;
    }
}

}  // namespace pk
