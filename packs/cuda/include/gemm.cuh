// Arguments of the tiled matmuls (more rows than the streaming kernel takes): y[rows, N] = x[rows, K] W^T, bf16 operands.
#pragma once
#include "context.h"

namespace pk {

struct GemmWeight {
    const void *data;        // bf16 [rows, K] row-major
    const float *row_scale;  // [rows] or null
    const float *bias;       // [rows] or null
    int64_t row_bytes;
    int32_t rows;
    int32_t first_tile;
    int32_t first_column;
    float scale;
};

struct GemmArguments {
    GemmWeight w[3];
    const void *x;  // bf16
    void *y;
    const void *add;
    const StepInfo *info;
    int64_t x_row_bytes, y_stride, add_stride;
    int64_t rows_symbol;
    int32_t y_format, add_format;
    int32_t n_w, k, n_tiles, min_rows, act;
    float scale, softcap;
};

// Ampere and later: cp.async, ldmatrix, mma.sync.
int32_t launch_gemm_mma(const Launch &l, GemmArguments arguments, int64_t max_rows);

}  // namespace pk
