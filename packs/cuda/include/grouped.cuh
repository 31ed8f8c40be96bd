// Products of many pairs with experts' stacks on Hopper's asynchronous units (src/experts/grouped.cu): what the op gives them.
#pragma once
#include "experts.cuh"

namespace pk {

// x by pairs' positions (bf16, or e4m3 with scales per position and 128 columns) times one or two stacks of the same format.
// Two: the activation of the first times the second, stored as x of the next product; one: bf16 [position, rows first_row to first_row + n_rows).
struct GroupedProduct {
    ExpertWeight w[2];
    const uint8_t *x;
    uint8_t *out;
    const float *x_scales;  // [columns / 128][scale_stride], e4m3 only
    float *out_scales;
    const ExpertItem *items;
    const int32_t *n_items;
    int64_t positions, scale_stride, x_stride, out_stride;  // strides of x and out in elements
    int32_t k, n_places, first_row, n_rows, act;
};

// Rows of x to the positions of their pairs; e4m3: narrowed with a scale per row and 128 columns, zeros behind k.
struct SpreadArguments {
    const void *x;
    uint8_t *out;
    float *scales;
    const int32_t *rank;  // [rows, n_used]: position of a pair, -1 for none
    const StepInfo *info;
    int64_t x_stride, out_stride, scale_stride, rows_symbol;  // x_stride and out_stride in elements
    int32_t x_format, n_used, k, n_chunks;
};

constexpr int32_t kGroupedAlign = 4;  // an expert's first position is a multiple of it, so that its scales can be copied in bulk

int32_t launch_grouped(const Launch &l, const GroupedProduct &p, bool is_fp8, bool is_pair);
int32_t launch_spread(const Launch &l, SpreadArguments a, bool is_fp8, int64_t max_rows);

}  // namespace pk
