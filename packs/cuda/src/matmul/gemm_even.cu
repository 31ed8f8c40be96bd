// Even matmul (include/gemm_even.cuh, even_units.cuh): which products are even ones, how they are cut, and BF16's instances.
#include "../../include/even_launch.cuh"
#include "../../include/format/unit.cuh"
#include "../../include/parted.h"

namespace pk {
#if defined(PK_WGMMA)
extern template int32_t launch_even_format<PK_Q8_0>(const Launch &, const GemmArguments &, const EvenRows &, const EvenCut &, int);
extern template int32_t launch_even_format<PK_Q4_K>(const Launch &, const GemmArguments &, const EvenRows &, const EvenCut &, int);
extern template int32_t launch_even_format<PK_Q5_K>(const Launch &, const GemmArguments &, const EvenRows &, const EvenCut &, int);
extern template int32_t launch_even_format<PK_Q6_K>(const Launch &, const GemmArguments &, const EvenRows &, const EvenCut &, int);
#else
template <int kFormat>
int32_t launch_even_format(const Launch &, const GemmArguments &, const EvenRows &, const EvenCut &, int) { return fail(PK_UNSUPPORTED, "matmul: no wgmma on this architecture"); }
#endif

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

// What a step along K is of weights in a format: how much of K, bytes of a row of x and of W, what a block itself takes for a tile of 128 of W.
struct EvenStep {
    int k = 0;
    double x_bytes = 128, w_bytes = 128, us = 0, us_least = 0;  // us_least: whatever the tile
};
EvenStep step_of(int32_t format, int64_t height) {
    EvenStep s;
    if (with_unit(format, [&](auto u) {
            using U = decltype(u);
            // A product's clocks at 1.6 GHz.
            s = {U::kU, U::kU * 2.0, U::kBytes / 16.0, height * U::kU * 128 / 2048 / 1600.0, 0};
        }))
        return s;
    if (format == PK_FP8_E4M3) {
        s.k = 128;
        s.us = height == 64 ? 0.22 : 0.34;
    } else {
        s.k = 64;
        s.us_least = 0.32;
    }
    return s;
}
int steps_of(const GemmArguments &a, const EvenStep &step) { return (a.k + step.k - 1) / step.k; }
int32_t plain_format(bool is_fp8) { return is_fp8 ? PK_FP8_E4M3 : PK_BF16; }

// Considers tiles of so many rows of W in `least` to `most` parts. The times were fitted to an 8B's products in BF16 with 64 and 128 rows on an H200 (LOG.md, M40); what a block itself
// takes for a step of FP8 and of block formats is reckoned (M45, M53).
int32_t consider(const Launch &l, const GemmArguments &a, const EvenStep &step, int64_t height, int end, int width, int least, int most, EvenCut *best) {
    const bool is_gated = end == kEndGated || end == kEndGatedCut;
    const int wide = is_gated ? width / 2 : width, n_steps = steps_of(a, step);
    const double own = std::max(step.us_least, step.us * width / 128), w_bytes = width * step.w_bytes;
    int64_t tiles = 0;
    for (int i = 0; i < (is_gated ? 1 : a.n_w); ++i) tiles += (a.w[i].rows + wide - 1) / wide;
    for (int parts = least; parts <= most && parts <= n_steps; ++parts) {
        int clusters = 0;
        if (int32_t e = most_even_clusters(l, parts, &clusters)) return e;
        if (clusters == 0) continue;
        // A step of K: as a block does it, as a multiprocessor gets both operands, as all get W from memory.
        auto takes = [&](int64_t n) { return std::max(std::max(own, (w_bytes + height * step.x_bytes) / 75e3), static_cast<double>(n * parts) * w_bytes / 4.1e6); };
        const int64_t full = tiles / clusters, rest = tiles % clusters, steps = (n_steps + parts - 1) / parts;
        const double us = steps * (full * takes(clusters) + (rest > 0 ? takes(rest) : 0.0)) + (parts == 1 ? 3.0 + 1.0 * (full + (rest > 0)) : (3.0 + width * (parts - 1.0) / parts * 0.03) * (full + (rest > 0)));
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
int32_t front_cut(const Launch &l, int32_t format, int64_t height, int64_t rows, EvenCut *best) {
    GemmArguments a = {};
    a.n_w = 1;
    a.k = 8192;
    a.w[0].rows = static_cast<int32_t>(rows);
    const EvenStep step = step_of(format, height);
    if (format != PK_BF16) return consider(l, a, step, height, kEndFront, 128, 2, kMostParts, best);
    for (int width : {96, 112, 128})
        if (int32_t e = consider(l, a, step, height, kEndFront, width, 2, kMostParts, best)) return e;
    return PK_OK;
}

int32_t cut_of(const Launch &l, const GemmArguments &a, int32_t format, int64_t max_rows, EvenCut *best) {
    const bool is_bf16 = format == PK_BF16, is_fp8 = format == PK_FP8_E4M3;
    const int64_t height = max_rows <= 64 ? 64 : 128;
    if (a.norm.row_squares != nullptr) {
        EvenCut front;
        if (int32_t e = front_cut(l, format, height, a.norm.n_cols, &front)) return e;
        best->n_squares = (a.norm.n_cols + front.width - 1) / front.width;
    }
    const int end = end_of(a);
    const EvenStep step = step_of(format, height);
    switch (end) {
        case kEndHeads: return consider(l, a, step, height, end, 128, 2, 2, best);
        case kEndGated: return consider(l, a, step, height, end, is_fp8 ? 256 : 192, 1, kMostParts, best);
        case kEndFront: return front_cut(l, format, height, a.w[0].rows, best);
        case kEndWhole:
            if (!is_fp8)
                if (int32_t e = consider(l, a, step, height, end, 192, 1, 1, best)) return e;
            if (!is_bf16 && !is_fp8) return PK_OK;
            return consider(l, a, step, height, end, 256, 1, 1, best);
        default:
            if (is_bf16)
                if (int32_t e = consider(l, a, step, height, end, 96, 2, kMostParts, best)) return e;
            return consider(l, a, step, height, end, 128, 2, kMostParts, best);
    }
}

template <int kM>
int32_t launch_height(const Launch &l, const GemmArguments &a, int64_t max_rows, const EvenCut &cut, const Picked &picked) {
    switch (cut.end) {
        case kEndHeads: return launch_even<false, kM, 128, kEndHeads>(l, a, max_rows, cut, picked);
        case kEndGated: return launch_even<false, kM, 192, kEndGated>(l, a, max_rows, cut, picked);
        case kEndGatedCut: return launch_even<false, kM, 192, kEndGatedCut>(l, a, max_rows, cut, picked);
        case kEndWhole: return cut.width == 192 ? launch_even<false, kM, 192, kEndWhole>(l, a, max_rows, cut, picked) : launch_even<false, kM, 256, kEndWhole>(l, a, max_rows, cut, picked);
        case kEndFront:
            if (cut.width == 112) return launch_even<false, kM, 112, kEndFront>(l, a, max_rows, cut, picked);
            return cut.width == 96 ? launch_even<false, kM, 96, kEndFront>(l, a, max_rows, cut, picked) : launch_even<false, kM, 128, kEndFront>(l, a, max_rows, cut, picked);
        default: return cut.width == 96 ? launch_even<false, kM, 96, kEndPlain>(l, a, max_rows, cut, picked) : launch_even<false, kM, 128, kEndPlain>(l, a, max_rows, cut, picked);
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
    return has_wgmma(l.ctx) && max_rows <= kEvenRows && steps_of(a, step_of(plain_format(is_fp8), max_rows)) >= kMostParts && end_of(a) >= 0;
}

bool has_even_units(const Packed &weight) {
    const int32_t f = weight.format;
    return (f == PK_Q8_0 || f == PK_Q4_K || f == PK_Q5_K || f == PK_Q6_K) && weight.cols == weight.padded_cols;
}

bool are_even_units(const Launch &l, const GemmArguments &a, const Packed *const *packed) {
    for (int i = 0; i < a.n_w; ++i)
        if (!has_even_units(*packed[i]) || steps_of(a, step_of(packed[i]->format, kEvenRows)) < kMostParts) return false;
    return has_wgmma(l.ctx) && reinterpret_cast<uintptr_t>(a.x) % 16 == 0 && end_of(a) >= 0;
}

// The format that all weights have but those that have kMixedOther; -1: no kernel multiplies such weights together.
static int32_t main_format(const Packed *const *packed, int n) {
    int32_t format = kMixedOther;
    bool has_other = false;
    for (int i = 0; i < n; ++i) {
        const int32_t f = packed[i]->format;
        if (f == kMixedOther) has_other = true;
        else if (format == kMixedOther || format == f) format = f;
        else return -1;
    }
    return has_other && format != kMixedOther && !is_mixed(format) ? -1 : format;
}

bool are_multiplied_together(const Packed *const *packed, int n) { return main_format(packed, n) >= 0; }

int32_t even_tiles(const Launch &l, const GemmArguments &a, int64_t max_rows, bool is_fp8, int32_t *n) {
    EvenCut cut;
    if (int32_t e = cut_of(l, a, plain_format(is_fp8), max_rows, &cut)) return e;
    *n = (a.w[0].rows + cut.width - 1) / cut.width;
    return PK_OK;
}

bool even_leaves_narrowed(const Launch &l, int64_t max_rows, int64_t k) { return has_wgmma(l.ctx) && max_rows <= kEvenRows && k > 128 * (kMostParts - 1); }

int32_t launch_gemm_even(const Launch &l, const GemmArguments &a, int64_t max_rows, const Tops &tops) {
    const Picked picked = {tops, *l.state};
    EvenCut cut;
    const bool is_fp8 = a.x_scale != nullptr;
    if (int32_t e = cut_of(l, a, plain_format(is_fp8), max_rows, &cut)) return e;
    if (is_fp8) return launch_even_fp8(l, a, max_rows, cut, picked);
    return max_rows <= 64 ? launch_height<64>(l, a, max_rows, cut, picked) : launch_height<128>(l, a, max_rows, cut, picked);
}

int32_t launch_even_units(const Launch &l, const GemmArguments &a, const EvenRows &rows, const Packed *const *packed) {
    const int32_t format = main_format(packed, a.n_w);
    int others = 0;
    for (int i = 0; i < a.n_w; ++i) others |= (packed[i]->format != format) << i;
    EvenCut cut;
    if (int32_t e = cut_of(l, a, format, rows.most - rows.first, &cut)) return e;
    switch (format) {
        case PK_Q8_0: return launch_even_format<PK_Q8_0>(l, a, rows, cut, others);
        case PK_Q4_K: return launch_even_format<PK_Q4_K>(l, a, rows, cut, others);
        case PK_Q5_K: return launch_even_format<PK_Q5_K>(l, a, rows, cut, others);
        default: return launch_even_format<PK_Q6_K>(l, a, rows, cut, others);
    }
}

}  // namespace pk
