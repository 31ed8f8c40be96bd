// Even matmul (include/gemm_even.cuh): which products are even ones, and how they are cut.
#include <algorithm>
#include <atomic>

#include "../../include/cluster_launch.h"
#include "../../include/even_plan.h"
#include "../../include/gemm_even.cuh"

namespace pk {
namespace {

constexpr int kMostParts = 4;       // that K is cut into: blocks of a cluster
constexpr int64_t kMostRows = 128;  // one tile

// The end that a product wants (gated: whole, which may be cut); -1: none of those.
int end_of(const GemmArguments &a) {
    if (a.fp4 || a.min_rows > 0 || a.are_unpacked || a.softcap > 0.0f) return -1;
    const bool is_gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const int64_t element = a.y_format == PK_F32 ? 4 : 2;
    auto is_aligned = [](const void *data, int64_t stride) { return (reinterpret_cast<uintptr_t>(data) | stride) % 16 == 0; };
    if (!is_aligned(a.y, a.y_stride * element) || !is_aligned(a.add, a.add_stride * 4) || !is_aligned(a.norm.out, a.norm.out_stride * 2)) return -1;
    bool has_bias = false;
    for (int i = 0; i < a.n_w; ++i) {
        const GemmWeight &w = a.w[i];
        if (w.rows % (a.heads.q ? 128 : is_gated ? 16 : 32) || w.first_column % 8 || w.row_scale != nullptr || !is_aligned(w.bias, 0)) return -1;
        has_bias = has_bias || w.bias != nullptr;
    }
    if (a.heads.q != nullptr) return kEndHeads;
    if (is_gated) return a.act == PK_ACT_SILU && a.y_format == PK_BF16 && a.add == nullptr && !has_bias ? kEndGated : -1;
    if (a.act != PK_ACT_NONE) return -1;
    if (a.y_format == PK_BF16) return a.add == nullptr ? kEndPlain : -1;
    return a.n_w == 1 && !has_bias && (a.add == nullptr || a.add_format == PK_F32) ? kEndFront : -1;
}

template <bool kIsFp8, int kM, int kWidth, int kEnd>
int32_t launch_even(const Launch &l, GemmArguments a, int64_t max_rows, int n_parts, int n_squares) {
    using S = EvenShape<kIsFp8, kM, kWidth, kEnd>;
    constexpr bool kGated = kEnd == kEndGated || kEnd == kEndGatedCut;
    constexpr int kWide = kGated ? kWidth / 2 : kWidth;
    GemmMaps maps;
    if (int32_t e = make_map(l, &maps.x, a.x, kIsFp8, max_rows, kIsFp8 ? (a.k + 127) / 128 * 128 : a.k, a.x_row_bytes, kM)) return e;
    a.n_tiles = 0;
    for (int i = 0; i < a.n_w; ++i) {
        GemmWeight &w = a.w[i];
        if (int32_t e = make_map(l, &maps.w[i], w.data, kIsFp8, w.rows, w.row_bytes / (kIsFp8 ? 1 : 2), w.row_bytes, kWide)) return e;
        w.first_tile = kGated ? 0 : a.n_tiles;
        if (!kGated || i == 0) a.n_tiles += (w.rows + kWide - 1) / kWide;
    }
    const int blocks = kEnd == kEndGated ? std::min(a.n_tiles, l.ctx->n_processors) : a.n_tiles * n_parts;
    return launch_clusters(l, "gemm_even", gemm_even_kernel<kIsFp8, kM, kWidth, kEnd>, blocks, S::kThreads, S::kBytes, n_parts, maps, a, n_squares);
}

// Clusters of so many blocks that run at once, of a kernel with as much shared memory as any of these.
int32_t most_clusters(const Launch &l, int n_parts, int *n) {
    static std::atomic<int> known[kMostParts + 1];
    *n = n_parts == 1 ? l.ctx->n_processors : known[n_parts].load();
    if (*n > 0) return PK_OK;
    using S = EvenShape<false, 128, 96, kEndFront>;
    if (int32_t e = clusters_at_once("gemm_even", gemm_even_kernel<false, 128, 96, kEndFront>, n_parts * 64, S::kThreads, S::kBytes, n_parts, n)) return e;
    known[n_parts] = *n;
    return PK_OK;
}

int steps_of(const GemmArguments &a) { return a.x_scale ? (a.k + 127) / 128 : (a.k + 63) / 64; }

struct Cut {
    int width = 0, n_parts = 0;
    double us = 1e30;
};

// Considers tiles of so many rows of W in `least` to `most` parts. The times were fitted to an 8B's products with 64 and 128 rows on an H200 (LOG.md, M40).
int32_t consider(const Launch &l, const GemmArguments &a, int64_t height, int width, bool is_gated, int least, int most, Cut *best) {
    const int wide = is_gated ? width / 2 : width, n_steps = steps_of(a);
    int64_t tiles = 0;
    for (int i = 0; i < (is_gated ? 1 : a.n_w); ++i) tiles += (a.w[i].rows + wide - 1) / wide;
    for (int parts = least; parts <= most && parts <= n_steps; ++parts) {
        int clusters = 0;
        if (int32_t e = most_clusters(l, parts, &clusters)) return e;
        if (clusters == 0) continue;
        // A step of K: as a block does it, as a multiprocessor gets both operands, as all get W from memory.
        auto step = [&](int64_t n) { return std::max(std::max(0.32, (width + height) * 128 / 75e3), static_cast<double>(n * parts) * width * 128 / 4.1e6); };
        const int64_t full = tiles / clusters, rest = tiles % clusters, steps = (n_steps + parts - 1) / parts;
        const double us = steps * (full * step(clusters) + (rest > 0 ? step(rest) : 0.0)) + (parts == 1 ? 3.0 + 1.0 * (full + (rest > 0)) : (3.0 + width * (parts - 1.0) / parts * 0.03) * (full + (rest > 0)));
        if (us < best->us) *best = {width, parts, us};
    }
    return PK_OK;
}

// How a product in front of a norm is cut, whose sums of squares the one behind adds: by the weight's rows alone, so that both know.
int32_t front_cut(const Launch &l, int64_t height, int64_t rows, Cut *best) {
    GemmArguments a = {};
    a.n_w = 1;
    a.k = 8192;
    a.w[0].rows = static_cast<int32_t>(rows);
    for (int width : {96, 112, 128})
        if (int32_t e = consider(l, a, height, width, false, 2, kMostParts, best)) return e;
    return PK_OK;
}

template <int kM, int kEnd>
int32_t launch_width(const Launch &l, const GemmArguments &a, int64_t max_rows, const Cut &cut, int n_squares) {
    if constexpr (kEnd == kEndFront)
        if (cut.width == 112) return launch_even<false, kM, 112, kEnd>(l, a, max_rows, cut.n_parts, n_squares);
    return cut.width == 96 ? launch_even<false, kM, 96, kEnd>(l, a, max_rows, cut.n_parts, n_squares) : launch_even<false, kM, 128, kEnd>(l, a, max_rows, cut.n_parts, n_squares);
}

template <int kM>
int32_t launch_height(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    Cut best, front;
    int n_squares = 0;
    if (a.norm.row_squares != nullptr) {
        if (int32_t e = front_cut(l, kM, a.norm.n_cols, &front)) return e;
        n_squares = (a.norm.n_cols + front.width - 1) / front.width * front.n_parts;
    }
    switch (end_of(a)) {
        case kEndHeads: return launch_even<false, kM, 128, kEndHeads>(l, a, max_rows, 2, n_squares);
        case kEndGated:
            if (int32_t e = consider(l, a, kM, 192, true, 1, kMostParts, &best)) return e;
            return best.n_parts == 1 ? launch_even<false, kM, 192, kEndGated>(l, a, max_rows, 1, n_squares) : launch_even<false, kM, 192, kEndGatedCut>(l, a, max_rows, best.n_parts, n_squares);
        case kEndFront:
            if (int32_t e = front_cut(l, kM, a.w[0].rows, &best)) return e;
            return launch_width<kM, kEndFront>(l, a, max_rows, best, n_squares);
        default:
            for (int width : {96, 128})
                if (int32_t e = consider(l, a, kM, width, false, 2, kMostParts, &best)) return e;
            return launch_width<kM, kEndPlain>(l, a, max_rows, best, n_squares);
    }
}

// Of FP8, gated products of a tile of 128 rows whose tiles, with a row's 128 columns in one, are enough blocks.
bool is_fp8_even(const Launch &l, int64_t max_rows, int64_t n) { return max_rows > 64 && max_rows <= kMostRows && 2 * ((n + 127) / 128) >= l.ctx->n_processors; }

}  // namespace

bool is_even(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    const int end = has_wgmma(l.ctx) && max_rows <= kMostRows && steps_of(a) >= kMostParts ? end_of(a) : -1;  // steps of K for the blocks of a cluster
    return a.x_scale ? end == kEndGated && is_fp8_even(l, max_rows, a.w[0].rows) : end >= 0 && a.narrowed.x == nullptr;
}

bool even_leaves_narrowed(const Launch &l, int64_t max_rows, int64_t n, int64_t k) { return k > 128 * (kMostParts - 1) && is_fp8_even(l, max_rows, n); }

int32_t launch_gemm_even(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    if (a.x_scale) return launch_even<true, 128, 256, kEndGated>(l, a, max_rows, 1, 0);
    return max_rows <= 64 ? launch_height<64>(l, a, max_rows) : launch_height<128>(l, a, max_rows);
}

}  // namespace pk
