// Arguments of the tiled matmuls (more rows than the streaming kernel takes): y[rows, N] = x[rows, K] W^T, bf16 operands.
#pragma once
#include "context.h"
#include "quantise.cuh"
#include "skinny.cuh"

namespace pk {

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
    int64_t x_scale_stride;
    int64_t x_row_bytes, y_stride, add_stride;
    int64_t rows_symbol;
    int32_t y_format, add_format;
    int32_t n_w, k, n_tiles, min_rows, act;
    bool are_unpacked;  // the weights are what the kernel before leaves
    Narrowed narrowed;  // where y goes narrowed, too: of gated products that leave it so; of one in front of a norm what that leaves
    int32_t most_rows;  // bound of rows
    float scale, softcap;
    HalfNorm norm;    // of even and tall products
    HeadsEnd heads;   // of even ones
    int32_t fp4;  // the format of x and W where they are rows of fp4.cuh; else 0
};

// Both take bf16 x with rows of 16-byte multiples, or (x_scale is there) x and FP8 weights as narrow_fp8 leaves them.
// Ampere and later: cp.async, ldmatrix, mma.sync; FP8 in packs built for sm_89 and sm_120; rows of fp4.cuh where has_fp4_mma.
bool has_fp8_mma();
int32_t launch_gemm_mma(const Launch &l, GemmArguments arguments, int64_t max_rows);
// Hopper: TMA and wgmma; up to so many rows by clusters of blocks, more of FP8 by gemm_fp8. leaves_narrowed: whether a gated product of that shape has a row's 128
// columns in one block.
constexpr int64_t kClusterRows = 512, kFp8ClusterRows = 256, kTallRows = 1536;
bool has_wgmma(const pk_ctx *ctx);
int32_t launch_gemm_wgmma(const Launch &l, GemmArguments arguments, int64_t max_rows);
int32_t launch_gemm_fp8(const Launch &l, const GemmArguments &arguments, int64_t max_rows);
int32_t launch_gemm_cluster(const Launch &l, const GemmArguments &arguments, int64_t max_rows);
// 129 to kTallRows rows in BF16, to kFp8ClusterRows in FP8, by tall tiles, where they can do it and gain: no ladders, caps or scales of columns, whole boxes of columns
// (FP8: whole blocks of scales), SiLU and tanh's GELU (FP8: SiLU), and not the smallest. Gated ones of FP8 can leave y narrowed.
bool is_tall(const Launch &l, const GemmArguments &arguments, int64_t max_rows);
bool tall_is_cut(const Launch &l, const GemmArguments &arguments, int64_t max_rows);
int64_t tall_most_parts_bytes(const Launch &l);  // of the scratch, that a product of FP8 weights may take for parts of its tiles
bool tall_leaves_narrowed(const Launch &l, int64_t max_rows, int64_t n, int64_t k);
int32_t launch_gemm_tall(const Launch &l, const GemmArguments &arguments, int64_t max_rows);
bool leaves_narrowed(const Launch &l, int64_t max_rows, int64_t n, int64_t k);
bool fp8_leaves_narrowed(const Launch &l, int64_t max_rows, int64_t n, int64_t k);

// Blackwell: TMA and tcgen05; only where the context tries kernels that never ran.
bool has_tcgen05(const pk_ctx *ctx);
int32_t launch_gemm_tcgen05(const Launch &l, const GemmArguments &arguments, int64_t max_rows);

// x (F32 or BF16, x_row_bytes apart) as e4m3 per row and 128 columns in scratch, unless it is given; the arguments say so afterwards.
int32_t narrow_fp8(const Launch &l, GemmArguments &arguments, int64_t max_rows, int32_t x_format, const Narrowed &given);

}  // namespace pk
