// Even matmul (include/gemm_even.cuh): which products are even ones, how they are cut, and BF16's instances.
#include "../../include/even_launch.cuh"
#include "../../include/parted.h"

namespace pk {
namespace {

// The end that a product wants (gated: whole, which may be cut); -1: none of those.
int end_of(const GemmArguments &a) {
    if (a.fp4 || a.are_unpacked || a.softcap > 0.0f) return -1;
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
    if (a.min_rows > 0) return a.n_w == 1 && a.act == PK_ACT_NONE && a.y_format == PK_F32 && a.add == nullptr && !has_bias ? kEndWhole : -1;
    if (a.heads.q != nullptr) return kEndHeads;
    if (is_gated) return a.act == PK_ACT_SILU && a.y_format == PK_BF16 && a.add == nullptr && !has_bias ? kEndGated : -1;
    if (a.act != PK_ACT_NONE) return -1;
    if (a.y_format == PK_BF16) return a.add == nullptr ? kEndPlain : -1;
    return a.n_w == 1 && !has_bias && (a.add == nullptr || a.add_format == PK_F32) ? kEndFront : -1;
}

int steps_of(const GemmArguments &a, bool is_fp8) { return is_fp8 ? (a.k + 127) / 128 : (a.k + 63) / 64; }

// Considers tiles of so many rows of W in `least` to `most` parts. The times were fitted to an 8B's products in BF16 with 64 and 128 rows on an H200 (LOG.md, M40); what a block itself
// takes for a step of FP8 is reckoned (M45).
int32_t consider(const Launch &l, const GemmArguments &a, bool is_fp8, int64_t height, int end, int width, int least, int most, EvenCut *best) {
    const bool is_gated = end == kEndGated || end == kEndGatedCut;
    const int wide = is_gated ? width / 2 : width, n_steps = steps_of(a, is_fp8);
    const double own = is_fp8 ? width / 128 * (height == 64 ? 0.22 : 0.34) : 0.32;
    int64_t tiles = 0;
    for (int i = 0; i < (is_gated ? 1 : a.n_w); ++i) tiles += (a.w[i].rows + wide - 1) / wide;
    for (int parts = least; parts <= most && parts <= n_steps; ++parts) {
        int clusters = 0;
        if (int32_t e = most_even_clusters(l, parts, &clusters)) return e;
        if (clusters == 0) continue;
        // A step of K: as a block does it, as a multiprocessor gets both operands, as all get W from memory.
        auto step = [&](int64_t n) { return std::max(std::max(own, (width + height) * 128 / 75e3), static_cast<double>(n * parts) * width * 128 / 4.1e6); };
        const int64_t full = tiles / clusters, rest = tiles % clusters, steps = (n_steps + parts - 1) / parts;
        const double us = steps * (full * step(clusters) + (rest > 0 ? step(rest) : 0.0)) + (parts == 1 ? 3.0 + 1.0 * (full + (rest > 0)) : (3.0 + width * (parts - 1.0) / parts * 0.03) * (full + (rest > 0)));
        if (us < best->us) {
            best->end = end == kEndGated && parts > 1 ? kEndGatedCut : end;
            best->width = width;
            best->n_parts = parts;
            best->us = us;
        }
    }
    return PK_OK;
}

// How a product in front of a norm is cut, whose sums of squares the one behind adds: by the weight's rows alone, so that both know.
int32_t front_cut(const Launch &l, bool is_fp8, int64_t height, int64_t rows, EvenCut *best) {
    GemmArguments a = {};
    a.n_w = 1;
    a.k = 8192;
    a.w[0].rows = static_cast<int32_t>(rows);
    if (is_fp8) return consider(l, a, true, height, kEndFront, 128, 2, kMostParts, best);
    for (int width : {96, 112, 128})
        if (int32_t e = consider(l, a, false, height, kEndFront, width, 2, kMostParts, best)) return e;
    return PK_OK;
}

int32_t cut_of(const Launch &l, const GemmArguments &a, int64_t max_rows, EvenCut *best) {
    const bool is_fp8 = a.x_scale != nullptr;
    const int64_t height = max_rows <= 64 ? 64 : 128;
    if (a.norm.row_squares != nullptr) {
        EvenCut front;
        if (int32_t e = front_cut(l, is_fp8, height, a.norm.n_cols, &front)) return e;
        best->n_squares = (a.norm.n_cols + front.width - 1) / front.width;
    }
    const int end = end_of(a);
    switch (end) {
        case kEndHeads: return consider(l, a, is_fp8, height, end, 128, 2, 2, best);
        case kEndGated: return consider(l, a, is_fp8, height, end, is_fp8 ? 256 : 192, 1, kMostParts, best);
        case kEndFront: return front_cut(l, is_fp8, height, a.w[0].rows, best);
        case kEndWhole:
            if (!is_fp8)
                if (int32_t e = consider(l, a, false, height, end, 192, 1, 1, best)) return e;
            return consider(l, a, is_fp8, height, end, 256, 1, 1, best);
        default:
            if (!is_fp8)
                if (int32_t e = consider(l, a, false, height, end, 96, 2, kMostParts, best)) return e;
            return consider(l, a, is_fp8, height, end, 128, 2, kMostParts, best);
    }
}

template <int kM>
int32_t launch_height(const Launch &l, const GemmArguments &a, int64_t max_rows, const EvenCut &cut) {
    switch (cut.end) {
        case kEndHeads: return launch_even<false, kM, 128, kEndHeads>(l, a, max_rows, cut);
        case kEndGated: return launch_even<false, kM, 192, kEndGated>(l, a, max_rows, cut);
        case kEndGatedCut: return launch_even<false, kM, 192, kEndGatedCut>(l, a, max_rows, cut);
        case kEndWhole: return cut.width == 192 ? launch_even<false, kM, 192, kEndWhole>(l, a, max_rows, cut) : launch_even<false, kM, 256, kEndWhole>(l, a, max_rows, cut);
        case kEndFront:
            if (cut.width == 112) return launch_even<false, kM, 112, kEndFront>(l, a, max_rows, cut);
            return cut.width == 96 ? launch_even<false, kM, 96, kEndFront>(l, a, max_rows, cut) : launch_even<false, kM, 128, kEndFront>(l, a, max_rows, cut);
        default: return cut.width == 96 ? launch_even<false, kM, 96, kEndPlain>(l, a, max_rows, cut) : launch_even<false, kM, 128, kEndPlain>(l, a, max_rows, cut);
    }
}

}  // namespace

int32_t most_even_clusters(const Launch &l, int n_parts, int *n) {
    using S = EvenShape<false, 128, 96, kEndFront>;
    *n = l.ctx->n_processors;
    return n_parts == 1 ? PK_OK : most_clusters(l.ctx, "gemm_even", reinterpret_cast<const void *>(gemm_even_kernel<false, 128, 96, kEndFront>), n_parts, S::kThreads, S::kBytes, n);
}

bool is_even(const Launch &l, const GemmArguments &a, int64_t max_rows, bool is_fp8) {
    // Steps of K for the blocks of a cluster.
    return has_wgmma(l.ctx) && max_rows <= kEvenRows && steps_of(a, is_fp8) >= kMostParts && end_of(a) >= 0;
}

bool even_leaves_narrowed(const Launch &l, int64_t max_rows, int64_t k) { return has_wgmma(l.ctx) && max_rows <= kEvenRows && k > 128 * (kMostParts - 1); }

int32_t launch_gemm_even(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    EvenCut cut;
    if (int32_t e = cut_of(l, a, max_rows, &cut)) return e;
    if (a.x_scale != nullptr) return launch_even_fp8(l, a, max_rows, cut);
    return max_rows <= 64 ? launch_height<64>(l, a, max_rows, cut) : launch_height<128>(l, a, max_rows, cut);
}

}  // namespace pk
