// Narrowing of activations to FP8 (src/matmul/quantise.cu).
#pragma once
#include "context.h"

namespace pk {

// x [rows, k] to out [rows, out_stride] (a multiple of 128, zeros behind k), scales [out_stride / 128][scale_stride]. Nothing is done in a step
// of fewer than min_rows rows. Strides in elements; info and is_wide are the launch's.
struct QuantiseArguments {
    const void *x;
    uint8_t *out;
    float *scales;
    const StepInfo *info;
    int64_t x_stride, out_stride, scale_stride, rows_symbol;
    int32_t x_format, k, min_rows, is_wide;
};

int32_t launch_quantise(const Launch &l, QuantiseArguments a, int64_t max_rows);

}  // namespace pk
