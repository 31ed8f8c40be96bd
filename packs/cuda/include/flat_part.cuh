// Weights of block formats as a lane of wgmma holds them when x is in its own order: elements 2c and 2c + 1 of every eight, where a unit (format/unit.cuh) has 4c to
// 4c + 3 of every sixteen side by side. So a lane reads two lanes' pieces and takes half of each: that of even or of odd pairs.
#pragma once
#include "skinny_parts.cuh"

namespace pk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kFormat>
struct OrderedPart : Part<kFormat, true> {
    using U = Unit<kFormat>;
    using P = Part<kFormat, true>;
    static_assert(P::kTiny && U::kLow >= 4 && !(P::kWide && U::kScale == Scale::kHalf));  // whose factors do not know that codes are 16 times as large
    static constexpr int kPieces = U::kLow == 8 ? 2 : 1;  // of 64 elements of a row pair
    uint4 low[kPieces][2];                                // of the lane that has the first eight, of that which has the others
    uint32_t high[2][2];                                  // row, lane
    uint32_t own, scale_at, factor_at, select;
    int shift;
    float size;
    // What does not change from unit to unit.
    __device__ __forceinline__ void prepare(int lane) {
        const int odd = lane & 1;
        own = 16 * ((lane & ~3) + (lane >> 1 & 1));
        scale_at = U::kScaleAt + 4 * U::kScaleWords * (lane >> 2);
        factor_at = U::kFactorAt + 4 * U::kFactorWords * (lane >> 2);
        select = U::kLow == 8 ? (odd ? 0x4341 : 0x4240) : P::kWide && odd ? 0x00f000f0u : 0x000f000fu;
        shift = odd;
        size = P::kWide && odd ? 0x1p109f : 0x1p113f;
        // Kept, not made again where they are used.
        asm volatile("" : "+r"(own), "+r"(scale_at), "+r"(factor_at), "+r"(select), "+r"(shift), "+f"(size));
    }
    __device__ __forceinline__ void begin(uint32_t at) {
        shared_words<U::kScaleWords>(this->u.scale, at + scale_at);
        if constexpr (U::kFactorWords > 0) shared_words<U::kFactorWords>(this->u.factor, at + factor_at);
        this->make_factors(size);
    }
    // Codes of chunk i, then (once those of the chunk before have been used) its scales.
    __device__ __forceinline__ void load(uint32_t at, int i) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p)
#pragma unroll
            for (int of = 0; of < 2; ++of) low[p][of] = shared_load4(at + 512 * (kPieces * i + p) + own + 32 * of);
        if constexpr (U::kHigh == 2) {
#pragma unroll
            for (int row = 0; row < 2; ++row)
#pragma unroll
                for (int of = 0; of < 2; ++of) shared_words<1>(&high[row][of], at + U::kLowBytes + 512 * row + own + 32 * of + 4 * i);
        }
        if constexpr (U::kHigh == 1) {
            // A lane's words are side by side, half of them a row's.
            constexpr int kWords = U::kHighWords;
#pragma unroll
            for (int row = 0; row < 2; ++row)
#pragma unroll
                for (int of = 0; of < 2; ++of) shared_words<1>(&high[row][of], at + U::kLowBytes + (own + 32 * of) / 16 * (4 * kWords) + 4 * (row * (kWords / 2) + i / 2));
        }
    }
    __device__ __forceinline__ void scale(int i, const Opaque &k) { this->tiny_scales(i, k); }
    // The A operands of two products: 32 of K, rows r and r + 8.
    __device__ __forceinline__ void operands(int b, const Opaque &k, uint32_t (&lo)[4], uint32_t (&hi)[4]) const {
        constexpr int kParts = 32 / U::kGroup;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t(&out)[4] = row ? hi : lo;
#pragma unroll
            for (int of = 0; of < 2; ++of) {
                if constexpr (U::kLow == 8) {
#pragma unroll
                    for (int j = 0; j < 2; ++j) out[2 * j + of] = __byte_perm(word_of(low[b & 1][of], 2 * row + j), 0, select) ^ k.flip;
                } else {
                    const uint32_t both = word_of(low[0][of], (b & 1) * 2 + row), w = P::kWide ? both : both >> (4 * shift);
                    out[of] = w & select;
                    out[2 + of] = (w >> 8) & select;
                    if constexpr (U::kHigh == 1) {
                        const uint32_t h = high[row][of] >> shift;
#pragma unroll
                        for (int j = 0; j < 2; ++j) out[2 * j + of] |= shifted(h, (b & 3) * 4 + 2 * j - 4) & 0x00100010u;
                    }
                    if constexpr (U::kHigh == 2) {
                        const uint32_t h = high[row][of] >> (2 * shift);
#pragma unroll
                        for (int j = 0; j < 2; ++j) out[2 * j + of] |= shifted(h, (b & 1) * 8 + 4 * j - 4) & 0x00300030u;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int group = b % 2 * kParts + i * kParts / 4;
                auto of_group = [&](bf162 pair) { return group % 2 ? __high2bfloat162(pair) : __low2bfloat162(pair); };
                out[i] = bits(__hfma2(as_bf162(out[i]), of_group(this->factor[row][group / 2]), of_group(this->added[row][group / 2])));
            }
        }
    }
};

#endif

}  // namespace pk
