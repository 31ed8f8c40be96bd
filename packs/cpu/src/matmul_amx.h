// Products of many rows with AMX: what matmul_tiles.cpp hands to the two AMX sources.
#pragma once
#include <cstdint>

#include "format/layout.h"
#include "matmul_kernels.h"

namespace pk {

// Two panels of one kind (coded or plain) whose sums lie side by side; gated: one finish for both. n_finish 1 without a
// gate: there is no second panel.
struct PanelPair {
    struct Panel {
        int32_t format;
        const uint8_t *data;
        const PanelShape *shape;
    } panel[2];
    Finish finish[2];
    int32_t n_finish;
    int32_t is_gated;

    int32_t n_panels() const { return n_finish == 2 || is_gated ? 2 : 1; }
};

// Rows of x and pairs of one piece of work. A tile is 1 KiB: 16 rows x 32 columns of bf16.
struct TileJob {
    int64_t n_tiles;      // along K
    int64_t block_tiles;  // of them decoded at a time
    int64_t first_row_tile, n_row_tiles;
    int64_t n_rows;       // of x in all: row tiles end here
    int64_t in_turn;      // pairs that take turns at a block of K
    uint16_t *tiles;      // scratch, see *_scratch_tiles
    float *scales;        // coded: scratch of in_turn x 2 x block_tiles x kGroupScales
    float *sums;          // scratch of in_turn x [row of the job][32]
    // Plain weights: x = upper + lower in bf16, [row tile][tile along K].
    const uint16_t *x_upper, *x_lower;
    // Coded weights: per (row tile, group) a tile of 128 high and one of low (matmul_codes.h), and kGroupSums floats: for
    // 16 rows the sum of the integers, of each half of them, and the scale of the block.
    const uint16_t *x_codes;
    const float *x_sums;
};

constexpr int64_t kGroupSums = 64;
constexpr int64_t kGroupScales = 48;  // d, m, m of the second half
constexpr int64_t plain_scratch_tiles(int64_t block_tiles) { return 8 * block_tiles; }
constexpr int64_t coded_scratch_tiles(int64_t block_tiles, int64_t in_turn) { return 4 * block_tiles * in_turn; }

struct TileKernels {
    // Up to 16 rows of x as one row of tiles; missing rows and columns are zero.
    void (*pack)(const float *x, int64_t stride, int64_t cols, int64_t n_rows, uint16_t *upper, uint16_t *lower);
    void (*pack_codes)(const float *x, int64_t stride, int64_t cols, int64_t n_rows, uint16_t *codes, float *sums);
    void (*run)(const TileJob &job, const PanelPair *pairs, int64_t n_pairs);
    void (*run_codes)(const TileJob &job, const PanelPair *pairs, int64_t n_pairs);
};

const TileKernels &tile_kernels_amx();

// Of matmul_codes_amx.cpp, for the table above.
void pack_code_tiles_amx(const float *x, int64_t stride, int64_t cols, int64_t n_rows, uint16_t *codes, float *sums);
void run_code_pairs_amx(const TileJob &job, const PanelPair *pairs, int64_t n_pairs);

}  // namespace pk
