// What layers with states need to take guesses back (pk_op_keep in rare.h), and a model's own guess at the token after the next (pk_op_shift, pk_op_guess).
#include <algorithm>
#include <cstring>

#include "rare_ops.h"
#include "recurrent.h"

namespace pk {
namespace {

// The text of a row's slot; nullptr for a row that was dead before the step.
int32_t *text_of(const Run &run, int64_t row) {
    const pk_state &s = run.state;
    if (numbers<const int32_t>(s.row_flags)[row] & PK_ROW_DEAD) return nullptr;
    return numbers<int32_t>(s.tokens) + int64_t{numbers<const int32_t>(s.row_slot)[row]} * (s.max_ctx_tokens + 1);
}

}  // namespace

void run_keep(Run &run, const pk_op_keep &op) {
    const auto *starts = numbers<const int32_t>(run.state.row_start);
    run.context.pool.parallel_for(run.n_rows, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t r = begin; r < end; ++r) {
            if (!is_draft(run, r)) continue;
            uint8_t *slot = slot_state(run, r);
            std::memcpy(slot + op.kept_offset, slot + op.from_offset, op.n_bytes);
            auto *rows = reinterpret_cast<float *>(slot + op.rows_offset);
            for (const pk_tensor *x : {&op.x, &op.b, &op.a}) {
                if (!x->data) continue;
                for (int64_t t = 0; t < std::min<int64_t>(starts[r + 1] - starts[r], op.max_tokens); ++t)
                    std::memcpy(rows + t * x->cols, row_of(*x, starts[r] + t), x->cols * sizeof(float));
                rows += op.max_tokens * x->cols;
            }
        }
    });
}

void run_shift(Run &run) {
    auto *ids = numbers<int32_t>(run.state.token_id);
    const auto *rows = numbers<const int32_t>(run.state.token_row), *positions = numbers<const int32_t>(run.state.token_position);
    for (int64_t t = 0; t < run.n_tokens; ++t)
        if (const int32_t *text = text_of(run, rows[t])) ids[t] = text[positions[t] + 1];
}

void run_guess(Run &run, const pk_op_guess &op) {
    const pk_state &s = run.state;
    const auto *rows = numbers<const int32_t>(s.sample_row), *at = numbers<const int32_t>(s.sample_at), *positions = numbers<const int32_t>(s.token_position);
    run.context.pool.parallel_for(run.n_samples, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t i = begin; i < end; ++i) {
            int32_t *text = text_of(run, rows[i]);
            const int32_t length = numbers<const int32_t>(s.length)[numbers<const int32_t>(s.row_slot)[rows[i]]];
            if (!text || positions[at[i]] != length - 1 || length + 1 > s.max_ctx_tokens) continue;
            const float *logits = row_of(op.logits, i);
            text[length + 1] = static_cast<int32_t>(std::max_element(logits, logits + op.logits.cols) - logits);
        }
    });
}

}  // namespace pk
