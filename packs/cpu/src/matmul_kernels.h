// Matrix product kernels of each instruction level, as tables of functions. They know panels and blocks of rows;
// matmul.cpp cuts the product into those and spreads them over the pool.
#pragma once
#include <cstdint>

#include "../../pack.h"
#include "format/layout.h"

namespace pk {

// 32 activations of one row as integers: x = scale * (128 high + low), see matmul_codes.h. The sums of these integers
// serve offsets and minima of the weights.
struct CodedX {
    int8_t high[32];
    int8_t low[32];
    int32_t minus_sum;
    int32_t minus_half[2];  // of each sixteen
    float sum;
    float half_sum[2];
    float scale;            // of the block of 256 columns
    float unused;
};
static_assert(sizeof(CodedX) == 96);

// out[r][n] = sum over columns of x[r] * panel[n], for the R rows that the kernel is made for.
// x of coded formats: CodedX [n_groups][R] (or what pack_coded makes of it); of plain formats: f32 [K rounded up to 2][R].
using PanelKernel = void (*)(const uint8_t *panel, const PanelShape &shape, const void *x, float *out);

// What happens to sums before they are stored.
struct Finish {
    const pk_op_matmul *op;
    const float *bias[2];  // of this panel's rows, or nullptr
    int64_t column;        // of y
    int64_t n_columns;     // 1..16
};

struct MatmulKernels {
    int32_t max_block;                            // rows of x that one kernel call takes at most
    int32_t (*block_rows)(int64_t n_rows);        // rows of the kernel to use for n_rows <= max_block rows
    PanelKernel (*panel)(int32_t format, int32_t block_rows);
    // One block of `n_rows` rows, filled with zeros up to block_rows.
    void (*pack_coded)(const float *x, int64_t stride, int64_t cols, int64_t n_rows, int64_t block_rows, void *out);
    void (*pack_plain)(const float *x, int64_t stride, int64_t cols, int64_t n_rows, int64_t block_rows, float *out);
    // Rows [row, row + n_rows) of y from sums [n_rows][16], `sum_stride` floats apart; gated products have two sums.
    void (*finish)(const Finish &finish, int64_t row, int64_t n_rows, const float *sums, const float *gated_sums, int64_t sum_stride);
};

const MatmulKernels &matmul_kernels_avx2();
const MatmulKernels &matmul_kernels_avx512();
const MatmulKernels &matmul_kernels_amx();  // as avx512, but for blocks of 8 rows of coded formats

}  // namespace pk
