// Weights of the skinny product as its lanes hold them: read from shared memory, decoded to the A operands of wgmma (src/matmul/skinny.cu).
#pragma once
#include "device.cuh"
#include "format/rows.cuh"
#include "format/unit.cuh"

namespace pk {

__device__ __forceinline__ uint4 shared_load4(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ uint2 shared_load2(uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ void shared_store4(uint32_t at, uint4 v) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
template <int kWords>
__device__ __forceinline__ void shared_words(uint32_t *out, uint32_t at) {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i) {
            uint4 v = shared_load4(at + 16 * i);
            out[4 * i] = v.x; out[4 * i + 1] = v.y; out[4 * i + 2] = v.z; out[4 * i + 3] = v.w;
        }
    } else if constexpr (kWords == 2) {
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(at));
    } else if constexpr (kWords == 1) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out[0]) : "r"(at));
    }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Constants in registers.
struct Opaque {
    uint32_t plus128, minus128, two23, flip;
};

// One lane's part of 16 rows x kU of weights, read from shared memory as its chunks of 64 are needed.
template <int kFormat, bool kBlock> struct Part;
template <int kFormat> struct Part<kFormat, true> {
    using U = Unit<kFormat>;
    UnitRegisters<U> u;
    // Codes of these formats stay small integers in the low bits of a bf16: n there is n * 2^-133 (a subnormal number, or one of the
    // next exponent, which goes on in the same steps), and one fused multiply-add with s * 2^113 makes w * 2^-20 of it.
    static constexpr bool kTiny = U::kCode == Code::kSigned8 || (U::kCode == Code::kUnsigned && U::kLow == 4 && (U::kScale == Scale::kBytesMin || U::kScale == Scale::kSigned16 || U::kScale == Scale::kHalf));
    bf162 t[2][2];  // of kTiny, by row: factor, minus the minimum's where there is one, and -128 times both (without a minimum -2 times)
    float d[2][4];  // of kBytesMin: factor and minus factor of the minimum, and -2^23 times each
    // size: 2^113 and what codes are too large by.
    __device__ __forceinline__ void make_factors(float size) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            if constexpr (U::kScale == Scale::kBytesMin) {
                t[row][0] = __floats2bfloat162_rn(half_at(u.factor[row], 0) * size, half_at(u.factor[row], 1) * -0x1p-20f);
                t[row][1] = __hmul2(t[row][0], __float2bfloat162_rn(-128.0f));
            } else if constexpr (U::kScale == Scale::kSigned16) {
                t[row][0] = __float2bfloat162_rn(half_at(u.factor[0], row) * (size * 64.0f));
                t[row][1] = __hmul2(t[row][0], __float2bfloat162_rn(-2.0f));
            }
        }
    }
    __device__ __forceinline__ void begin(uint32_t tile, int warp, int lane) {
        const uint32_t at = tile + warp * U::kBytes;
        if constexpr (U::kLow == 2) {
#pragma unroll
            for (int i = 0; i < U::kLowVectors; ++i) u.low[i] = shared_load4(at + 512 * i + 16 * lane);
        }
        if constexpr (U::kHighWords == 8) {
            shared_words<4>(u.high, at + U::kLowBytes + 16 * lane);
            shared_words<4>(u.high + 4, at + U::kLowBytes + 512 + 16 * lane);
        } else if constexpr (U::kHighWords > 0) {
            shared_words<U::kHighWords>(u.high, at + U::kLowBytes + 4 * U::kHighWords * lane);
        }
        shared_words<U::kScaleWords>(u.scale, at + U::kScaleAt + 4 * U::kScaleWords * (lane >> 2));
        if constexpr (U::kFactorWords > 0) shared_words<U::kFactorWords>(u.factor, at + U::kFactorAt + 4 * U::kFactorWords * (lane >> 2));
        if constexpr (kTiny) {
            make_factors(0x1p113f);
        } else if constexpr (U::kScale == Scale::kBytesMin) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                d[row][0] = half_at(u.factor[row], 0);
                d[row][1] = -half_at(u.factor[row], 1);
                d[row][2] = -8388608.0f * d[row][0];
                d[row][3] = -8388608.0f * d[row][1];
            }
        }
    }
    __device__ __forceinline__ void chunk(uint32_t tile, int warp, int lane, int i, const Opaque &k) {
        const uint32_t at = tile + warp * U::kBytes + 16 * lane;
        if constexpr (U::kLow == 4) u.low[i] = shared_load4(at + 512 * i);
        if constexpr (U::kLow == 8) {
            u.low[2 * i] = shared_load4(at + 1024 * i);
            u.low[2 * i + 1] = shared_load4(at + 1024 * i + 512);
        }
        if constexpr (kTiny) tiny_scales(i, k);
    }
    // Scale and negated minimum of group `group`, rows r and r + 8, as pairs.
    __device__ __forceinline__ void scales(int group, const Opaque &k, bf162 &s, bf162 &m) const {
        float s0, m0, s1, m1;
        if constexpr (U::kScale == Scale::kBytesMin) {
            const uint32_t *w = u.scale;
            s0 = fmaf(__uint_as_float(__byte_perm(w[group / 4], k.two23, 0x7540 | (group & 3))), d[0][0], d[0][2]);
            s1 = fmaf(__uint_as_float(__byte_perm(w[4 + group / 4], k.two23, 0x7540 | (group & 3))), d[1][0], d[1][2]);
            m0 = fmaf(__uint_as_float(__byte_perm(w[2 + group / 4], k.two23, 0x7540 | (group & 3))), d[0][1], d[0][3]);
            m1 = fmaf(__uint_as_float(__byte_perm(w[6 + group / 4], k.two23, 0x7540 | (group & 3))), d[1][1], d[1][3]);
            m = __floats2bfloat162_rn(m0, m1);
        } else {
            unit_scale<U>(u, group, 0, s0, m0);
            unit_scale<U>(u, group, 1, s1, m1);
            m = __floats2bfloat162_rn(-m0, -m1);
        }
        s = __floats2bfloat162_rn(s0, s1);
    }
    // Eight stored values as unit_codes gives them, in fewer instructions: constants that the assembler cannot see as such
    // let it choose one three-way instruction for "and" and "or".
    __device__ __forceinline__ void codes(int b, int row, const Opaque &k, uint32_t (&out)[4]) const {
        if constexpr (U::kCode == Code::kSigned8 || U::kCode == Code::kTable) {
            uint32_t w0, w1;
            if constexpr (U::kCode == Code::kSigned8) {
                w0 = word_of(u.low[b], 2 * row);
                w1 = word_of(u.low[b], 2 * row + 1);
            } else {
                const uint32_t w = word_of(u.low[b / 2], (b & 1) * 2 + row);
                w0 = table_bytes(w);
                w1 = table_bytes(w >> 16);
            }
            const uint32_t v[4] = {w0, w0 >> 8, w1, w1 >> 8};
#pragma unroll
            for (int i = 0; i < 4; ++i) out[i] = bits(__hadd2(as_bf162((v[i] & 0x007f007fu) | k.plus128), as_bf162((v[i] & 0x00800080u) | k.minus128)));
        } else if constexpr (U::kCode == Code::kUnsigned && U::kLow == 4) {
            const uint32_t low = word_of(u.low[b / 2], (b & 1) * 2 + row);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t v = ((low >> (4 * i)) & 0x000f000fu) | k.plus128;
                if constexpr (U::kHigh == 1) v |= shifted(u.high[row * (U::kHighWords / 2) + b / 4], (b & 3) * 4 + i - 4) & 0x00100010u;
                if constexpr (U::kHigh == 2) v |= shifted(u.high[row * 4 + b / 2], (b & 1) * 8 + 2 * i - 4) & 0x00300030u;
                out[i] = v;
            }
        } else {
            unit_codes<U>(u, b, row, out);
        }
    }
    // Eight codes of block b; with `kWide` those of odd pairs are 16 times as large.
    static constexpr bool kWide = kTiny && U::kCode == Code::kUnsigned && U::kHigh == 0;
    __device__ __forceinline__ void tiny_codes(int b, int row, const Opaque &k, uint32_t (&out)[4]) const {
        if constexpr (U::kCode == Code::kSigned8) {
            const uint32_t w0 = word_of(u.low[b], 2 * row), w1 = word_of(u.low[b], 2 * row + 1);
            out[0] = (w0 ^ k.flip) & 0x00ff00ffu;
            out[1] = ((w0 >> 8) ^ k.flip) & 0x00ff00ffu;
            out[2] = (w1 ^ k.flip) & 0x00ff00ffu;
            out[3] = ((w1 >> 8) ^ k.flip) & 0x00ff00ffu;
        } else {
            const uint32_t low = word_of(u.low[b / 2], (b & 1) * 2 + row);
            if constexpr (kWide) {
                const uint32_t next = low >> 8;
                out[0] = low & 0x000f000fu;
                out[1] = low & 0x00f000f0u;
                out[2] = next & 0x000f000fu;
                out[3] = next & 0x00f000f0u;
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint32_t v = (low >> (4 * i)) & 0x000f000fu;
                    if constexpr (U::kHigh == 1) v |= shifted(u.high[row * (U::kHighWords / 2) + b / 4], (b & 3) * 4 + i - 4) & 0x00100010u;
                    if constexpr (U::kHigh == 2) v |= shifted(u.high[row * 4 + b / 2], (b & 1) * 8 + 2 * i - 4) & 0x00300030u;
                    out[i] = v;
                }
            }
        }
    }
    // Factors of codes and what is added, of chunk i, by row: two neighbouring groups in a pair each.
    static constexpr int kPairs = 32 / U::kGroup;
    bf162 factor[2][kPairs], odd[2][kPairs], added[2][kPairs];
    __device__ __forceinline__ void tiny_scales(int i, const Opaque &k) {
        constexpr int kRowWords = U::kScaleWords / 2;
#pragma unroll
        for (int row = 0; row < 2; ++row)
#pragma unroll
            for (int p = 0; p < kPairs; ++p) {
                const uint32_t *w = u.scale + row * kRowWords;
                const int pair = i * kPairs + p;
                const uint32_t at = pair % 2 ? 0x5352u : 0x5150u;
                if constexpr (U::kScale == Scale::kBytesMin) {
                    factor[row][p] = __hfma2(as_bf162(__byte_perm(w[pair / 2], k.plus128, at)), __low2bfloat162(t[row][0]), __low2bfloat162(t[row][1]));
                    added[row][p] = __hfma2(as_bf162(__byte_perm(w[2 + pair / 2], k.plus128, at)), __high2bfloat162(t[row][0]), __high2bfloat162(t[row][1]));
                } else {
                    if constexpr (U::kScale == Scale::kHalf) {
                        factor[row][p] = __floats2bfloat162_rn(half_at(w[pair], 0) * 0x1p113f, half_at(w[pair], 1) * 0x1p113f);
                    } else {
                        // A byte is its value * 2^-133, made 2^-6 by one product; t has 2^113 d.
                        const bf162 bytes = __hmul2(as_bf162(__byte_perm(w[pair / 2], 0u, at)), __float2bfloat162_rn(0x1p127f));
                        factor[row][p] = __hfma2(bytes, t[row][0], t[row][1]);
                    }
                    constexpr float kZero = U::kCode == Code::kSigned8 ? 128.0f : static_cast<float>(U::kOwnZero);
                    added[row][p] = __hmul2(factor[row][p], __float2bfloat162_rn(-kZero * 0x1p-133f));
                }
                if constexpr (kWide) odd[row][p] = __hmul2(factor[row][p], __float2bfloat162_rn(0.0625f));
            }
    }
    // The A operands of two products: 32 of K.
    __device__ __forceinline__ void operands(int b, const Opaque &k, uint32_t (&lo)[4], uint32_t (&hi)[4]) const {
        if constexpr (kTiny) {
            constexpr int kParts = 32 / U::kGroup;
            tiny_codes(b, 0, k, lo);
            tiny_codes(b, 1, k, hi);
#pragma unroll
            for (int row = 0; row < 2; ++row)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint32_t(&out)[4] = row ? hi : lo;
                    const int group = b % 2 * kParts + i * kParts / 4;
                    auto of_group = [&](bf162 pair) { return group % 2 ? __high2bfloat162(pair) : __low2bfloat162(pair); };
                    out[i] = bits(__hfma2(as_bf162(out[i]), of_group(kWide && (i & 1) ? odd[row][group / 2] : factor[row][group / 2]), of_group(added[row][group / 2])));
                }
            return;
        }
        codes(b, 0, k, lo);
        codes(b, 1, k, hi);
        constexpr int kParts = 32 / U::kGroup;
        const bf162 zero = __float2bfloat162_rn(-static_cast<float>(U::kBias));
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            bf162 s, m;
            scales(b * kParts + p, k, s, m);
            const bf162 sl = __low2bfloat162(s), sh = __high2bfloat162(s), ml = __low2bfloat162(m), mh = __high2bfloat162(m);
#pragma unroll
            for (int i = p * (4 / kParts); i < (p + 1) * (4 / kParts); ++i) {
                bf162 l = as_bf162(lo[i]), h = as_bf162(hi[i]);
                if constexpr (U::kBias != 0) {
                    l = __hadd2(l, zero);
                    h = __hadd2(h, zero);
                }
                lo[i] = bits(U::kHasMin ? __hfma2(l, sl, ml) : __hmul2(l, sl));
                hi[i] = bits(U::kHasMin ? __hfma2(h, sh, mh) : __hmul2(h, sh));
            }
        }
    }
};
template <int kFormat> struct Part<kFormat, false> {
    uint4 v[2][2];  // row, neighbouring pieces of 16 bytes
    __device__ __forceinline__ void begin(uint32_t tile, int warp, int lane) {
        const int r = lane >> 2, c = lane & 3;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int p = 0; p < 2; ++p) v[h][p] = shared_load4(tile + (16 * warp + r + 8 * h) * 128 + (((2 * c + p) ^ r) << 4));
    }
    __device__ __forceinline__ void chunk(uint32_t, int, int, int, const Opaque &) {}
    __device__ __forceinline__ void widen(uint32_t w, uint32_t &even, uint32_t &odd) const {
        constexpr int kShift = kFormat == PK_FP8_E4M3 ? 4 : 5;
        const bf162 k = as_bf162(kFormat == PK_FP8_E4M3 ? 0x7b807b80u : 0x77807780u);
        even = bits(__hmul2(as_bf162(((w << 8) & 0x80008000u) | ((w << kShift) & (0x007f007fu << kShift))), k));
        odd = bits(__hmul2(as_bf162((w & 0x80008000u) | ((w >> (8 - kShift)) & (0x007f007fu << kShift))), k));
    }
    // FP8: block b (0 to 3) is products 2b and 2b + 1, a word a row each. F16: block b (0, 1) likewise, two words each; part 1 is what bf16 loses.
    template <int kPart>
    __device__ __forceinline__ void operands(int b, uint32_t (&lo)[4], uint32_t (&hi)[4]) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int product = 2 * b + j;
            if constexpr (Rows<kFormat>::kIsFp8) {
                widen(row_word(v[0][product / 4], product & 3), lo[2 * j], lo[2 * j + 1]);
                widen(row_word(v[1][product / 4], product & 3), hi[2 * j], hi[2 * j + 1]);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    lo[2 * j + i] = half_part<kPart>(row_word(v[0][product / 2], 2 * (product & 1) + i));
                    hi[2 * j + i] = half_part<kPart>(row_word(v[1][product / 2], 2 * (product & 1) + i));
                }
            }
        }
    }
    template <int kPart>
    __device__ __forceinline__ static uint32_t half_part(uint32_t w) {
        const float2 f = __half22float2(*reinterpret_cast<__half2 *>(&w));
        const uint32_t near = pack_bf16(f.x, f.y);
        return kPart == 0 ? near : pack_bf16(f.x - low_f32(near), f.y - high_f32(near));
    }
};
#endif

}  // namespace pk
