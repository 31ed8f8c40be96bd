// Block formats as tiles: 16 rows x kU elements, stored so that each lane of a warp reads 16 neighbouring bytes and holds
// its own part of an mma A operand.
//
// Lane (r = lane / 4, c = lane % 4) owns rows r and r + 8. Of each run of 32 elements it holds eight per row: v0..v3 are
// elements 4c..4c+3, v4..v7 are elements 16+4c..16+4c+3. Pairs (v0,v1) (v2,v3) feed the mma of the first 16 elements, the
// others that of the second 16. A unit is: low bit plane, high bit plane, scales; a matrix is units in k order, row tile
// after row tile. Value of an element: s * (stored - kBias) - m with (s, m) of its group of kGroup elements.
#pragma once
#include "../device.cuh"

namespace pk {

enum class Code { kUnsigned, kSigned8, kTable, kE2m1 };
enum class Scale { kHalf, kHalfMin, kBytesMin, kSigned16, kNibblesMin, kSigned8, kE8m0, kE4m3 };

template <int kLowBits, int kHighBits, int kElements, Code kCodeKind, Scale kScaleKind, int kZero>
struct UnitTraits {
    static constexpr int kLow = kLowBits, kHigh = kHighBits, kU = kElements;
    static constexpr Code kCode = kCodeKind;
    static constexpr Scale kScale = kScaleKind;
    static constexpr bool kHasMin = kScale == Scale::kHalfMin || kScale == Scale::kBytesMin || kScale == Scale::kNibblesMin;
    static constexpr int kGroup = kScale == Scale::kSigned16 || kScale == Scale::kNibblesMin || kScale == Scale::kE4m3 ? 16 : 32;
    // What is subtracted from a stored value: 128 from the way unsigned codes become bf16, plus the format's own zero.
    static constexpr int kBias = kCode == Code::kUnsigned ? 128 + kZero : 0;
    static constexpr int kOwnZero = kZero;
    static constexpr int kLowBytes = 16 * kU * kLow / 8, kHighBytes = 16 * kU * kHigh / 8;
    static constexpr int kGroups = kU / kGroup;
    // Scales of one row, and of one row's superblock factors.
    static constexpr int kRowScaleBytes = kScale == Scale::kHalf ? kU / 16 : kScale == Scale::kHalfMin ? kU / 8 : kScale == Scale::kSigned8 ? kU / 32
                                          : kScale == Scale::kE8m0 ? kU / 32 : kScale == Scale::kE4m3 ? kU / 16 : 16;
    static constexpr int kRowFactorBytes = kScale == Scale::kBytesMin || kScale == Scale::kNibblesMin ? 4
                                           : kScale == Scale::kSigned16 || kScale == Scale::kSigned8 ? 2 : 0;
    static constexpr int kScaleAt = kLowBytes + kHighBytes, kFactorAt = kScaleAt + 16 * kRowScaleBytes;
    static constexpr int kBytes = kFactorAt + 16 * kRowFactorBytes;
    static constexpr int kLowVectors = kLowBytes / 512, kHighWords = kHighBytes / 128, kScaleWords = 2 * kRowScaleBytes / 4, kFactorWords = kRowFactorBytes / 2;
};

template <int kFormat> struct Unit;
template <> struct Unit<PK_Q8_0> : UnitTraits<8, 0, 128, Code::kSigned8, Scale::kHalf, 0> {};
template <> struct Unit<PK_Q4_0> : UnitTraits<4, 0, 128, Code::kUnsigned, Scale::kHalf, 8> {};
template <> struct Unit<PK_Q4_1> : UnitTraits<4, 0, 128, Code::kUnsigned, Scale::kHalfMin, 0> {};
template <> struct Unit<PK_Q5_0> : UnitTraits<4, 1, 128, Code::kUnsigned, Scale::kHalf, 16> {};
template <> struct Unit<PK_Q5_1> : UnitTraits<4, 1, 128, Code::kUnsigned, Scale::kHalfMin, 0> {};
template <> struct Unit<PK_Q2_K> : UnitTraits<2, 0, 256, Code::kUnsigned, Scale::kNibblesMin, 0> {};
template <> struct Unit<PK_Q3_K> : UnitTraits<2, 1, 256, Code::kUnsigned, Scale::kSigned16, 4> {};
template <> struct Unit<PK_Q4_K> : UnitTraits<4, 0, 256, Code::kUnsigned, Scale::kBytesMin, 0> {};
template <> struct Unit<PK_Q5_K> : UnitTraits<4, 1, 256, Code::kUnsigned, Scale::kBytesMin, 0> {};
template <> struct Unit<PK_Q6_K> : UnitTraits<4, 2, 256, Code::kUnsigned, Scale::kSigned16, 32> {};
template <> struct Unit<PK_IQ4_NL> : UnitTraits<4, 0, 128, Code::kTable, Scale::kHalf, 0> {};
template <> struct Unit<PK_IQ4_XS> : UnitTraits<4, 0, 256, Code::kTable, Scale::kSigned8, 0> {};
template <> struct Unit<PK_MXFP4> : UnitTraits<4, 0, 128, Code::kE2m1, Scale::kE8m0, 0> {};
template <> struct Unit<PK_NVFP4> : UnitTraits<4, 0, 128, Code::kE2m1, Scale::kE4m3, 0> {};

__host__ __device__ constexpr bool is_block_format(int32_t f) { return f >= PK_Q8_0 && f <= PK_NVFP4; }

// Runs `call` with Unit<format>; false for a format that is none.
template <class Call>
bool with_unit(int32_t format, Call &&call) {
    switch (format) {
        case PK_Q8_0: call(Unit<PK_Q8_0>()); return true;
        case PK_Q4_0: call(Unit<PK_Q4_0>()); return true;
        case PK_Q4_1: call(Unit<PK_Q4_1>()); return true;
        case PK_Q5_0: call(Unit<PK_Q5_0>()); return true;
        case PK_Q5_1: call(Unit<PK_Q5_1>()); return true;
        case PK_Q2_K: call(Unit<PK_Q2_K>()); return true;
        case PK_Q3_K: call(Unit<PK_Q3_K>()); return true;
        case PK_Q4_K: call(Unit<PK_Q4_K>()); return true;
        case PK_Q5_K: call(Unit<PK_Q5_K>()); return true;
        case PK_Q6_K: call(Unit<PK_Q6_K>()); return true;
        case PK_IQ4_NL: call(Unit<PK_IQ4_NL>()); return true;
        case PK_IQ4_XS: call(Unit<PK_IQ4_XS>()); return true;
        case PK_MXFP4: call(Unit<PK_MXFP4>()); return true;
        case PK_NVFP4: call(Unit<PK_NVFP4>()); return true;
        default: return false;
    }
}

// One unit in registers.
template <class U>
struct UnitRegisters {
    uint4 low[U::kLowVectors];
    uint32_t high[U::kHighWords ? U::kHighWords : 1];
    uint32_t scale[U::kScaleWords];
    uint32_t factor[U::kFactorWords ? U::kFactorWords : 1];
};

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t *out, const uint8_t *p) {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i) {
            uint4 v = load_stream(p + 16 * i);
            out[4 * i] = v.x; out[4 * i + 1] = v.y; out[4 * i + 2] = v.z; out[4 * i + 3] = v.w;
        }
    } else if constexpr (kWords == 2) {
        uint2 v = load_stream2(p);
        out[0] = v.x; out[1] = v.y;
    } else if constexpr (kWords == 1) {
        out[0] = load_stream1(p);
    }
}

template <class U>
__device__ __forceinline__ void load_unit(UnitRegisters<U> &u, const uint8_t *unit, int lane) {
#pragma unroll
    for (int i = 0; i < U::kLowVectors; ++i) u.low[i] = load_stream(unit + 512 * i + 16 * lane);
    if constexpr (U::kHighWords == 8) {
        load_words<4>(u.high, unit + U::kLowBytes + 16 * lane);
        load_words<4>(u.high + 4, unit + U::kLowBytes + 512 + 16 * lane);
    } else if constexpr (U::kHighWords > 0) {
        load_words<U::kHighWords>(u.high, unit + U::kLowBytes + 4 * U::kHighWords * lane);
    }
    load_words<U::kScaleWords>(u.scale, unit + U::kScaleAt + 4 * U::kScaleWords * (lane >> 2));
    if constexpr (U::kFactorWords > 0) load_words<U::kFactorWords>(u.factor, unit + U::kFactorAt + 4 * U::kFactorWords * (lane >> 2));
}

__device__ __forceinline__ uint32_t shifted(uint32_t v, int right) { return right >= 0 ? v >> right : v << -right; }
__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// int8 x 4 -> two pairs of exact bf16: bytes (0, 2) and (1, 3).
__device__ __forceinline__ uint32_t signed_pair(uint32_t w) {
    return bits(__hadd2(as_bf162((w & 0x007f007fu) | 0x43004300u), as_bf162((w & 0x00800080u) | 0xc300c300u)));
}
// Four 4-bit indices (low 16 bits) -> four int8 of the IQ4 table.
__device__ __forceinline__ uint32_t table_bytes(uint32_t w) {
    uint32_t low = __byte_perm(0xbfad9881u, 0xf6eaddcfu, w & 0x7777u), high = __byte_perm(0x26190d01u, 0x71594535u, w & 0x7777u);
    return __byte_perm(low, high, 0x3210u | ((w & 0x8888u) >> 1));
}

// Eight stored values of block `b` for row r (row 0) or r + 8 (row 1): pairs (v0,v1) (v2,v3) (v4,v5) (v6,v7) as bf16.
template <class U>
__device__ __forceinline__ void unit_codes(const UnitRegisters<U> &u, int b, int row, uint32_t (&out)[4]) {
    if constexpr (U::kCode == Code::kSigned8) {
        uint32_t w0 = word_of(u.low[b], 2 * row), w1 = word_of(u.low[b], 2 * row + 1);
        out[0] = signed_pair(w0); out[1] = signed_pair(w0 >> 8);
        out[2] = signed_pair(w1); out[3] = signed_pair(w1 >> 8);
    } else if constexpr (U::kCode == Code::kTable) {
        uint32_t w = word_of(u.low[b / 2], (b & 1) * 2 + row);
        uint32_t w0 = table_bytes(w), w1 = table_bytes(w >> 16);
        out[0] = signed_pair(w0); out[1] = signed_pair(w0 >> 8);
        out[2] = signed_pair(w1); out[3] = signed_pair(w1 >> 8);
    } else if constexpr (U::kCode == Code::kE2m1) {
        uint32_t w = word_of(u.low[b / 2], (b & 1) * 2 + row);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t v = (shifted(w, 4 * i - 6) & 0x01c001c0u) | (shifted(w, 4 * i - 12) & 0x80008000u);
            out[i] = bits(__hmul2(as_bf162(v), as_bf162(0x7e807e80u)));
        }
    } else {
        const uint32_t low = U::kLow == 4 ? word_of(u.low[b / 2], (b & 1) * 2 + row) : word_of(u.low[row & (U::kLowVectors - 1)], b / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t v;
            if constexpr (U::kLow == 4) {
                v = ((low >> (4 * i)) & 0x000f000fu) | 0x43004300u;
            } else {
                v = ((low >> ((b & 1) * 8 + 2 * i)) & 0x00030003u) | 0x43004300u;
            }
            if constexpr (U::kHigh == 1) {
                constexpr uint32_t kMask = 0x00010001u << U::kLow;
                v |= shifted(u.high[row * (U::kHighWords / 2) + b / 4], (b & 3) * 4 + i - U::kLow) & kMask;
            } else if constexpr (U::kHigh == 2) {
                v |= shifted(u.high[row * 4 + b / 2], (b & 1) * 8 + 2 * i - 4) & 0x00300030u;
            }
            out[i] = v;
        }
    }
}

__device__ __forceinline__ float byte_plus_2_23(uint32_t word, int i) { return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540u | i)); }
__device__ __forceinline__ float half_at(uint32_t word, int i) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(i ? word >> 16 : word & 0xffffu)));
}
__device__ __forceinline__ float e8m0_to_f32(uint32_t e) { return __uint_as_float(e ? e << 23 : 0x00400000u); }

// (s, m) of group `g` for row r (row 0) or r + 8 (row 1).
template <class U>
__device__ __forceinline__ void unit_scale(const UnitRegisters<U> &u, int g, int row, float &s, float &m) {
    constexpr int kRowWords = U::kScaleWords / 2;
    const uint32_t *w = u.scale + row * kRowWords;
    m = 0.0f;
    if constexpr (U::kScale == Scale::kHalf) {
        s = half_at(w[g / 2], g & 1);
    } else if constexpr (U::kScale == Scale::kHalfMin) {
        uint32_t pair = w[g];
        s = half_at(pair, 0);
        m = -half_at(pair, 1);
    } else if constexpr (U::kScale == Scale::kBytesMin) {
        float d = half_at(u.factor[row], 0), dmin = half_at(u.factor[row], 1);
        s = fmaf(byte_plus_2_23(w[g / 4], g & 3), d, -8388608.0f * d);
        m = fmaf(byte_plus_2_23(w[2 + g / 4], g & 3), dmin, -8388608.0f * dmin);
    } else if constexpr (U::kScale == Scale::kNibblesMin) {
        float d = half_at(u.factor[row], 0), dmin = half_at(u.factor[row], 1);
        uint32_t b = (w[g / 4] >> (8 * (g & 3))) & 255u;
        s = d * static_cast<float>(b & 15u);
        m = dmin * static_cast<float>(b >> 4);
    } else if constexpr (U::kScale == Scale::kSigned16 || U::kScale == Scale::kSigned8) {
        s = (byte_plus_2_23(w[g / 4], g & 3) - 8388736.0f) * half_at(u.factor[0], row);
    } else if constexpr (U::kScale == Scale::kE8m0) {
        s = e8m0_to_f32((w[0] >> (8 * g)) & 255u);
    } else {
        s = e4m3_to_f32(static_cast<uint8_t>((w[g / 4] >> (8 * (g & 3))) & 127u));
    }
}

// The eight values of block b of one row of a unit.
template <class U>
__device__ __forceinline__ void unit_values(const UnitRegisters<U> &u, int b, int row, float (&v)[8]) {
    constexpr int kParts = 32 / U::kGroup;
    uint32_t codes[4];
    unit_codes<U>(u, b, row, codes);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        float s, m;
        unit_scale<U>(u, b * kParts + p, row, s, m);
#pragma unroll
        for (int i = p * (4 / kParts); i < (p + 1) * (4 / kParts); ++i) {
            v[2 * i] = s * (low_f32(codes[i]) - U::kBias) - m;
            v[2 * i + 1] = s * (high_f32(codes[i]) - U::kBias) - m;
        }
    }
}

}  // namespace pk
