// Products of a few rows with panels: activations in eight bits against codes, or f32 against plain weights.
// Included once by each level's source.
#pragma once
#include "format/codec.h"
#include "matmul_finish.h"

namespace pk {
namespace {

constexpr int64_t kPrefetchBytes = 2048;

inline void prefetch(const uint8_t *p, int n_lines) {
    for (int i = 0; i < n_lines; ++i) _mm_prefetch(reinterpret_cast<const char *>(p + kPrefetchBytes + 64 * i), _MM_HINT_T0);
}

// One group of one row: adds d * (codes . x) and the part of the minima to the sum.
template <class C>
inline __attribute__((always_inline)) vf add_group(vf total, vb dots, float scale, float sum, vf d, vf m) {
    total = v_fma(i_to_float(dots), v_mul(d, v_set(scale)), total);
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

template <class C, int kRows>
void coded_panel(const uint8_t *panel, const PanelShape &shape, const void *x_block, float *out) {
    for (int half = 0; half < kHalves; ++half) {
        const uint8_t *low = panel + half * kVectorBytes, *high = panel + shape.high_offset + half * kVectorBytes;
        const uint8_t *unit = panel + shape.scale_offset;
        const int lane = half * static_cast<int>(kLanes);
        const auto *x = static_cast<const CodedX *>(x_block);
        constexpr int64_t kUnitBytes = C::kScale == Scale::kHalf ? 32 : C::kScale == Scale::kHalfMin ? 64 : C::kScale == Scale::kK16 ? 288
                                       : C::kScale == Scale::kK32 ? 160 : C::kScale == Scale::kE8m0 ? 16 : C::kScale == Scale::kE4m3 ? 32 : 320;
        vf total[kRows];
        for (int r = 0; r < kRows; ++r) total[r] = v_zero();
        for (int64_t g = 0; g < shape.n_groups; ++g) {
            if (half == 0) {
                prefetch(low, C::kLow);
                if constexpr (C::kHigh > 0) prefetch(high, C::kHigh);
            }
            vf d[2], m[2];
            C::scales(unit, g % C::kGroupsPerUnit, lane, d, m);
            vb dots[kRows];
            for (int r = 0; r < kRows; ++r) dots[r] = start<C>(C::kFine ? &x[r].minus_half[0] : &x[r].minus_sum);
            unrolled<8>([&](auto index) {
                constexpr int kQuad = decltype(index)::value;
                if constexpr (C::kFine && kQuad == 4)
                    for (int r = 0; r < kRows; ++r) {
                        total[r] = add_group<C>(total[r], dots[r], x[r].scale, x[r].half_sum[0], d[0], m[0]);
                        dots[r] = start<C>(&x[r].minus_half[1]);
                    }
                vb codes = C::template quad<kQuad>(low, high);
                for (int r = 0; r < kRows; ++r) dots[r] = i_dot<C::kOffset>(dots[r], codes, x[r].code + 4 * kQuad);
            });
            constexpr int kLast = C::kFine ? 1 : 0;
            for (int r = 0; r < kRows; ++r) total[r] = add_group<C>(total[r], dots[r], x[r].scale, C::kFine ? x[r].half_sum[1] : x[r].sum, d[kLast], m[kLast]);
            low += 64 * C::kLow;
            high += 64 * C::kHigh;
            x += kRows;
            if (g % C::kGroupsPerUnit == C::kGroupsPerUnit - 1) unit += kUnitBytes;
        }
        if constexpr (C::kHasFactor) {
            vf factor = v_load(reinterpret_cast<const float *>(panel + shape.factor_offset) + lane);
            for (int r = 0; r < kRows; ++r) total[r] = v_mul(total[r], factor);
        }
        for (int r = 0; r < kRows; ++r) v_store(out + kPanelRows * r + lane, total[r]);
    }
}

template <class P, int kRows>
void plain_panel(const uint8_t *panel, const PanelShape &shape, const void *x_block, float *out) {
    constexpr int64_t kBlockPairs = kFp8Block / 2;
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
                vf even, odd;
                P::pair(panel, pair, lane, &even, &odd);
                for (int r = 0; r < kRows; ++r) even_sum[r] = v_fma(even, v_set(x[r]), even_sum[r]);
                for (int r = 0; r < kRows; ++r) odd_sum[r] = v_fma(odd, v_set(x[kRows + r]), odd_sum[r]);
                x += 2 * kRows;
            }
            if constexpr (P::kHasScale) {
                vf scale = v_load(scales);
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

// Codes of up to 32 activations. n < 32 at the end of a row: the rest is zero.
inline void pack_group(const float *x, int64_t n, CodedX *out) {
    constexpr int kParts = static_cast<int>(kGroup / kLanes);
    vf parts[kParts], top = v_zero();
    for (int i = 0; i < kParts; ++i) {
        int64_t left = n - i * kLanes;
        parts[i] = left >= kLanes ? v_load(x + i * kLanes) : left > 0 ? v_load(x + i * kLanes, left) : v_zero();
        top = v_max(top, v_abs(parts[i]));
    }
    float largest = v_highest(top), inverse = largest > 0 ? 127.0f / largest : 0.0f;
    out->scale = largest / 127.0f;
    int32_t sums[2] = {0, 0};
    alignas(64) int32_t codes[32];
    for (int i = 0; i < kParts; ++i) {
#if defined(__AVX512F__)
        __m512i rounded = _mm512_cvtps_epi32(v_mul(parts[i], v_set(inverse)));
        sums[i] = _mm512_reduce_add_epi32(rounded);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out->code + 16 * i), _mm512_cvtepi32_epi8(rounded));
#else
        _mm256_store_si256(reinterpret_cast<__m256i *>(codes + 8 * i), _mm256_cvtps_epi32(v_mul(parts[i], v_set(inverse))));
#endif
    }
#if !defined(__AVX512F__)
    for (int i = 0; i < 32; ++i) {
        out->code[i] = static_cast<int8_t>(codes[i]);
        sums[i / 16] += codes[i];
    }
#else
    (void)codes;
#endif
    out->minus_sum = -(sums[0] + sums[1]);
    out->sum = out->scale * static_cast<float>(sums[0] + sums[1]);
    for (int i = 0; i < 2; ++i) {
        out->minus_half[i] = -sums[i];
        out->half_sum[i] = out->scale * static_cast<float>(sums[i]);
    }
}

void pack_coded(const float *x, int64_t stride, int64_t cols, int64_t n_rows, int64_t block_rows, CodedX *out) {
    for (int64_t g = 0; g * kGroup < cols; ++g)
        for (int64_t r = 0; r < block_rows; ++r, ++out) {
            if (r < n_rows)
                pack_group(x + r * stride + g * kGroup, cols - g * kGroup, out);
            else
                std::memset(static_cast<void *>(out), 0, sizeof *out);
        }
}

void pack_plain(const float *x, int64_t stride, int64_t cols, int64_t n_rows, int64_t block_rows, float *out) {
    for (int64_t r = 0; r < block_rows; ++r) {
        const float *row = x + r * stride;
        for (int64_t k = 0; k < cols; ++k) out[k * block_rows + r] = r < n_rows ? row[k] : 0.0f;
        if (cols % 2) out[cols * block_rows + r] = 0.0f;
    }
}

}  // namespace
}  // namespace pk
