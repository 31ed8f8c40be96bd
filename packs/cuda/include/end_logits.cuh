// How an even product of logits ends (gemm_even.cuh): f32 by blocks that have all of K; of draws that take the largest logit what that is in every tile.
#pragma once
#include "even_ends.cuh"
#include "plain_rows.cuh"

namespace pk {

struct Picked {
    Tops tops;
    pk_state state;
};
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Which rows are plain draws that leave tops, by three warps.
template <int kM>
__device__ __forceinline__ void find_plain(const Picked &picked, int thread, int n_rows, float *is_plain_row) {
    const bool has = sampling::has_tops(picked.tops, n_rows);
    for (int n = thread; n < kM; n += 96) is_plain_row[n] = has && n < n_rows && sampling::is_plain(sampling::row_facts(picked.state, n)) ? 1.0f : 0.0f;
    __syncwarp();
}

// The largest of a row's sums in a tile, which four lanes have.
template <int kWidth>
__device__ __forceinline__ void leave_top(const Picked &picked, int tile, int n0, int row, int lane, bool is_plain, const float *sums) {
    float largest = -INFINITY;
    int index = 0;
    bool is_bad = false;
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
        const float v = sums[4 * (i >> 1) + (i & 1)];
        is_bad |= v != v;
        largest = fmaxf(largest, v);
    }
#pragma unroll
    for (int i = kWidth / 4 - 1; i >= 0; --i)
        if (sums[4 * (i >> 1) + (i & 1)] == largest) index = 8 * (i >> 1) + (i & 1);
    index += n0 + 2 * (lane & 3);
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) {
        const float v = __shfl_xor_sync(~0u, largest, o);
        const int i = __shfl_xor_sync(~0u, index, o);
        is_bad |= __shfl_xor_sync(~0u, is_bad, o);
        if (v > largest || (v == largest && i < index)) {
            largest = v;
            index = i;
        }
    }
    if (is_plain && (lane & 3) == 0) picked.tops.tops[static_cast<int64_t>(row) * picked.tops.stride + tile] = {is_bad ? NAN : largest, index};
}

// Columns n0 on of blocks that have all of K, in f32; of plain draws their tops.
template <int kWidth>
__device__ __forceinline__ void end_whole(const GemmArguments &a, const GemmWeight &w, const Picked &picked, int tile, int n0, int m0, int lane, int n_rows, const float *is_plain_row, float (&sums)[kWidth / 2]) {
    const float f = w.scale * a.scale;
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sums[i] *= f;
    const int row = m0 + (lane >> 2), column = n0 + column_in_pair(lane);
    float *y = static_cast<float *>(a.y) + row * a.y_stride + w.first_column + column;
    const bool is_plain[2] = {is_plain_row[row] != 0.0f, is_plain_row[row + 8] != 0.0f};
    if (__any_sync(~0u, is_plain[0] || is_plain[1])) {
        if (n0 + kWidth > w.rows) {
#pragma unroll
            for (int i = 0; i < kWidth / 2; ++i)
                if (n0 + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1) >= w.rows) sums[i] = -INFINITY;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) leave_top<kWidth>(picked, tile, n0, row + 8 * h, lane, is_plain[h], sums + 2 * h);
    }
    if (__all_sync(~0u, is_plain[0] && is_plain[1])) return;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < kWidth / 8; j += 2) {
            const float *v = sums + 4 * j + 2 * h;
            store_where(row + 8 * h < n_rows && !is_plain[h] && column + 8 * j < w.rows, y + 8 * h * a.y_stride + 8 * j, four_of_one(make_float4(v[0], v[1], v[4], v[5]), lane));
        }
}
#endif

}  // namespace pk
