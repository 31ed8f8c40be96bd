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

// Activations as products with FP8 weights of many rows read them: e4m3 with a scale per row and 128 columns.
struct Narrowed {
    uint8_t *x = nullptr;     // rows of row_bytes, a multiple of 128
    float *scales = nullptr;  // [row_bytes / 128][scale_stride]
    int64_t row_bytes = 0, scale_stride = 0;
    bool is_all = false;  // nobody reads the operand as it is: it need not be written
};

// Where in the scratch a product looks for them.
Narrowed narrowed_in(uint8_t *scratch, int64_t max_rows, int64_t cols);

// launch_norm that leaves its output narrowed, too, where it can.
bool can_narrow(const pk_op_norm &op);
int32_t launch_norm_narrowing(const Launch &l, const pk_op_norm &op, const Narrowed &to);

// Whether a product narrows x; whether it can leave y narrowed.
bool narrows_input(const Launch &l, const pk_op_matmul &op);
bool can_narrow_output(const Launch &l, const pk_op_matmul &op);
int64_t fp8_scratch(int64_t max_rows, int64_t cols);

int32_t launch_quantise(const Launch &l, QuantiseArguments a, int64_t max_rows);

}  // namespace pk
