// Arguments of the skinny matmul (src/matmul/skinny.cu): 3 to 128 rows of x on Hopper.
#pragma once
#include <cuda.h>

#include "context.h"

namespace pk {

constexpr int32_t kMaxBlocks = 512;
constexpr int64_t kSkinnyFlagBytes = 4 * kMaxBlocks * 4;  // the last of the workspace's counters

struct SkinnyWeight {
    const uint8_t *data;
    const float *row_scale;    // [rows] or null
    const float *block_scale;  // [rows/128][K/128] or null
    const float *bias;         // [rows] or null
    int32_t rows;
    int32_t n_tiles16;  // tiles of 16 rows in memory
    int32_t first_tile;
    int32_t first_column;
    int32_t block_stride;
    float scale;
};

struct SkinnyArguments {
    SkinnyWeight w[3];
    const void *x;    // bf16, rows of 16-byte multiples
    void *y;
    const void *add;
    const StepInfo *info;
    float *partial;   // [blocks][2][tile]
    int32_t *flags;   // 4 x kMaxBlocks, zero before the first launch, then the kernel's own
    int64_t x_stride, y_stride, add_stride;  // elements
    int64_t rows_symbol;
    int32_t y_format, add_format;
    int32_t n_w, k, n_units, n_tiles;
    int32_t min_rows, max_rows;  // the launch does nothing for other row counts
    int32_t first_row;           // of x that this launch is about; it takes at most 128
    int32_t act;
    float scale, softcap;
};

// Bytes of the partial sums.
int64_t skinny_partial_bytes(int32_t n_processors, int64_t max_rows);

template <int kFormat>
int32_t launch_skinny(const Launch &l, SkinnyArguments arguments, const Packed *const *packed, int64_t max_rows);

}  // namespace pk
