// Activations as integers, the same at every level and for every number of rows, so that a row's result does not depend
// on the company it is computed in: per block of 256 columns a scale, x = scale * (128 high + low), 15 bits in all.
#pragma once
#include "matmul_kernels.h"
#include "simd.h"

namespace pk {
namespace {

constexpr int64_t kCodeBlock = 256;
constexpr float kCodeRange = 127.0f * 128.0f;

struct BlockScale {
    float scale, inverse;
};

// Scale of up to kCodeBlock activations; NaN when one of them is not finite.
inline BlockScale block_scale(const float *x, int64_t n) {
    vf top = v_zero(), bad = v_zero();
    for (int64_t i = 0; i < n; i += kLanes) {
        vf part = n - i >= kLanes ? v_load(x + i) : v_load(x + i, n - i);
        top = v_max(top, v_abs(part));
        bad = v_fma(part, v_zero(), bad);
    }
    float largest = v_highest(top), nan = v_sum(bad);
    if (nan != 0.0f) return {nan, 0.0f};
    if (largest < 1e-30f) return {0.0f, 0.0f};
    return {largest / kCodeRange, kCodeRange / largest};
}

#if defined(__AVX512F__)
using vi = __m512i;
inline vi v_to_int(vf x) { return _mm512_cvtps_epi32(x); }
inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
inline vi vi_set(int x) { return _mm512_set1_epi32(x); }
inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vf vi_to_float(vi a) { return _mm512_cvtepi32_ps(a); }
inline int32_t vi_sum(vi a) { return _mm512_reduce_add_epi32(a); }
inline void vi_store_bytes(int8_t *p, vi a) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(a)); }
template <int kBy>
inline vi vi_right(vi a) { return _mm512_srai_epi32(a, kBy); }
#else
using vi = __m256i;
inline vi v_to_int(vf x) { return _mm256_cvtps_epi32(x); }
inline vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
inline vi vi_set(int x) { return _mm256_set1_epi32(x); }
inline vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
inline vf vi_to_float(vi a) { return _mm256_cvtepi32_ps(a); }
inline int32_t vi_sum(vi a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
inline void vi_store_bytes(int8_t *p, vi a) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(words, words));
}
template <int kBy>
inline vi vi_right(vi a) { return _mm256_srai_epi32(a, kBy); }
#endif

constexpr int kGroupVectors = static_cast<int>(kGroup / kLanes);

// The integers of up to 32 activations (zero beyond `left`), -16256 to 16256.
inline void group_codes(const float *x, int64_t left, float inverse, vi out[kGroupVectors]) {
    for (int i = 0; i < kGroupVectors; ++i) {
        int64_t n = left - i * kLanes;
        vf part = n >= kLanes ? v_load(x + i * kLanes) : n > 0 ? v_load(x + i * kLanes, n) : v_zero();
        out[i] = v_to_int(v_mul(part, v_set(inverse)));
    }
}

// low = what is left when the nearest multiple of 128 is taken away, -64 to 63.
inline vi low_part(vi code) { return vi_sub(vi_and(vi_add(code, vi_set(64)), vi_set(127)), vi_set(64)); }

inline void half_sums(const vi codes[kGroupVectors], int32_t sums[2]) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < kGroupVectors; ++i) sums[i * 2 / kGroupVectors] += vi_sum(codes[i]);
}

}  // namespace
}  // namespace pk
