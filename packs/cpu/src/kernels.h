// The op kernels of each instruction level, as tables of functions. Work is given in ranges of rows or items, so that
// ops.cpp can spread it over the pool; nothing here knows threads.
#pragma once
#include <cstdint>

#include "../../pack.h"
#include "attention.h"

namespace pk {

struct Kernels {
    // Rows [begin, end) of the record.
    void (*norm)(const pk_op_norm &op, int64_t begin, int64_t end);
    void (*gate)(const pk_op_gate &op, int64_t begin, int64_t end);
    void (*add)(const pk_op_add &op, int64_t begin, int64_t end);
    void (*copy)(const pk_op_copy &op, int64_t begin, int64_t end);
    void (*scale)(float *x, int64_t n, float scale);
    // Tokens [begin, end). angles: [T, rope_width / 2] cosines, then as many sines, per token; nullptr: no rotation.
    void (*qkv)(const pk_op_qkv &op, const pk_state &state, const float *angles, int64_t begin, int64_t end);
    void (*attend_decode)(const AttentionJob &job, const AttentionItem &item, void *scratch);
    void (*attend_prefill)(const AttentionJob &job, const AttentionItem &item, void *scratch);
    void (*attend_merge)(const AttentionJob &job, const AttentionItem &item);

    // Logits of one row. Disallowed tokens (bit clear) become -inf; returns the largest value and its lowest index; is_bad
    // when there is a NaN or +inf, or nothing but -inf.
    struct Largest {
        float value;
        int32_t index;
        int32_t is_bad;
    };
    Largest (*largest)(float *logits, int64_t n, const uint32_t *mask);
    // Sum of exp((x - top) * factor) over the values >= threshold.
    double (*sum_exp)(const float *logits, int64_t n, float top, float factor, float threshold);
    // How many values are >= threshold.
    int64_t (*count)(const float *logits, int64_t n, float threshold);
    // Lowest index at which the running sum of exp((x - top) * factor) exceeds target; -1 when it never does.
    int64_t (*find_sum)(const float *logits, int64_t n, float top, float factor, double target);
    // Indices of values >= threshold, ascending, at most max of them; returns how many there are.
    int64_t (*collect)(const float *logits, int64_t n, float threshold, int32_t *out, int64_t max);
};

const Kernels &kernels_avx2();
const Kernels &kernels_avx512();
const Kernels &kernels_amx();

}  // namespace pk
