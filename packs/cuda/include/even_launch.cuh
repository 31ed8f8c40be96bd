// Launches of the even kernel (gemm_even.cuh): how a product is cut, and the instance that runs it.
#pragma once
#include <algorithm>

#include "cluster_launch.h"
#include "even_plan.h"
#include "gemm_even.cuh"

namespace pk {

constexpr int kMostParts = kMostClusterParts;

// How a product ends, tiles of so many rows of W (gated: half of gate, half of up) in so many parts, and how many sums of squares a row has from the product in front.
struct EvenCut {
    int end = -1, width = 0, n_parts = 0, n_squares = 0;
    double us = 1e30;
};

// Clusters of so many blocks that run at once, of a kernel with as much shared memory as any of these.
int32_t most_even_clusters(const Launch &l, int n_parts, int *n);
// FP8's instances are a unit of their own.
int32_t launch_even_fp8(const Launch &l, const GemmArguments &a, int64_t max_rows, const EvenCut &cut, const Picked &picked);
// Those of a block format, too. others: bits of weights that have kMixedOther instead, in kernels that multiply two formats: heads' of those that files mix with it.
constexpr int32_t kMixedOther = PK_Q6_K;
constexpr bool is_mixed(int32_t format) { return format == PK_Q4_K || format == PK_Q5_K; }
template <int kFormat>
int32_t launch_even_format(const Launch &l, const GemmArguments &a, const EvenRows &rows, const EvenCut &cut, int others);

template <bool kIsFp8, int kM, int kWidth, int kEnd>
int32_t launch_even(const Launch &l, GemmArguments a, int64_t max_rows, const EvenCut &cut, const Picked &picked) {
    using S = EvenShape<kIsFp8, kM, kWidth, kEnd>;
    constexpr bool kGated = kEnd == kEndGated || kEnd == kEndGatedCut, kWhole = kEnd == kEndGated || kEnd == kEndWhole;
    constexpr int kWide = kGated ? kWidth / 2 : kWidth;
    GemmMaps maps;
    a.most_rows = static_cast<int32_t>(std::min<int64_t>(max_rows, kM));
    if (int32_t e = make_map(l, &maps.x, a.x, kIsFp8, max_rows, kIsFp8 ? (a.k + 127) / 128 * 128 : a.k, a.x_row_bytes, a.most_rows)) return e;
    a.n_tiles = 0;
    for (int i = 0; i < a.n_w; ++i) {
        GemmWeight &w = a.w[i];
        if (int32_t e = make_map(l, &maps.w[i], w.data, kIsFp8, w.rows, w.row_bytes / (kIsFp8 ? 1 : 2), w.row_bytes, kWide)) return e;
        w.first_tile = kGated ? 0 : a.n_tiles;
        if (!kGated || i == 0) a.n_tiles += (w.rows + kWide - 1) / kWide;
    }
    const int blocks = kWhole ? std::min(a.n_tiles, l.ctx->n_processors) : a.n_tiles * cut.n_parts;
    return launch_clusters(l, "gemm_even", gemm_even_kernel<kIsFp8, kM, kWidth, kEnd>, blocks, S::kThreads, S::kBytes, kWhole ? 1 : cut.n_parts, maps, a, cut.n_squares, picked);
}

}  // namespace pk
