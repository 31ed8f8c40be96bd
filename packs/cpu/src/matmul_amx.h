// Products of many rows with AMX: what matmul.cpp hands to matmul_amx.cpp.
#pragma once
#include <cstdint>

#include "format/layout.h"

namespace pk {

// Activations as bf16 tiles of 16 rows x 32 columns (1 KiB): [row tile][tile along K]. x_lower: the same of what bf16 cut off.
struct TileJob {
    const uint16_t *x, *x_lower;
    int64_t n_tiles;      // along K
    int64_t block_tiles;  // of them decoded at a time
    int64_t first_row_tile, n_row_tiles;
};

// Two panels whose sums lie side by side. Both are split in two parts (f16, f32), or neither is.
struct PanelPair {
    struct Panel {
        int32_t format;
        const uint8_t *data;
        const PanelShape *shape;
    } panel[2];
};

struct TileKernels {
    void (*pack_tiles)(const float *x, int64_t stride, int64_t cols, int64_t n_rows, uint16_t *out, uint16_t *lower);
    // sums: [pair][row of the job][32]; tiles: scratch of 4 x block_tiles tiles.
    void (*run_pairs)(const TileJob &job, const PanelPair *pairs, int64_t n_pairs, uint16_t *tiles, float *sums);
};

const TileKernels &tile_kernels_amx();

}  // namespace pk
