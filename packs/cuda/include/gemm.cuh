// Arguments of the tiled matmuls (more rows than the streaming kernel takes): y[rows, N] = x[rows, K] W^T, bf16 operands.
#pragma once
#include "context.h"
#include "skinny.cuh"

namespace pk {

constexpr int64_t kGemmFlagBytes = 4 * kMaxBlocks * 4, kGemmFlagsAt = kCounterBytes - kSkinnyFlagBytes - kGemmFlagBytes;  // before the skinny kernel's
constexpr int64_t kPartFloats = 128 * 256;  // the sums of a tile

struct GemmWeight {
    const void *data;        // bf16 [rows, K] row-major
    const float *row_scale;  // [rows] or null
    const float *bias;       // [rows] or null
    const float *block_scale;  // [rows/128][K/128] or null; FP8 only
    int64_t block_stride;
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
    const float *x_scale;  // [K/128][rows]; FP8 only (FP4: a factor of each row)
    float *partial;        // gemm_partial_bytes; null: no tile is cut along K
    int32_t *flags;        // kGemmFlagBytes, zero before the first launch, then the kernel's own
    int64_t x_scale_stride;
    int64_t x_row_bytes, y_stride, add_stride;
    int64_t rows_symbol;
    int32_t y_format, add_format;
    int32_t n_w, k, n_tiles, min_rows, act;
    bool are_unpacked;     // the weights are what the kernel before leaves
    int32_t planned_rows;  // rows that tiles are dealt out for; 0: as many as the step has
    float scale, softcap;
    int32_t fp4;  // the format of x and W where they are rows of fp4.cuh; else 0
};

// Both take bf16 x with rows of 16-byte multiples, or (x_scale is there) x and FP8 weights as narrow_fp8 leaves them.
// Ampere and later: cp.async, ldmatrix, mma.sync; FP8 in packs built for sm_89 and sm_120; rows of fp4.cuh where has_fp4_mma.
bool has_fp8_mma();
int32_t launch_gemm_mma(const Launch &l, GemmArguments arguments, int64_t max_rows);
// Hopper: TMA and wgmma.
bool has_wgmma(const pk_ctx *ctx);
int64_t gemm_partial_bytes(int32_t n_processors);
int32_t launch_gemm_wgmma(const Launch &l, const GemmArguments &arguments, int64_t max_rows);

// Blackwell: TMA and tcgen05; only where the context tries kernels that never ran.
bool has_tcgen05(const pk_ctx *ctx);
int32_t launch_gemm_tcgen05(const Launch &l, const GemmArguments &arguments, int64_t max_rows);

// x (F32 or BF16, x_row_bytes apart) as e4m3 per row and 128 columns in scratch; the arguments say so afterwards.
int64_t fp8_scratch(int64_t max_rows, int64_t cols);
int32_t narrow_fp8(const Launch &l, GemmArguments &arguments, int64_t max_rows, int32_t x_format);

}  // namespace pk
