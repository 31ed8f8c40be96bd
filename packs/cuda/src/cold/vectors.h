// Sixteen lanes of one instruction level: a register under AVX-512, two under AVX2, with the same names; and what of x a level multiplies codes with:
// floats, or pairs of bf16 where there are products of these (PK_COLD_BF16). For level.h only.
#pragma once

namespace pk {
namespace {

template <class V>
inline V load(const void *p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

inline float half_to_float(const uint8_t *p) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load<uint16_t>(p)))); }

#if defined(PK_COLD_AVX512)

typedef __m512 Floats;
typedef __m512i Words;

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats splat(float v) { return _mm512_set1_ps(v); }
inline Floats floats_at(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
// a b + c, and c - a b.
inline Floats add_product(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline float sum_of(Floats v) { return _mm512_reduce_add_ps(v); }
// The first eight lanes and the last, or the same eight twice.
inline Floats joined(__m256 low, __m256 high) { return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1); }

inline Words words_at(const uint8_t *p) { return load<__m512i>(p); }
template <int kShift>
inline Words down(Words w) { return _mm512_srli_epi32(w, kShift); }
template <int kShift>
inline Words up(Words w) { return _mm512_slli_epi32(w, kShift); }
inline Words masked(Words w, int mask) { return _mm512_and_si512(w, _mm512_set1_epi32(mask)); }
inline Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
inline Floats from_words(Words w) { return _mm512_cvtepi32_ps(w); }
inline Floats from_signed(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p))); }
inline Floats from_unsigned(__m128i v) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(v)); }
inline Floats from_bf16(const void *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16)); }
inline Floats from_halves(__m256i v) { return _mm512_cvtph_ps(v); }
// For each lane c of a warp the words (a[4 c + p], b[4 c + p]) twice, the second time shifted down by eight.
inline Words high_words(const uint8_t *a, const uint8_t *b, int p) {
    const __m512i at = _mm512_add_epi32(_mm512_setr_epi32(0, 16, 0, 16, 4, 20, 4, 20, 8, 24, 8, 24, 12, 28, 12, 28), _mm512_set1_epi32(p));
    return _mm512_srlv_epi32(_mm512_permutex2var_epi32(words_at(a), at, words_at(b)), _mm512_setr_epi32(0, 0, 8, 8, 0, 0, 8, 8, 0, 0, 8, 8, 0, 0, 8, 8));
}

#else

struct Floats {
    __m256 low, high;
};
struct Words {
    __m256i low, high;
};

inline Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats splat(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline Floats floats_at(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, Floats v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
}
inline Floats times(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats plus(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats add_product(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
inline Floats subtract_product(Floats a, Floats b, Floats c) { return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)}; }
inline float sum_of(Floats v) {
    const __m256 both = _mm256_add_ps(v.low, v.high);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline Floats joined(__m256 low, __m256 high) { return {low, high}; }

inline Words words_at(const uint8_t *p) { return {load<__m256i>(p), load<__m256i>(p + 32)}; }
template <int kShift>
inline Words down(Words w) { return {_mm256_srli_epi32(w.low, kShift), _mm256_srli_epi32(w.high, kShift)}; }
template <int kShift>
inline Words up(Words w) { return {_mm256_slli_epi32(w.low, kShift), _mm256_slli_epi32(w.high, kShift)}; }
inline Words masked(Words w, int mask) { return {_mm256_and_si256(w.low, _mm256_set1_epi32(mask)), _mm256_and_si256(w.high, _mm256_set1_epi32(mask))}; }
inline Words either(Words a, Words b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
inline Floats from_words(Words w) { return {_mm256_cvtepi32_ps(w.low), _mm256_cvtepi32_ps(w.high)}; }
inline Floats from_signed(const uint8_t *p) { return from_words({_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))), _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 8)))}); }
inline Floats from_unsigned(__m128i v) { return from_words({_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))}); }
inline Floats from_bf16(const void *p) {
    const uint8_t *at = static_cast<const uint8_t *>(p);
    auto widened = [](__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); };
    return {widened(load<__m128i>(at)), widened(load<__m128i>(at + 16))};
}
inline Floats from_halves(__m256i v) { return {_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))}; }
inline Words high_words(const uint8_t *a, const uint8_t *b, int p) {
    auto half = [&](int c) {
        const int near = load<int32_t>(a + 16 * c + 4 * p), far = load<int32_t>(b + 16 * c + 4 * p), next = load<int32_t>(a + 16 * c + 16 + 4 * p), last = load<int32_t>(b + 16 * c + 16 + 4 * p);
        return _mm256_srlv_epi32(_mm256_setr_epi32(near, far, near, far, next, last, next, last), _mm256_setr_epi32(0, 0, 8, 8, 0, 0, 8, 8));
    };
    return {half(0), half(2)};
}

#endif

// Four floats, four times.
inline Floats four_times(const float *p) {
    const __m256 both = _mm256_broadcast_ps(reinterpret_cast<const __m128 *>(p));
    return joined(both, both);
}
// p[0], p[1], p[4] and p[5], four times.
inline Floats pairs_of(const float *p) {
    const __m128 pair = _mm_castpd_ps(_mm_loadh_pd(_mm_load_sd(reinterpret_cast<const double *>(p)), reinterpret_cast<const double *>(p + 4)));
    const __m256 both = _mm256_set_m128(pair, pair);
    return joined(both, both);
}
inline Floats alternating(float even, float odd) {
    const __m256 both = _mm256_setr_ps(even, odd, even, odd, even, odd, even, odd);
    return joined(both, both);
}

#if defined(PK_COLD_BF16)

// x of two blocks of 32: pairs of neighbours in the 16 words of a line. Products are of 128 + code.
struct PairX {
    __m512i at[4];
};
constexpr int kCodeBias = 128, kPairWords = 4 * 16, kXBytes = 2;  // kXBytes: of a value of x for row-major formats

inline PairX pair_x(const float *p) {
    PairX x;
    for (int i = 0; i < 4; ++i) x.at[i] = load<__m512i>(p + 16 * i);
    return x;
}
inline Floats dot(Floats sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)); }
// (a & mask) | b.
inline __m512i merged(__m512i a, int mask, __m512i b) { return _mm512_ternarylogic_epi32(a, _mm512_set1_epi32(mask), b, 0xea); }
template <int kI>
inline Floats dot_nibbles(Words w, const PairX &x, Floats sum) {
    return dot(sum, merged(down<4 * kI>(w), 0x000f000f, _mm512_set1_epi32(0x43004300)), x.at[kI]);
}
template <int kI>
inline Floats dot_six_bits(Words w, Words h, const PairX &x, Floats sum) {
    const __m512i low = merged(down<4 * kI>(w), 0x000f000f, _mm512_set1_epi32(0x43004300));
    const __m512i high = kI < 2 ? up<kI < 2 ? 4 - 2 * kI : 0>(h) : down<kI < 2 ? 0 : 2 * kI - 4>(h);
    return dot(sum, merged(high, 0x00300030, low), x.at[kI]);
}
// 32 values of a row-major format times x in its order.
constexpr float kE4m3Factor = 1.0f;
template <int kFormat>
inline Floats dot_plain(const uint8_t *w, const float *x, Floats sum) {
    if constexpr (kFormat == PK_BF16) return dot(sum, load<__m512i>(w), load<__m512i>(x));
    const __m512i wide = _mm512_cvtepi8_epi16(load<__m256i>(w));
    // Codes whose exponent is zero are multiples of 2^-9.
    const __m512i least = _mm512_castsi128_si512(_mm_setr_epi16(0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i v = _mm512_add_epi16(_mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x07f0)), _mm512_set1_epi16(0x3c00));
    v = _mm512_mask_permutexvar_epi16(v, _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78)), wide, least);
    return dot(sum, _mm512_ternarylogic_epi32(wide, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), v, 0xea), load<__m512i>(x));
}
inline void prepare_plain(float *out, int64_t k, const uint16_t *x) { __builtin_memcpy(reinterpret_cast<uint16_t *>(out) + k, x, 32); }
inline void prepare_word(float *pair, int j, int word, float v) {
    uint32_t bits;
    __builtin_memcpy(&bits, &v, 4);
    reinterpret_cast<uint16_t *>(pair)[(16 * (j >> 1) + word) * 2 + (j & 1)] = static_cast<uint16_t>(bits >> 16);
}

#else

struct PairX {
    const float *at;
};
constexpr int kCodeBias = 0, kPairWords = 8 * 16, kXBytes = 4;

inline PairX pair_x(const float *p) { return {p}; }
template <int kI>
inline Floats dot_nibbles(Words w, const PairX &x, Floats sum) {
    sum = add_product(from_words(masked(down<4 * kI>(w), 15)), floats_at(x.at + 32 * kI), sum);
    return add_product(from_words(masked(down<4 * kI + 16>(w), 15)), floats_at(x.at + 32 * kI + 16), sum);
}
template <int kI>
inline Floats dot_six_bits(Words w, Words h, const PairX &x, Floats sum) {
    const Words even = either(masked(down<4 * kI>(w), 15), up<4>(masked(down<2 * kI>(h), 3))), odd = either(masked(down<4 * kI + 16>(w), 15), up<4>(masked(down<2 * kI + 16>(h), 3)));
    return add_product(from_words(odd), floats_at(x.at + 32 * kI + 16), add_product(from_words(even), floats_at(x.at + 32 * kI), sum));
}
// E4M3 by way of halves, whose exponents are 8 more.
constexpr float kE4m3Factor = 256.0f;
template <int kFormat>
inline Floats dot_plain(const uint8_t *w, const float *x, Floats sum) {
    for (int i = 0; i < 2; ++i) {
        Floats v;
        if constexpr (kFormat == PK_BF16) {
            v = from_bf16(w + 32 * i);
        } else {
            const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(w + 16 * i)), 7);
            v = from_halves(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
        }
        sum = add_product(v, floats_at(x + 16 * i), sum);
    }
    return sum;
}
inline void prepare_plain(float *out, int64_t k, const uint16_t *x) { store(out + k, from_bf16(x)); }
inline void prepare_word(float *pair, int j, int word, float v) { pair[16 * j + word] = v; }

#endif

}  // namespace
}  // namespace pk
