// Arguments of the streaming matmul (src/matmul/stream.cu) and how a launch is shaped.
#pragma once
#include "context.h"

namespace pk {

struct StreamWeight {
    const uint8_t *data;
    const float *row_scale;    // [rows] or null
    const float *block_scale;  // [rows/128][K/128] or null
    const float *bias;         // [rows] or null
    int64_t row_bytes;
    int32_t rows;
    int32_t padded_rows;
    int32_t first_tile;
    int32_t first_column;
    int32_t block_stride;
    float scale;
};

struct StreamArguments {
    StreamWeight w[3];
    const void *x;
    void *y;
    const void *add;
    const StepInfo *info;
    float *partial;     // [n_slices][n_tiles][tile floats]
    int32_t *counters;  // [n_tiles]
    int64_t x_stride, y_stride, add_stride;  // elements
    int64_t rows_symbol;
    int32_t x_format, y_format, add_format;
    int32_t n_w;
    int32_t k, n_units, units_per_slice, n_slices, n_tiles;
    int32_t staged_rows;   // rows of x in shared memory
    int32_t x_row_bytes;   // of a staged row
    int32_t min_rows, max_rows;  // the launch does nothing for other row counts
    int32_t act;
    int32_t is_wide;  // rows of x are read eight elements at a time
    float scale, softcap;
};

struct StreamShape {
    int32_t n_tokens8;  // 1, 2, 4 or 8 groups of eight rows of x
    int32_t tile_rows;  // rows of W per block
    int32_t warps_k;
    int32_t n_slices, units_per_slice, n_tiles, n_blocks;
    int64_t shared_bytes, x_row_bytes;
};

constexpr int32_t kStreamThreads = 256;

// Pure: the shape of a launch. unit: elements of K per step of a warp; total_rows: rows of all weights (output columns when gated).
StreamShape stream_shape(int32_t n_processors, int32_t max_rows, int64_t total_tiles32, int64_t n_units, int32_t unit, int32_t group, bool gated);

template <int kFormat>
int32_t launch_stream(const Launch &l, const StreamShape &shape, const StreamArguments &arguments);

}  // namespace pk
