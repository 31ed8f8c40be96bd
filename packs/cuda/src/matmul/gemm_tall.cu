// Tall matmuls (include/gemm_tall.cuh): which products are tall ones, and how they are cut.
#include <algorithm>

#include "../../include/gemm_tall.cuh"

namespace pk {
namespace {

constexpr int kMostParts = 8;
constexpr int64_t kLeastWeights = 8 << 20;

// How a launch goes: tiles of so many columns, of at most `most` units as their kernel takes them; of so many units here, and in so many parts of K.
struct Plan {
    int width = 0, most = 0, units = 0, m_tiles = 0, n_parts = 0;
    double us = 1e30;
};

// Boxes of a tile's rows of x and of so many of every weight, and in the arguments where each weight's columns begin.
int32_t tall_maps(const Launch &l, GemmMaps *maps, GemmArguments &a, int64_t max_rows, int width, int box, int x_box) {
    const bool gated = a.act != PK_ACT_NONE, is_fp8 = a.x_scale != nullptr;
    if (int32_t e = make_map(l, &maps->x, a.x, is_fp8, max_rows, is_fp8 ? a.x_row_bytes : a.k, a.x_row_bytes, x_box)) return e;
    int32_t columns = 0;
    for (int i = 0; i < 3; ++i) {
        const GemmWeight &w = a.w[i < a.n_w ? i : 0];
        if (int32_t e = make_map(l, &maps->w[i], w.data, is_fp8, w.rows, w.row_bytes / (is_fp8 ? 1 : 2), w.row_bytes, box)) return e;
        if (i >= a.n_w) continue;
        a.w[i].first_tile = gated ? 0 : columns;
        if (!gated || i == 0) columns += w.rows;
    }
    if (gated) width /= 2;
    a.n_tiles = (columns + width - 1) / width;
    a.most_rows = static_cast<int32_t>(max_rows);
    return PK_OK;
}

// Bytes of the scratch behind x narrowed, and y.
int64_t room_behind(const Launch &l, const GemmArguments &a) {
    const float *x = a.x_scale + (a.k + 127) / 128 * a.x_scale_stride, *y = a.narrowed.x ? a.narrowed.scales + a.narrowed.row_bytes / 128 * a.narrowed.scale_stride : x;
    return l.scratch + l.scratch_bytes - reinterpret_cast<const uint8_t *>(std::max(x, y));
}

// Tiles of two tiles of rows that are left for less than half of the device when it has been full, and may be cut in two.
int64_t last_wave(const Launch &l, const GemmArguments &a, int64_t all, int64_t m_tiles) {
    const int64_t n = all % l.ctx->n_processors;
    return m_tiles == 2 && n < all && n % 2 == 0 && 2 * n <= l.ctx->n_processors && a.k > 128 && n * TallShape<true, 256, 2>::kPartBytes <= room_behind(l, a) ? n : 0;
}

template <bool kIsFp8, int kWidth, int kUnits, Way kWay>
int32_t launch_way(const Launch &l, GemmArguments a, int64_t max_rows, const Plan &plan) {
    using S = TallShape<kIsFp8, kWidth, kUnits>;
    GemmMaps maps;
    if (int32_t e = tall_maps(l, &maps, a, max_rows, kWidth, box_rows(kIsFp8, kWidth, kWay), plan.units * 64 / S::kXBoxes)) return e;
    const int64_t all = int64_t{plan.m_tiles} * a.n_tiles;
    const int64_t n_halved = kIsFp8 && kWay == kSilu ? last_wave(l, a, all, plan.m_tiles) : 0;
    const int64_t bytes = (plan.n_parts > 1 ? all * plan.n_parts : n_halved) * S::kPartBytes;
    const TallCut cut = {reinterpret_cast<float *>(l.scratch + (l.scratch_bytes - bytes) / 256 * 256), l.counters, plan.n_parts, static_cast<int32_t>(all - n_halved), plan.m_tiles, plan.units};
    Launch own = l;
    own.overlap = true;
    return launch(own, "gemm_tall", gemm_tall_kernel<kIsFp8, kWidth, kUnits, kWay>, dim3(static_cast<unsigned>(plan.n_parts > 1 ? all * plan.n_parts : std::min<int64_t>(all, l.ctx->n_processors))), dim3(kTallThreads), S::kBytes, maps, a, cut);
}

template <int kWidth>
int32_t launch_width(const Launch &l, const GemmArguments &a, int64_t max_rows, const Plan &plan) {
    if (a.act != PK_ACT_NONE) return a.act == PK_ACT_SILU ? launch_way<false, kWidth, 4, kSilu>(l, a, max_rows, plan) : launch_way<false, kWidth, 4, kGelu>(l, a, max_rows, plan);
    if (a.norm.out != nullptr) return launch_way<false, kWidth, 4, kFront>(l, a, max_rows, plan);
    return plan.n_parts == 1 ? launch_way<false, kWidth, 4, kWhole>(l, a, max_rows, plan) : launch_way<false, kWidth, 4, kCut>(l, a, max_rows, plan);
}

// What a launch takes with `rows` rows in m_tiles tiles of rows and tiles of so many columns, in us: by what steps of K take the tensor cores (at the clocks that they keep; FP8's wait
// for some of the adding), the second-level cache and memory. Fitted to an 8B's products with 160 to 512 rows on an H200 in BF16 (LOG.md, M35).
double estimate(const Launch &l, const GemmArguments &a, int64_t rows, int64_t width, int64_t m_tiles, int64_t parts) {
    const bool gated = a.act != PK_ACT_NONE, is_fp8 = a.x_scale != nullptr;
    int64_t columns = 0;
    for (int i = 0; i < (gated ? 1 : a.n_w); ++i) columns += a.w[i].rows;
    const int64_t wide = gated ? width / 2 : width, blocks = m_tiles * ((columns + wide - 1) / wide) * parts, n_steps = is_fp8 ? (a.k + 127) / 128 : (a.k + 63) / 64;
    const int64_t all_units = (rows + 63) / 64, units = (all_units + m_tiles - 1) / m_tiles, n = l.ctx->n_processors, full = blocks / n, rest = blocks % n;
    // Blocks that come to several tiles come to high and low ones.
    const double height = blocks > n && n % m_tiles == 0 ? static_cast<double>(all_units) / static_cast<double>(m_tiles) : static_cast<double>(units);
    auto step = [&](int64_t at_once) { return std::max({height * static_cast<double>(width) * 2 / (is_fp8 ? 1300.0 : 1450.0), static_cast<double>(at_once * (units * 64 + width) * 128) / 10.5e6, static_cast<double>(at_once * width * 128 / m_tiles) / 4.0e6}); };
    return static_cast<double>((n_steps + parts - 1) / parts) * (static_cast<double>(full) * step(n) + (rest > 0 ? step(rest) : 0.0)) + (parts > 1 ? 12.0 : 8.0) + 1.5 * static_cast<double>(full + (rest > 0) - 1);
}

// Considers tiles of so many columns and of up to kUnits units.
template <bool kIsFp8, int kWidth, int kUnits>
void consider(const Launch &l, const GemmArguments &a, int64_t max_rows, Plan *best) {
    using S = TallShape<kIsFp8, kWidth, kUnits>;
    const bool gated = a.act != PK_ACT_NONE;
    int64_t columns = 0;
    for (int i = 0; i < (gated ? 1 : a.n_w); ++i) columns += a.w[i].rows;
    const int64_t wide = gated ? kWidth / 2 : kWidth, n_tiles = (columns + wide - 1) / wide, n_steps = (a.k + S::kBoxK - 1) / S::kBoxK, all_units = (max_rows + 63) / 64;
    // x narrowed, or squares, may lie in front of the parts.
    const int64_t room = a.x_scale ? room_behind(l, a) : l.scratch_bytes - max_rows * a.k * 2 - (1 << 20);
    const int64_t fewest = (all_units + kUnits - 1) / kUnits, most = max_rows <= kClusterRows ? fewest : (all_units + 1) / 2;
    for (int64_t m_tiles = fewest; m_tiles <= most; ++m_tiles)
        for (int parts = kUnits > 4 ? 2 : 1; parts <= (gated ? 1 : kMostParts) && parts <= n_steps; ++parts) {
            const int64_t tiles = m_tiles * n_tiles;
            if (parts > 1 && (tiles * parts > l.ctx->n_processors || tiles * parts * S::kPartBytes > room)) break;
            const double us = estimate(l, a, max_rows, kWidth, m_tiles, parts);
            if (us < best->us) *best = {kWidth, kUnits, static_cast<int>((all_units + m_tiles - 1) / m_tiles), static_cast<int>(m_tiles), parts, us};
        }
}

Plan plan_of(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    Plan best;
    if (a.x_scale) {
        a.act != PK_ACT_NONE ? consider<true, 256, 2>(l, a, max_rows, &best) : consider<true, 128, 4>(l, a, max_rows, &best);
        return best;
    }
    consider<false, 192, 4>(l, a, max_rows, &best);
    consider<false, 128, 4>(l, a, max_rows, &best);
    if (max_rows > kClusterRows && a.act == PK_ACT_NONE) consider<false, 128, 5>(l, a, max_rows, &best);
    return best;
}

// Gated products that tall tiles gain by: of FP8, whose tiles are whole blocks of scales, those with a tile for every processor; others with half of one.
bool has_gated_tiles(const Launch &l, int64_t max_rows, int64_t n, bool is_fp8) {
    return is_fp8 ? n % 128 == 0 && (max_rows + 127) / 128 * (n / 128) >= l.ctx->n_processors : (max_rows + 255) / 256 * n >= 64 * l.ctx->n_processors / 2;
}

bool has_tall_rows(int64_t max_rows, bool is_fp8) { return max_rows > 128 && max_rows <= (is_fp8 ? kFp8ClusterRows : kTallRows); }

}  // namespace

bool is_tall(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    const bool gated = a.act != PK_ACT_NONE, is_fp8 = a.x_scale != nullptr;
    if (!has_tall_rows(max_rows, is_fp8) || a.min_rows > 0 || a.are_unpacked || a.fp4 || a.softcap > 0.0f) return false;
    // Small products lose more at a cut than tiles gain, and what is gated is not cut.
    int64_t n_weights = 0;
    for (int i = 0; i < a.n_w; ++i) n_weights += int64_t{a.w[i].rows} * a.k;
    if (n_weights < kLeastWeights || (gated && !has_gated_tiles(l, max_rows, a.w[0].rows, is_fp8))) return false;
    if (gated && ((a.act != PK_ACT_SILU && (a.act != PK_ACT_GELU_TANH || is_fp8)) || a.n_w != 2 || a.add != nullptr || a.y_format != PK_BF16)) return false;
    if (a.add != nullptr && (a.add_format != PK_F32 || a.y_format != PK_F32)) return false;
    // 16 bytes a store.
    const int64_t apart = a.y_format == PK_BF16 ? 7 : 3;
    if ((a.y_stride & apart) || (reinterpret_cast<uintptr_t>(a.y) & 15) || (a.add != nullptr && ((a.add_stride & 3) || (reinterpret_cast<uintptr_t>(a.add) & 15)))) return false;
    const int32_t whole = is_fp8 ? 128 : gated ? kPiece : 64;
    for (int i = 0; i < a.n_w; ++i)
        if (a.w[i].rows % whole || a.w[i].row_scale != nullptr || (a.w[i].first_column & apart) || (gated && a.w[i].bias != nullptr)) return false;
    if (max_rows <= kClusterRows) return true;
    // Else gemm_wgmma's tiles of 128 by 256, as many as a step has, where they are clearly quicker: by steps of fewer rows than they were launched for, as most are.
    const Plan plan = plan_of(l, a, max_rows);
    const int64_t rows = max_rows * 7 / 8;
    return 0.95 * estimate(l, a, rows, plan.width, plan.m_tiles, plan.n_parts) < estimate(l, a, rows, 256, (rows + 127) / 128, 1);
}

bool tall_leaves_narrowed(const Launch &l, int64_t max_rows, int64_t n, int64_t k) { return has_tall_rows(max_rows, true) && 2 * n * k >= kLeastWeights && has_gated_tiles(l, max_rows, n, true); }

int64_t tall_most_parts_bytes(const Launch &l) { return l.ctx->n_processors * TallShape<true, 128, 4>::kPartBytes; }

bool tall_is_cut(const Launch &l, const GemmArguments &a, int64_t max_rows) { return plan_of(l, a, max_rows).n_parts > 1; }

int32_t launch_gemm_tall(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    const Plan best = plan_of(l, a, max_rows);
    if (a.x_scale && a.act != PK_ACT_NONE) return launch_way<true, 256, 2, kSilu>(l, a, max_rows, best);
    if (a.x_scale && a.norm.out != nullptr) return launch_way<true, 128, 4, kFront>(l, a, max_rows, best);
    if (a.x_scale) return best.n_parts == 1 ? launch_way<true, 128, 4, kWhole>(l, a, max_rows, best) : launch_way<true, 128, 4, kCut>(l, a, max_rows, best);
    if (best.most == 5) return launch_way<false, 128, 5, kCut>(l, a, max_rows, best);
    return best.width == 192 ? launch_width<192>(l, a, max_rows, best) : launch_width<128>(l, a, max_rows, best);
}

}  // namespace pk
