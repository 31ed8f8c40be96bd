// What kernels of few rows of x share: rows of a launch, and tiles of up to three weights dealt out to blocks.
#pragma once
#include "device.cuh"
#include "skinny.cuh"

namespace pk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Rows of this launch; none when the step is another kernel's.
template <int kNT>
__device__ __forceinline__ int rows_here(const SkinnyArguments &a) {
    const int n = rows_of(a.info, a.rows_symbol);
    return n < a.min_rows || n > a.max_rows ? 0 : min(n - a.first_row, kNT);
}

// A tile's weight. first_tile: of the second and of the third weight.
template <bool kGated>
__device__ __forceinline__ int weight_of_tile(const int32_t (&first_tile)[2], int tile) {
    return kGated ? 0 : tile >= first_tile[1] ? 2 : tile >= first_tile[0] ? 1 : 0;
}

// The tile's first row of weight i: tiles are 16 rows, eight of gate and of up, or (kHeads) eight of each half of a head.
template <bool kGated, bool kHeads>
__device__ __forceinline__ int row_of_tile(const int32_t (&first_tile)[2], int tile, int i) {
    const int t = tile - (i == 0 ? 0 : i == 1 ? first_tile[0] : first_tile[1]);
    return kGated ? tile * 8 : kHeads ? t / 8 * 128 + t % 8 * 8 : t * 16;
}
#endif

}  // namespace pk
