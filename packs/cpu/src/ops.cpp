// Row ops of the CPU pack: spreads the kernels' rows over the pool.
#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "matmul.h"

namespace pk {
namespace {

// Numbers that one piece of work should touch at least: below that a second thread costs more than it brings.
constexpr int64_t kPieceNumbers = 8192;

// Rows per piece for rows of `cols` numbers.
int64_t row_grain(const Run &run, int64_t n_rows, int64_t cols) {
    int64_t least = (kPieceNumbers + cols - 1) / (cols > 0 ? cols : 1), even = run.context.pool.grain(n_rows);
    return even > least ? even : least;
}

int64_t rows_of(const Run &run, const pk_tensor &t) { return resolve_rows(t.rows, run.n_tokens, run.n_samples); }

void fill_angles(Run &run, Angles &angles) {
    const auto *frequency = numbers<const float>(angles.frequency);
    const auto *position = numbers<const int32_t>(run.state.token_position);
    int64_t half = angles.width / 2;
    run.context.pool.parallel_for(run.n_tokens, 8, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            float *cosines = angles.table + t * angles.width, *sines = cosines + half;
            for (int64_t i = 0; i < half; ++i) {
                double angle = static_cast<double>(position[t]) * frequency[i];
                cosines[i] = static_cast<float>(std::cos(angle) * angles.magnitude);
                sines[i] = static_cast<float>(std::sin(angle) * angles.magnitude);
            }
        }
    });
    angles.n_ready = run.n_tokens;
}

void add_row(const pk_tensor &table, int64_t row, float *out) {
    const auto *from = numbers<const float>(table.data + row * table.stride);
    for (int64_t i = 0; i < table.cols; ++i) out[i] += from[i];
}

}  // namespace

void run_embed(Run &run, const pk_op_embed &op) {
    const auto *ids = numbers<const int32_t>(run.state.token_id), *positions = numbers<const int32_t>(run.state.token_position);
    run.context.pool.parallel_for(run.n_tokens, row_grain(run, run.n_tokens, op.out.cols), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t t = begin; t < end; ++t) {
            auto *out = numbers<float>(op.out.data + t * op.out.stride);
            int64_t id = ids[t] % op.table.rows, type = ids[t] / op.table.rows;
            if (op.table.layout == PK_PACKED)
                packed_row_to_f32(run.context, op.table, id, out);
            else
                source_row_to_f32(op.table.format, numbers<const void>(op.table.data + id * op.table.stride), op.table.cols, out);
            if (op.scale != 1.0f) run.kernels.scale(out, op.out.cols, op.scale);
            if (op.positions.data) add_row(op.positions, std::min<int64_t>(int64_t{positions[t]} + op.position_offset, op.positions.rows - 1), out);
            if (op.types.data) add_row(op.types, type, out);
        }
    });
}

void run_norm(Run &run, const pk_op_norm &op) {
    int64_t n = rows_of(run, op.x);
    run.context.pool.parallel_for(n, row_grain(run, n, op.x.cols), [&](int64_t begin, int64_t end, int32_t) { run.kernels.norm(op, begin, end); });
}

void run_gate(Run &run, const pk_op_gate &op) {
    int64_t n = rows_of(run, op.x);
    run.context.pool.parallel_for(n, row_grain(run, n, op.x.cols), [&](int64_t begin, int64_t end, int32_t) { run.kernels.gate(op, begin, end); });
}

void run_add(Run &run, const pk_op_add &op) {
    int64_t n = rows_of(run, op.x);
    run.context.pool.parallel_for(n, row_grain(run, n, op.x.cols), [&](int64_t begin, int64_t end, int32_t) { run.kernels.add(op, begin, end); });
}

void run_copy(Run &run, const pk_op_copy &op) {
    int64_t n = rows_of(run, op.x);
    run.context.pool.parallel_for(n, row_grain(run, n, op.x.cols), [&](int64_t begin, int64_t end, int32_t) { run.kernels.copy(op, begin, end); });
}

void run_gather(Run &run, const pk_op_gather &op) {
    const auto *at = numbers<const int32_t>(run.state.sample_at), *rows = numbers<const int32_t>(run.state.sample_row);
    const auto *starts = numbers<const int32_t>(run.state.row_start);
    run.context.pool.parallel_for(run.n_samples, row_grain(run, run.n_samples, op.x.cols), [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t s = begin; s < end; ++s) {
            int64_t first = starts[rows[s]], last = op.pool == PK_POOL_LAST ? at[s] : starts[rows[s] + 1] - 1;
            auto *out = numbers<float>(op.out.data + s * op.out.stride);
            std::memcpy(out, numbers<const void>(op.x.data + (op.pool == PK_POOL_LAST ? last : first) * op.x.stride), op.x.cols * sizeof(float));
            if (op.pool != PK_POOL_MEAN) continue;
            for (int64_t t = first + 1; t <= last; ++t) add_row(op.x, t, out);
            run.kernels.scale(out, op.x.cols, 1.0f / static_cast<float>(last + 1 - first));
        }
    });
}

void run_qkv(Run &run, const pk_op_qkv &op) {
    const float *table = nullptr;
    if (op.frequency.data) {
        if (run.angles->n_ready != run.n_tokens) fill_angles(run, *run.angles);
        table = run.angles->table;
    }
    run.context.pool.parallel_for(run.n_tokens, row_grain(run, run.n_tokens, op.qkv.cols),
                                  [&](int64_t begin, int64_t end, int32_t) { run.kernels.qkv(op, run.state, table, begin, end); });
}

int32_t check_cpu(const Context &context, const Record &record, int64_t index) {
    if (record.op == PK_OP_MATMUL) return matmul_check(context, record.as<pk_op_matmul>(), index);
    if (record.op == PK_OP_COPY) {
        const auto &op = record.as<pk_op_copy>();
        bool is_float = op.x.format <= PK_BF16 && op.out.format <= PK_BF16;
        if (op.x.format != op.out.format && !is_float)
            return fail(PK_UNSUPPORTED, "op %lld (copy): the cpu pack converts between f32, f16 and bf16 only, not from format %d to %d",
                        static_cast<long long>(index), op.x.format, op.out.format);
    }
    return PK_OK;
}

}  // namespace pk
