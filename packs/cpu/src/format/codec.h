// Panels to vectors: one Codec per kind of layout, the same source for every instruction level (see ../simd.h).
//
// A vector of codes covers kLanes rows x 4 columns; under AVX2 a panel is done in two halves of 8 rows.
#pragma once
#include "../simd.h"
#include "layout.h"

namespace pk {
namespace {

template <int kValue>
struct Index {
    static constexpr int value = kValue;
};

// body(Index<0>{}) ... body(Index<kEnd - 1>{}): loops whose counter is a constant.
template <int kEnd, int kAt = 0, class Body>
inline __attribute__((always_inline)) void unrolled(const Body &body) {
    if constexpr (kAt < kEnd) {
        body(Index<kAt>{});
        unrolled<kEnd, kAt + 1>(body);
    }
}

#if defined(__AVX512F__)

using vb = __m512i;
constexpr int kVectorBytes = 64;
inline vb b_load(const void *p) { return _mm512_loadu_si512(p); }
inline vb b_set(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
inline vb b_and(vb a, vb b) { return _mm512_and_si512(a, b); }
// lo | (x & mask)
inline vb b_merge(vb lo, vb x, vb mask) { return _mm512_ternarylogic_epi32(lo, x, mask, 0xF8); }
template <int kBy>
inline vb b_shift(vb x) {  // right by kBy bits, left when negative; bits cross bytes
    if constexpr (kBy > 0) return _mm512_srli_epi16(x, kBy);
    if constexpr (kBy < 0) return _mm512_slli_epi16(x, -kBy);
    return x;
}
inline vb b_lookup(const uint8_t *table, vb index) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table))), index);
}
inline vb i_zero() { return _mm512_setzero_si512(); }
inline vb i_broadcast(const int32_t *p) { return _mm512_set1_epi32(*p); }
template <int kBy>
inline vb i_shift_left(vb x) { return _mm512_slli_epi32(x, kBy); }
inline vb i_add(vb a, vb b) { return _mm512_add_epi32(a, b); }
inline vf i_to_float(vb x) { return _mm512_cvtepi32_ps(x); }
// sum[row] += four codes of the row times four signed bytes
template <int kOffset>
inline vb i_dot(vb sum, vb codes, const int8_t *four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(word));
}
constexpr bool kDotTakesOffset = false;
inline vf v_from_u8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))); }
inline vf v_from_i8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))); }
inline vf v_from_low_nibble(const uint8_t *p) {
    __m128i bytes = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)), _mm_set1_epi8(15));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}
inline vf v_from_high_nibble(const uint8_t *p) {
    __m128i bytes = _mm_and_si128(_mm_srli_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)), 4), _mm_set1_epi8(15));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}
// 2^(e - 128)
inline vf v_from_e8m0(const uint8_t *p) {
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2)), small));
}
inline vf v_from_f16_bits(__m512i low_words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(low_words)); }
inline __m512i widen_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
inline __m512i d_and(__m512i a, int mask) { return _mm512_and_si512(a, _mm512_set1_epi32(mask)); }
inline __m512i d_or(__m512i a, __m512i b) { return _mm512_or_si512(a, b); }
template <int kBy>
inline __m512i d_left(__m512i a) { return _mm512_slli_epi32(a, kBy); }
inline vf v_zero_where_equal(vf x, __m512i a, int value) { return _mm512_mask_mov_ps(x, _mm512_cmpeq_epi32_mask(a, _mm512_set1_epi32(value)), v_zero()); }
// Codes of fp8 as f16 bits: e5m2 is the upper half of an f16; e4m3 moved into place is 2^-8 times the value.
template <bool kIsE4m3>
inline __m512i fp8_to_f16(__m512i words) {
    if constexpr (!kIsE4m3) return _mm512_slli_epi16(words, 8);
    __m512i sign = _mm512_slli_epi16(words, 8), magnitude = _mm512_and_si512(_mm512_slli_epi16(words, 7), _mm512_set1_epi16(0x3F80));
    return _mm512_ternarylogic_epi32(magnitude, sign, _mm512_set1_epi16(static_cast<short>(0x8000)), 0xF8);
}
template <bool kIsE4m3>
inline void v_from_fp8_pair(const uint8_t *p, vf *even, vf *odd) {
    __m512i bits = fp8_to_f16<kIsE4m3>(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))));
    *even = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
    *odd = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
}
// Sixteen pairs of bf16: the even elements, the odd elements.
inline void v_from_bf16_pairs(const uint8_t *p, vf *even, vf *odd) {
    __m512i bits = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
}

#else

using vb = __m256i;
constexpr int kVectorBytes = 32;
inline vb b_load(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
inline vb b_set(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
inline vb b_and(vb a, vb b) { return _mm256_and_si256(a, b); }
inline vb b_merge(vb lo, vb x, vb mask) { return _mm256_or_si256(lo, _mm256_and_si256(x, mask)); }
template <int kBy>
inline vb b_shift(vb x) {
    if constexpr (kBy > 0) return _mm256_srli_epi16(x, kBy);
    if constexpr (kBy < 0) return _mm256_slli_epi16(x, -kBy);
    return x;
}
inline vb b_lookup(const uint8_t *table, vb index) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table))), index);
}
inline vb i_zero() { return _mm256_setzero_si256(); }
inline vb i_broadcast(const int32_t *p) { return _mm256_set1_epi32(*p); }
template <int kBy>
inline vb i_shift_left(vb x) { return _mm256_slli_epi32(x, kBy); }
inline vb i_add(vb a, vb b) { return _mm256_add_epi32(a, b); }
inline vf i_to_float(vb x) { return _mm256_cvtepi32_ps(x); }
// Sums of two products must fit 16 bits: codes of eight bits are made signed first, which takes their offset of 128 along.
template <int kOffset>
inline vb i_dot(vb sum, vb codes, const int8_t *four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    vb x = _mm256_set1_epi32(word), pairs;
    if constexpr (kOffset == 128) {
        vb values = _mm256_xor_si256(codes, b_set(0x80));
        pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(values), _mm256_sign_epi8(x, values));
    } else {
        pairs = _mm256_maddubs_epi16(codes, x);
    }
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
constexpr bool kDotTakesOffset = true;
inline __m128i load8(const uint8_t *p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)); }
inline vf v_from_u8(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load8(p))); }
inline vf v_from_i8(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(p))); }
inline vf v_from_low_nibble(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_cvtepu8_epi32(load8(p)), _mm256_set1_epi32(15))); }
inline vf v_from_high_nibble(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_cvtepu8_epi32(load8(p)), 4)); }
inline vf v_from_e8m0(const uint8_t *p) {
    __m256i e = _mm256_cvtepu8_epi32(load8(p));
    __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}
inline vf v_from_f16_bits(__m256i low_words) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low_words, low_words), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
inline __m256i widen_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(load8(p)); }
inline __m256i d_and(__m256i a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi32(mask)); }
inline __m256i d_or(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
template <int kBy>
inline __m256i d_left(__m256i a) { return _mm256_slli_epi32(a, kBy); }
inline vf v_zero_where_equal(vf x, __m256i a, int value) {
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a, _mm256_set1_epi32(value))), x);
}
template <bool kIsE4m3>
inline vf v_from_fp8(const uint8_t *p) {
    __m128i words = _mm_cvtepu8_epi16(load8(p)), sign = _mm_slli_epi16(words, 8);
    if constexpr (!kIsE4m3) return _mm256_cvtph_ps(sign);
    __m128i magnitude = _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(0x3F80));
    return _mm256_cvtph_ps(_mm_or_si128(magnitude, _mm_and_si128(sign, _mm_set1_epi16(static_cast<short>(0x8000)))));
}
template <bool kIsE4m3>
inline void v_from_fp8_pair(const uint8_t *p, vf *even, vf *odd) {
    *even = v_from_fp8<kIsE4m3>(p);
    *odd = v_from_fp8<kIsE4m3>(p + 16);
}
inline void v_from_bf16_pairs(const uint8_t *p, vf *even, vf *odd) {
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
}

#endif

constexpr int kHalves = static_cast<int>(kPanelRows / kLanes);

inline const uint16_t *as_words(const uint8_t *p) { return reinterpret_cast<const uint16_t *>(p); }

// e4m3 codes (in dwords) without sign: the bits of an f16 that is 2^-8 times the value.
inline vf v_from_e4m3(decltype(widen_u8(nullptr)) code) {
    auto bits = d_or(d_left<7>(d_and(code, 0x7F)), d_left<8>(d_and(code, 0x80)));
    return v_mul(v_from_f16_bits(bits), v_set(256.0f));
}

// Codes with scales. kHigh bits lie above kLow bits; kTable: codes index a table; value = code (or table value) - kOffset.
template <int kLowBits, int kHighBits, Scale kScaleKind, int kValueOffset, bool kHasTable = false>
struct Coded {
    static constexpr int kLow = kLowBits, kHigh = kHighBits, kOffset = kValueOffset;
    static constexpr Scale kScale = kScaleKind;
    static constexpr bool kTable = kHasTable;
    static constexpr bool kFine = kScale == Scale::kK2 || kScale == Scale::kK16 || kScale == Scale::kE4m3;  // groups of 16
    static constexpr bool kHasMin = kScale == Scale::kHalfMin || kScale == Scale::kHalfZero || kScale == Scale::kK4 || kScale == Scale::kK2;
    static constexpr bool kHasFactor = kScale == Scale::kE4m3;
    static constexpr int kScalesPerGroup = kFine ? 2 : 1;
    static constexpr int kGroupsPerUnit = kScale == Scale::kK2 || kScale == Scale::kK4 || kScale == Scale::kK16 || kScale == Scale::kK32 ? 8 : 1;
    static constexpr int64_t kUnitBytes = kScale == Scale::kHalf || kScale == Scale::kE4m3 ? 32 : kScale == Scale::kHalfMin ? 64 : kScale == Scale::kHalfZero ? 48 : kScale == Scale::kE8m0 ? 16
                                          : kScale == Scale::kK16 ? 288 : kScale == Scale::kK32 ? 160 : 320;

    static const uint8_t *table() { return kOffset == 128 ? kIq4Table : kE2m1Table; }

    // Quad kQuad of a group as bytes. low, high: the group's planes, advanced to the lanes in question.
    template <int kQuad>
    static inline __attribute__((always_inline)) vb quad(const uint8_t *low, const uint8_t *high) {
        constexpr int kPerVector = 8 / kLow;
        vb x = b_load(low + kQuad / kPerVector * 64);
        if constexpr (kLow < 8) x = b_and(b_shift<kLow * (kQuad % kPerVector)>(x), b_set((1 << kLow) - 1));
        if constexpr (kHigh > 0) {
            constexpr int kPerHigh = 8 / (kHigh > 0 ? kHigh : 1);
            vb h = b_load(high + kQuad / kPerHigh * 64);
            x = b_merge(x, b_shift<kHigh * (kQuad % kPerHigh) - kLow>(h), b_set(((1 << kHigh) - 1) << kLow));
        }
        if constexpr (kTable) x = b_lookup(table(), x);
        return x;
    }

    // Scales (and minima, to be added) of group `sub` of a unit for the rows from `lane`. Two of each when groups are of 16.
    static inline __attribute__((always_inline)) void scales(const uint8_t *unit, int64_t sub, int lane, vf *d, vf *m) {
        if constexpr (kScale == Scale::kHalf || kScale == Scale::kHalfMin) {
            d[0] = v_from_f16(as_words(unit) + lane);
            if constexpr (kHasMin) m[0] = v_from_f16(as_words(unit + 32) + lane);
        } else if constexpr (kScale == Scale::kHalfZero) {
            d[0] = v_from_f16(as_words(unit) + lane);
            m[0] = v_mul(v_sub(v_zero(), d[0]), v_from_u8(unit + 32 + lane));
        } else if constexpr (kScale == Scale::kK4) {
            d[0] = v_mul(v_from_f16(as_words(unit) + lane), v_from_u8(unit + 64 + 16 * sub + lane));
            m[0] = v_mul(v_sub(v_zero(), v_from_f16(as_words(unit + 32) + lane)), v_from_u8(unit + 192 + 16 * sub + lane));
        } else if constexpr (kScale == Scale::kK2) {
            vf whole = v_from_f16(as_words(unit) + lane), minimum = v_sub(v_zero(), v_from_f16(as_words(unit + 32) + lane));
            for (int i = 0; i < 2; ++i) {
                d[i] = v_mul(whole, v_from_low_nibble(unit + 64 + 16 * (2 * sub + i) + lane));
                m[i] = v_mul(minimum, v_from_high_nibble(unit + 64 + 16 * (2 * sub + i) + lane));
            }
        } else if constexpr (kScale == Scale::kK16) {
            vf whole = v_from_f16(as_words(unit) + lane);
            for (int i = 0; i < 2; ++i) d[i] = v_mul(whole, v_from_i8(unit + 32 + 16 * (2 * sub + i) + lane));
        } else if constexpr (kScale == Scale::kK32) {
            d[0] = v_mul(v_from_f16(as_words(unit) + lane), v_from_i8(unit + 32 + 16 * sub + lane));
        } else {
            small_scales(unit, sub, lane, d);
        }
    }

    // Scales that times any code need so few bits that bf16 (or two of them) holds the product: what multiplies them is
    // `whole_scale`. Groups of sixteen would otherwise cost twice the tile products.
    static constexpr bool kFolds = kFine || kScale == Scale::kE8m0;
    static inline __attribute__((always_inline)) void small_scales(const uint8_t *unit, int64_t sub, int lane, vf *s) {
        for (int i = 0; i < kScalesPerGroup; ++i) {
            if constexpr (kScale == Scale::kK2) s[i] = v_from_low_nibble(unit + 64 + 16 * (2 * sub + i) + lane);
            if constexpr (kScale == Scale::kK16) s[i] = v_from_i8(unit + 32 + 16 * (2 * sub + i) + lane);
            if constexpr (kScale == Scale::kE8m0) s[i] = v_from_e8m0(unit + lane);
            if constexpr (kScale == Scale::kE4m3) {
                auto code = d_and(widen_u8(unit + 16 * i + lane), 0x7F);
                s[i] = v_mul(v_zero_where_equal(v_from_e4m3(code), code, 0x7F), v_set(0.5f));
            }
        }
    }
    static inline vf whole_scale(const uint8_t *unit, int lane) {
        if constexpr (kScale == Scale::kE8m0 || kScale == Scale::kE4m3) return v_set(1.0f);
        return v_from_f16(as_words(unit) + lane);
    }
};

using CodecQ8_0 = Coded<8, 0, Scale::kHalf, 128>;
using CodecQ4_0 = Coded<4, 0, Scale::kHalf, 8>;
using CodecQ4_1 = Coded<4, 0, Scale::kHalfMin, 0>;
using CodecQ4_Z = Coded<4, 0, Scale::kHalfZero, 0>;
using CodecQ5_0 = Coded<4, 1, Scale::kHalf, 16>;
using CodecQ5_1 = Coded<4, 1, Scale::kHalfMin, 0>;
using CodecQ2_K = Coded<2, 0, Scale::kK2, 0>;
using CodecQ3_K = Coded<2, 1, Scale::kK16, 4>;
using CodecQ4_K = Coded<4, 0, Scale::kK4, 0>;
using CodecQ5_K = Coded<4, 1, Scale::kK4, 0>;
using CodecQ6_K = Coded<4, 2, Scale::kK16, 32>;
using CodecIQ4_NL = Coded<4, 0, Scale::kHalf, 128, true>;
using CodecIQ4_XS = Coded<4, 0, Scale::kK32, 128, true>;
using CodecMXFP4 = Coded<4, 0, Scale::kE8m0, 16, true>;
using CodecNVFP4 = Coded<4, 0, Scale::kE4m3, 16, true>;

// Plain elements: columns 2 pair and 2 pair + 1 of kLanes rows from `lane`.
template <int32_t kFormatId>
struct Plain {
    static constexpr int32_t kFormat = kFormatId;
    static constexpr bool kHasScale = kFormat == PK_FP8_E4M3 || kFormat == PK_FP8_E5M2;
    static constexpr float kUnit = kFormat == PK_FP8_E4M3 ? 256.0f : 1.0f;  // what pair() gives times this is the value

    static inline __attribute__((always_inline)) void pair(const uint8_t *panel, int64_t pair, int lane, vf *even, vf *odd) {
        if constexpr (kFormat == PK_F32) {
            const float *p = reinterpret_cast<const float *>(panel) + pair * 32 + lane;
            *even = v_load(p);
            *odd = v_load(p + 16);
        } else if constexpr (kFormat == PK_F16) {
            const uint16_t *p = as_words(panel) + pair * 32 + lane;
            *even = v_from_f16(p);
            *odd = v_from_f16(p + 16);
        } else if constexpr (kFormat == PK_BF16) {
            v_from_bf16_pairs(panel + pair * 64 + 4 * lane, even, odd);
        } else {
            v_from_fp8_pair<kFormat == PK_FP8_E4M3>(panel + pair * 32 + lane, even, odd);
        }
    }
};

}  // namespace
}  // namespace pk
