// Products of a few rows with panels: integers against codes, or f32 against plain weights.
// Included once by each level's source.
#pragma once
#include "format/codec.h"
#include "matmul_codes.h"
#include "matmul_finish.h"

namespace pk {
namespace {

// Asks for the same place of the next panel: panels follow each other in memory, and a whole panel is far enough ahead.
inline __attribute__((always_inline)) void prefetch(const uint8_t *p, int64_t panel_bytes, int n_lines) {
    for (int i = 0; i < n_lines; ++i) _mm_prefetch(reinterpret_cast<const char *>(p + panel_bytes + 64 * i), _MM_HINT_T1);
}

// One group of a panel, and its share of the scale plane.
template <class C>
inline __attribute__((always_inline)) void prefetch_group(const PanelShape &shape, const uint8_t *low, const uint8_t *high, const uint8_t *scales, int64_t g) {
    prefetch(low, shape.panel_bytes, C::kLow);
    if constexpr (C::kHigh > 0) prefetch(high, shape.panel_bytes, C::kHigh);
    prefetch(scales + g * C::kUnitBytes / C::kGroupsPerUnit, shape.panel_bytes, 1);
}

// One group of one row: adds d * (codes . x) and the part of the minima to the sum.
template <class C>
inline __attribute__((always_inline)) vf add_group(vf total, vb high, vb low, float sum, vf d, vf m) {
    total = v_fma(i_to_float(i_add(i_shift_left<7>(high), low)), d, total);
    if constexpr (C::kHasMin) total = v_fma(m, v_set(sum), total);
    return total;
}

constexpr int log2_of(int x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }

// Starts integer sums so that the offset of the codes is already taken off.
template <class C>
inline __attribute__((always_inline)) vb start(const int32_t *minus_sum) {
    if constexpr (C::kOffset == 0 || (kDotTakesOffset && C::kOffset == 128)) return i_zero();
    return i_shift_left<log2_of(C::kOffset)>(i_broadcast(minus_sum));
}

// Where kernels are in a panel: its planes, advanced to the lanes in question.
struct Cursor {
    const uint8_t *low, *high, *unit;
    int lane;
};

// One group of kRows rows: sums[r] += weights . (128 high + low).
template <class C, int kRows>
inline __attribute__((always_inline)) void dot_group(const Cursor &at, int64_t sub, const CodedX *x, vf sums[kRows]) {
    vf d[2], m[2];
    C::scales(at.unit, sub, at.lane, d, m);
    vb high[kRows], low[kRows];
    for (int r = 0; r < kRows; ++r) {
        high[r] = i_zero();
        low[r] = start<C>(C::kFine ? &x[r].minus_half[0] : &x[r].minus_sum);
    }
    unrolled<8>([&](auto index) {
        constexpr int kQuad = decltype(index)::value;
        if constexpr (C::kFine && kQuad == 4)
            for (int r = 0; r < kRows; ++r) {
                sums[r] = add_group<C>(sums[r], high[r], low[r], x[r].half_sum[0], d[0], m[0]);
                high[r] = i_zero();
                low[r] = start<C>(&x[r].minus_half[1]);
            }
        vb codes = C::template quad<kQuad>(at.low, at.high);
        for (int r = 0; r < kRows; ++r) {
            high[r] = i_dot<C::kOffset>(high[r], codes, x[r].high + 4 * kQuad);
            low[r] = i_dot<C::kOffset>(low[r], codes, x[r].low + 4 * kQuad);
        }
    });
    constexpr int kLast = C::kFine ? 1 : 0;
    for (int r = 0; r < kRows; ++r) sums[r] = add_group<C>(sums[r], high[r], low[r], C::kFine ? x[r].half_sum[1] : x[r].sum, d[kLast], m[kLast]);
}

template <class C, int kRows>
void coded_panel(const uint8_t *panel, const PanelShape &shape, const void *x_block, float *out) {
    constexpr int64_t kBlockGroups = kCodeBlock / kGroup;
    for (int half = 0; half < kHalves; ++half) {
        const auto *x = static_cast<const CodedX *>(x_block);
        Cursor at{panel + half * kVectorBytes, panel + shape.high_offset + half * kVectorBytes, panel + shape.scale_offset, half * static_cast<int>(kLanes)};
        vf total[kRows];
        for (int r = 0; r < kRows; ++r) total[r] = v_zero();
        for (int64_t begin = 0; begin < shape.n_groups; begin += kBlockGroups) {
            int64_t n = shape.n_groups - begin < kBlockGroups ? shape.n_groups - begin : kBlockGroups;
            vf sums[kRows];
            for (int r = 0; r < kRows; ++r) sums[r] = v_zero();
            for (int64_t g = 0; g < n; ++g) {
                if (half == 0) prefetch_group<C>(shape, at.low, at.high, panel + shape.scale_offset, begin + g);
                dot_group<C, kRows>(at, g, x, sums);
                at.low += 64 * C::kLow;
                at.high += 64 * C::kHigh;
                if constexpr (C::kGroupsPerUnit == 1) at.unit += C::kUnitBytes;
                x += kRows;
            }
            if constexpr (C::kGroupsPerUnit > 1) at.unit += C::kUnitBytes;
            for (int r = 0; r < kRows; ++r) total[r] = v_fma(sums[r], v_set(x[r - kRows].scale), total[r]);
        }
        vf factor = C::kHasFactor ? v_load(reinterpret_cast<const float *>(panel + shape.factor_offset) + at.lane) : v_set(1.0f);
        for (int r = 0; r < kRows; ++r) v_store(out + kPanelRows * r + at.lane, C::kHasFactor ? v_mul(total[r], factor) : total[r]);
    }
}

template <class P, int kRows>
void plain_panel(const uint8_t *panel, const PanelShape &shape, const void *x_block, float *out) {
    constexpr int64_t kBlockPairs = kFp8Block / 2, kPairBytes = P::kFormat == PK_F32 ? 128 : P::kHasScale ? 32 : 64;
    const int64_t n_pairs = (shape.k + 1) / 2;
    for (int half = 0; half < kHalves; ++half) {
        const int lane = half * static_cast<int>(kLanes);
        const auto *x = static_cast<const float *>(x_block);
        const auto *scales = reinterpret_cast<const float *>(panel + shape.scale_offset) + lane;
        vf total[kRows], even_sum[kRows], odd_sum[kRows];
        for (int r = 0; r < kRows; ++r) total[r] = even_sum[r] = odd_sum[r] = v_zero();
        int64_t pair = 0;
        while (pair < n_pairs) {
            int64_t end = P::kHasScale && pair + kBlockPairs < n_pairs ? pair + kBlockPairs : n_pairs;
            for (; pair < end; ++pair) {
                if (half == 0) prefetch(panel + pair * kPairBytes, shape.panel_bytes, kPairBytes > 64 ? 2 : 1);
                vf even, odd;
                P::pair(panel, pair, lane, &even, &odd);
                for (int r = 0; r < kRows; ++r) even_sum[r] = v_fma(even, v_set(x[r]), even_sum[r]);
                for (int r = 0; r < kRows; ++r) odd_sum[r] = v_fma(odd, v_set(x[kRows + r]), odd_sum[r]);
                x += 2 * kRows;
            }
            if constexpr (P::kHasScale) {
                vf scale = v_mul(v_load(scales), v_set(P::kUnit));
                scales += kPanelRows;
                for (int r = 0; r < kRows; ++r) {
                    total[r] = v_fma(v_add(even_sum[r], odd_sum[r]), scale, total[r]);
                    even_sum[r] = odd_sum[r] = v_zero();
                }
            }
        }
        for (int r = 0; r < kRows; ++r) v_store(out + kPanelRows * r + lane, v_add(total[r], v_add(even_sum[r], odd_sum[r])));
    }
}

template <int kRows>
PanelKernel panel_of(int32_t format) {
    switch (format) {
        case PK_F32: return plain_panel<Plain<PK_F32>, kRows>;
        case PK_F16: return plain_panel<Plain<PK_F16>, kRows>;
        case PK_BF16: return plain_panel<Plain<PK_BF16>, kRows>;
        case PK_FP8_E4M3: return plain_panel<Plain<PK_FP8_E4M3>, kRows>;
        case PK_FP8_E5M2: return plain_panel<Plain<PK_FP8_E5M2>, kRows>;
        case PK_Q8_0: return coded_panel<CodecQ8_0, kRows>;
        case PK_Q4_0: return coded_panel<CodecQ4_0, kRows>;
        case PK_Q4_1: return coded_panel<CodecQ4_1, kRows>;
        case PK_Q4_Z: return coded_panel<CodecQ4_Z, kRows>;
        case PK_Q5_0: return coded_panel<CodecQ5_0, kRows>;
        case PK_Q5_1: return coded_panel<CodecQ5_1, kRows>;
        case PK_Q2_K: return coded_panel<CodecQ2_K, kRows>;
        case PK_Q3_K: return coded_panel<CodecQ3_K, kRows>;
        case PK_Q4_K: return coded_panel<CodecQ4_K, kRows>;
        case PK_Q5_K: return coded_panel<CodecQ5_K, kRows>;
        case PK_Q6_K: return coded_panel<CodecQ6_K, kRows>;
        case PK_IQ4_NL: return coded_panel<CodecIQ4_NL, kRows>;
        case PK_IQ4_XS: return coded_panel<CodecIQ4_XS, kRows>;
        case PK_MXFP4: return coded_panel<CodecMXFP4, kRows>;
        case PK_NVFP4: return coded_panel<CodecNVFP4, kRows>;
        default: return nullptr;
    }
}

[[maybe_unused]] void pack_coded(const float *x, int64_t stride, int64_t cols, int64_t n_rows, int64_t block_rows, void *to_block) {
    auto *out = static_cast<CodedX *>(to_block);
    for (int64_t r = 0; r < block_rows; ++r) {
        const float *row = x + r * stride;
        BlockScale scale{};
        for (int64_t k = 0; k < cols; k += kGroup) {
            CodedX &to = out[k / kGroup * block_rows + r];
            if (r >= n_rows) {
                std::memset(&to, 0, sizeof to);
                continue;
            }
            if (k % kCodeBlock == 0) scale = block_scale(row + k, cols - k < kCodeBlock ? cols - k : kCodeBlock);
            vi codes[kGroupVectors];
            group_codes(row + k, cols - k, scale.inverse, codes);
            int32_t sums[2];
            half_sums(codes, sums);
            for (int i = 0; i < kGroupVectors; ++i) {
                vi low = low_part(codes[i]);
                vi_store_bytes(to.low + i * kLanes, low);
                vi_store_bytes(to.high + i * kLanes, vi_right<7>(vi_sub(codes[i], low)));
            }
            for (int i = 0; i < 2; ++i) {
                to.minus_half[i] = -sums[i];
                to.half_sum[i] = static_cast<float>(sums[i]);
            }
            to.minus_sum = -(sums[0] + sums[1]);
            to.sum = static_cast<float>(sums[0] + sums[1]);
            to.scale = scale.scale;
            to.unused = 0;
        }
    }
}

[[maybe_unused]] void pack_plain(const float *x, int64_t stride, int64_t cols, int64_t n_rows, int64_t block_rows, float *out) {
    for (int64_t r = 0; r < block_rows; ++r) {
        const float *row = x + r * stride;
        for (int64_t k = 0; k < cols; ++k) out[k * block_rows + r] = r < n_rows ? row[k] : 0.0f;
        if (cols % 2) out[cols * block_rows + r] = 0.0f;
    }
}

}  // namespace
}  // namespace pk
