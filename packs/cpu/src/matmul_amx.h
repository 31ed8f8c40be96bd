// Products of many rows with AMX: what matmul_tiles.cpp hands to matmul_amx.cpp.
#pragma once
#include <cstdint>

#include "format/layout.h"
#include "matmul_kernels.h"

namespace pk {

// Two panels whose sums lie side by side; gated: one finish for both. n_finish 1 with no gate: the second panel is idle.
struct PanelPair {
    struct Panel {
        int32_t format;
        const uint8_t *data;
        const PanelShape *shape;
    } panel[2];
    Finish finish[2];
    int32_t n_finish;
    int32_t is_gated;
};

// Activations as bf16 tiles of 16 rows x 32 columns (1 KiB): [row tile][tile along K]. x_lower: the same of what bf16 cut off.
struct TileJob {
    const uint16_t *x, *x_lower;
    int64_t n_tiles;      // along K
    int64_t block_tiles;  // of them decoded at a time
    int64_t first_row_tile, n_row_tiles;
    int64_t n_rows;       // of x in all: row tiles end here
    int64_t in_turn;      // pairs that take turns at a block of K; 1: every pair goes through K alone
    uint16_t *tiles;      // scratch of 8 x block_tiles tiles
    float *sums;          // scratch of in_turn x [row of the job][32]
};

struct TileKernels {
    void (*pack_tiles)(const float *x, int64_t stride, int64_t cols, int64_t n_rows, uint16_t *out, uint16_t *lower);
    void (*run_pairs)(const TileJob &job, const PanelPair *pairs, int64_t n_pairs);
};

const TileKernels &tile_kernels_amx();

}  // namespace pk
