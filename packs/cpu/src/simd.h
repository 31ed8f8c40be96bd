// Vectors of one instruction level: 16 floats under AVX-512, 8 under AVX2, with the same names. For level sources only
// (*_avx2.cpp, *_avx512.cpp, *_amx.cpp): everything lies in an anonymous namespace, so no level's code leaks into another.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../../pack.h"

#if defined(__AMX_TILE__) && defined(_tile_loadd_internal)
// gcc's tile loads do not say that they read memory: stores to a tile's rows could be moved behind them.
#undef _tile_loadd
#define _tile_loadd(dst, base, stride)   \
    do {                                 \
        __asm__ volatile("" ::: "memory"); \
        _tile_loadd_internal(dst, base, stride); \
    } while (0)
#endif

namespace pk {
namespace {

#if defined(__AVX512F__)

using vf = __m512;
constexpr int64_t kLanes = 16;

inline __mmask16 first_n(int64_t n) { return n >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << n) - 1); }
inline vf v_zero() { return _mm512_setzero_ps(); }
inline vf v_set(float x) { return _mm512_set1_ps(x); }
inline vf v_load(const float *p) { return _mm512_loadu_ps(p); }
inline vf v_load(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(first_n(n), p); }
inline void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
inline void v_store(float *p, vf x, int64_t n) { _mm512_mask_storeu_ps(p, first_n(n), x); }
inline vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf v_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
inline vf v_abs(vf a) { return _mm512_abs_ps(a); }
inline float v_sum(vf a) { return _mm512_reduce_add_ps(a); }
inline float v_highest(vf a) { return _mm512_reduce_max_ps(a); }
// Lanes below n from a, the others from b.
inline vf v_first(vf a, vf b, int64_t n) { return _mm512_mask_mov_ps(b, first_n(n), a); }
inline vf v_negate_if_negative(vf value, vf sign) { return _mm512_xor_ps(value, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f))); }

inline vf v_from_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
inline vf v_from_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))), 16));
}
// Moved into place, a code is the f16 that is 2^-8 times its value; 0x7F is NaN.
inline vf v_from_e4m3(const uint8_t *p) {
    const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), nan = _mm256_set1_epi16(0x3F80);
    __m256i bits = _mm256_and_si256(_mm256_slli_epi16(codes, 7), nan);
    bits = _mm256_or_si256(bits, _mm256_cmpeq_epi16(bits, nan));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(bits, _mm256_and_si256(_mm256_slli_epi16(codes, 8), _mm256_set1_epi16(-0x8000)))), v_set(256.0f));
}
inline void v_to_f16(uint16_t *p, vf x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
// Round to nearest, ties to even; NaN stays NaN.
inline __m256i v_bf16_bits(vf x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF)), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0)));
}
inline void v_to_bf16(uint16_t *p, vf x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), v_bf16_bits(x)); }

// e^x within 2 ulp; 0 below -87.3, which covers -inf: results are never denormal, sums over them would be slow.
// Source: Cephes expf, with its reduction and coefficients.
inline vf v_exp(vf x) {
    __mmask16 counts = _mm512_cmp_ps_mask(x, v_set(-87.3f), _CMP_GE_OQ);
    x = _mm512_min_ps(x, v_set(88.7f));
    vf n = _mm512_roundscale_ps(_mm512_mul_ps(x, v_set(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf r = v_fnma(n, v_set(0.693359375f), x);
    r = v_fnma(n, v_set(-2.12194440e-4f), r);
    vf p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_fma(p, v_mul(r, r), v_add(r, v_set(1.0f)));
    return _mm512_maskz_scalef_ps(counts, p, n);
}

#else

using vf = __m256;
constexpr int64_t kLanes = 8;

inline __m256i first_n(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n > 8 ? 8 : n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline vf v_zero() { return _mm256_setzero_ps(); }
inline vf v_set(float x) { return _mm256_set1_ps(x); }
inline vf v_load(const float *p) { return _mm256_loadu_ps(p); }
inline vf v_load(const float *p, int64_t n) { return _mm256_maskload_ps(p, first_n(n)); }
inline void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
inline void v_store(float *p, vf x, int64_t n) { _mm256_maskstore_ps(p, first_n(n), x); }
inline vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf v_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
inline vf v_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline float v_sum(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float v_highest(vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline vf v_first(vf a, vf b, int64_t n) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(first_n(n))); }
inline vf v_negate_if_negative(vf value, vf sign) { return _mm256_xor_ps(value, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f))); }

inline vf v_from_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
inline vf v_from_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), 16));
}
inline vf v_from_e4m3(const uint8_t *p) {
    const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))), nan = _mm_set1_epi16(0x3F80);
    __m128i bits = _mm_and_si128(_mm_slli_epi16(codes, 7), nan);
    bits = _mm_or_si128(bits, _mm_cmpeq_epi16(bits, nan));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(bits, _mm_and_si128(_mm_slli_epi16(codes, 8), _mm_set1_epi16(-0x8000)))), v_set(256.0f));
}
inline void v_to_f16(uint16_t *p, vf x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
inline __m128i v_bf16_bits(vf x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF)), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
    __m256i packed = _mm256_packus_epi32(rounded, rounded);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
inline void v_to_bf16(uint16_t *p, vf x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), v_bf16_bits(x)); }

// e^x within 2 ulp; 0 below -87.3, which covers -inf. Source: Cephes expf, with its reduction and coefficients.
inline vf v_exp(vf x) {
    vf tiny = _mm256_cmp_ps(x, v_set(-87.3f), _CMP_LT_OQ);
    x = _mm256_max_ps(_mm256_min_ps(x, v_set(88.7f)), v_set(-87.3f));
    vf n = _mm256_round_ps(_mm256_mul_ps(x, v_set(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf r = v_fnma(n, v_set(0.693359375f), x);
    r = v_fnma(n, v_set(-2.12194440e-4f), r);
    vf p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_fma(p, v_mul(r, r), v_add(r, v_set(1.0f)));
    // 2^n in two factors: n = 128 has no representation as one.
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    __m256i bias = _mm256_set1_epi32(127);
    p = v_mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    p = v_mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
    return _mm256_andnot_ps(tiny, p);
}

#endif

inline float bf16_to_f32(uint16_t bits) {
    uint32_t word = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}

inline uint16_t f32_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float f16_to_f32(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }
inline uint16_t f32_to_f16(float x) { return static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT), 0)); }

// Round to nearest, ties to even; what is beyond 448 becomes 448, NaN stays NaN.
inline uint8_t f32_to_e4m3(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80;
    float size = __builtin_fabsf(x);
    if (size != size) return static_cast<uint8_t>(sign | 0x7F);
    if (size > 448.0f) size = 448.0f;
    if (size < 0x1p-6f) {  // multiples of 2^-9: the last bit of numbers at 2^14
        size += 0x1p14f;
        std::memcpy(&bits, &size, 4);
        return static_cast<uint8_t>(sign | (bits & 15));
    }
    std::memcpy(&bits, &size, 4);
    return static_cast<uint8_t>(sign | (((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)));
}

// tanh x = 1 - 2 / (e^2x + 1); absolute error below 2e-7.
inline vf v_tanh(vf x) {
    vf e = v_exp(v_mul(x, v_set(2.0f)));
    return v_sub(v_set(1.0f), v_div(v_set(2.0f), v_add(e, v_set(1.0f))));
}

inline vf v_silu(vf x) { return v_div(x, v_add(v_set(1.0f), v_exp(v_sub(v_zero(), x)))); }

inline vf v_gelu_tanh(vf x) {
    vf inner = v_mul(v_set(0.7978845608028654f), v_mul(x, v_fma(v_mul(v_set(0.044715f), x), x, v_set(1.0f))));
    return v_mul(v_mul(v_set(0.5f), x), v_add(v_set(1.0f), v_tanh(inner)));
}

// Source: Abramowitz and Stegun 7.1.26, |error| <= 1.5e-7.
inline vf v_erf(vf x) {
    vf a = v_abs(x);
    vf t = v_div(v_set(1.0f), v_fma(v_set(0.3275911f), a, v_set(1.0f)));
    vf p = v_set(1.061405429f);
    p = v_fma(p, t, v_set(-1.453152027f));
    p = v_fma(p, t, v_set(1.421413741f));
    p = v_fma(p, t, v_set(-0.284496736f));
    p = v_mul(v_fma(p, t, v_set(0.254829592f)), t);
    vf y = v_fnma(p, v_exp(v_sub(v_zero(), v_mul(a, a))), v_set(1.0f));
    return v_negate_if_negative(y, x);
}

inline vf v_gelu_erf(vf x) { return v_mul(v_mul(v_set(0.5f), x), v_add(v_set(1.0f), v_erf(v_mul(x, v_set(0.7071067811865476f))))); }

inline vf v_act(vf x, int32_t act) {
    switch (act) {
        case PK_ACT_SILU: return v_silu(x);
        case PK_ACT_GELU_TANH: return v_gelu_tanh(x);
        case PK_ACT_GELU_ERF: return v_gelu_erf(x);
        case PK_ACT_RELU2: {
            vf positive = v_max(x, v_zero());
            return v_mul(positive, positive);
        }
        default: return x;
    }
}

}  // namespace
}  // namespace pk
