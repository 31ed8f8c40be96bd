// Inner products of a chunk of 16 rows from the ring with the rows of x in shared memory.
//
// Row-major formats: mma m16n8k16 in bf16, or in f16 with x over a power of two for FP8, eight columns for eight rows of x. Block formats: mma m16n8k32 in integers. The
// eight columns hold (group, row of x, high or low byte of x): a column's x is zero outside its own group, so that one
// accumulator collects the sums of several groups and scales are applied once for all of them.
#pragma once
#include "../format/unit.cuh"
#include "phase.h"

namespace pk::persist {

template <bool kUnsigned>
__device__ __forceinline__ void mma_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kUnsigned) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

__device__ __forceinline__ uint4 shared16(const uint8_t *p) { return *reinterpret_cast<const uint4 *>(p); }
__device__ __forceinline__ uint2 shared8(const uint8_t *p) { return *reinterpret_cast<const uint2 *>(p); }

// ---- row-major ----

template <int kFormat, int kRows>
struct RowsProduct {
    static constexpr int kSums = 4;
    float sum[4];
    __device__ uint32_t used() const { return __float_as_uint(sum[0]) ^ __float_as_uint(sum[1]) ^ __float_as_uint(sum[2]) ^ __float_as_uint(sum[3]); }
    __device__ void clear() { sum[0] = sum[1] = sum[2] = sum[3] = 0.0f; }
    // x: the staged rows; chunk: index of the chunk within the staged part; scale_at: which of the four staged scales is first.
    __device__ void add(const uint8_t *slot, const uint8_t *xs, int x_row, int chunk, int scale_at, int lane) {
        const int r = lane >> 2, c = lane & 3;
        const uint8_t *low = slot + r * 256 + 16 * c, *high = low + 8 * 256;
        const int odd = (r & 1) * 64;
        const uint8_t *x = xs + (r % kRows) * x_row + chunk * (2 * chunk_elements(kFormat)) + 16 * c;
        if constexpr (kFormat == PK_BF16) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint4 a = shared16(low + (64 * j ^ odd)), b = shared16(high + (64 * j ^ odd)), v = shared16(x + 64 * j);
                mma_bf16(sum, a.x, b.x, a.y, b.y, v.x, v.y);
                mma_bf16(sum, a.z, b.z, a.w, b.w, v.z, v.w);
            }
        } else {
            const float *scales = reinterpret_cast<const float *>(slot + kRowsScaleAt) + scale_at, factor = *reinterpret_cast<const float *>(xs + kRows * x_row + 4 * chunk);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; ++j) {
                    const uint4 a = shared16(low + (64 * j ^ odd)), b = shared16(high + (64 * j ^ odd)), v = shared16(x + 128 * j), w = shared16(x + 128 * j + 64);
                    step(d, a.x, b.x, v.x, v.y);
                    step(d, a.y, b.y, v.z, v.w);
                    step(d, a.z, b.z, w.x, w.y);
                    step(d, a.w, b.w, w.z, w.w);
                }
                const float s = scale_at < 0 ? factor : factor * scales[half];
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[i] = fmaf(s, d[i], sum[i]);
            }
        }
    }
    // Four bytes of two rows.
    __device__ static void step(float (&d)[4], uint32_t a, uint32_t b, uint32_t x0, uint32_t x1) {
        asm(
            "{\n.reg .b16 l, h;\n.reg .b32 p, q, r, s;\nmov.b32 {l, h}, %4;\ncvt.rn.f16x2.e4m3x2 p, l;\ncvt.rn.f16x2.e4m3x2 r, h;\nmov.b32 {l, h}, %5;\ncvt.rn.f16x2.e4m3x2 q, l;\n"
            "cvt.rn.f16x2.e4m3x2 s, h;\nmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {p,q,r,s}, {%6,%7}, {%0,%1,%2,%3};\n}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b), "r"(x0), "r"(x1));
    }
    // to: [kRows][16]
    __device__ void store(float *to, int lane) const {
        const int r = lane >> 2, c = lane & 3;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 2 * c + (i & 1);
            if (n < kRows) to[n * 16 + r + 8 * (i >> 1)] = sum[i];
        }
    }
};

// ---- block formats ----

// A chunk of 256 elements in registers: codes of block b as the A operand, scales of a group.
template <int kFormat> struct Codes;

template <> struct Codes<PK_Q4_K> {
    static constexpr bool kUnsigned = true;
    static constexpr int kSub = 1, kZero = 0;  // groups per 32 elements; what is subtracted from codes
    static constexpr bool kHasMin = true;
    using U = Unit<PK_Q4_K>;
    uint4 low[4], s0, s1;
    uint2 f;
    __device__ void load(const uint8_t *slot, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = shared16(slot + 512 * i + 16 * lane);
        s0 = shared16(slot + U::kScaleAt + 32 * (lane >> 2));
        s1 = shared16(slot + U::kScaleAt + 32 * (lane >> 2) + 16);
        f = shared8(slot + U::kFactorAt + 8 * (lane >> 2));
    }
    __device__ void codes(int b, uint32_t (&a)[4]) const {
        const uint32_t w0 = word_of(low[b / 2], (b & 1) * 2), w1 = word_of(low[b / 2], (b & 1) * 2 + 1);
        a[0] = w0 & 0x0f0f0f0fu;
        a[1] = w1 & 0x0f0f0f0fu;
        a[2] = (w0 >> 4) & 0x0f0f0f0fu;
        a[3] = (w1 >> 4) & 0x0f0f0f0fu;
    }
    // Group first + more, where `more` differs from lane to lane and first + more stay in one word.
    __device__ float scale(int first, int more, int row) const {
        return byte_plus_2_23(word_of(row ? s1 : s0, first / 4), (first & 3) + more) - 8388608.0f;
    }
    __device__ float least(int first, int more, int row) const {
        return byte_plus_2_23(word_of(row ? s1 : s0, 2 + first / 4), (first & 3) + more) - 8388608.0f;
    }
    __device__ float factor(int row) const { return half_at(row ? f.y : f.x, 0); }
    __device__ float least_factor(int row) const { return half_at(row ? f.y : f.x, 1); }
};

template <> struct Codes<PK_Q6_K> {
    static constexpr bool kUnsigned = true;
    static constexpr int kSub = 2, kZero = 32;
    static constexpr bool kHasMin = false;
    using U = Unit<PK_Q6_K>;
    uint4 low[4], high[2], s0, s1;
    uint32_t f;
    __device__ void load(const uint8_t *slot, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = shared16(slot + 512 * i + 16 * lane);
        high[0] = shared16(slot + U::kLowBytes + 16 * lane);
        high[1] = shared16(slot + U::kLowBytes + 512 + 16 * lane);
        s0 = shared16(slot + U::kScaleAt + 32 * (lane >> 2));
        s1 = shared16(slot + U::kScaleAt + 32 * (lane >> 2) + 16);
        f = *reinterpret_cast<const uint32_t *>(slot + U::kFactorAt + 4 * (lane >> 2));
    }
    __device__ void codes(int b, uint32_t (&a)[4]) const {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const uint32_t w = word_of(low[b / 2], (b & 1) * 2 + row), h = word_of(high[row], b / 2);
            const int s = (b & 1) * 8;
            a[row] = (w & 0x0f0f0f0fu) | (shifted(h, s - 4) & 0x00300030u) | (shifted(h, s - 8) & 0x30003000u);
            a[row + 2] = ((w >> 4) & 0x0f0f0f0fu) | (shifted(h, s - 2) & 0x00300030u) | (shifted(h, s - 6) & 0x30003000u);
        }
    }
    __device__ float scale(int first, int more, int row) const { return byte_plus_2_23(word_of(row ? s1 : s0, first / 4), (first & 3) + more) - 8388736.0f; }
    __device__ float least(int, int, int) const { return 0.0f; }
    __device__ float factor(int row) const { return half_at(f, row); }
    __device__ float least_factor(int) const { return 0.0f; }
};

// Two units of 128.
template <> struct Codes<PK_Q8_0> {
    static constexpr bool kUnsigned = false;
    static constexpr int kSub = 1, kZero = 0;
    static constexpr bool kHasMin = false;
    using U = Unit<PK_Q8_0>;
    const uint8_t *slot_lane, *scales;
    __device__ void load(const uint8_t *slot, int lane) {
        slot_lane = slot + 16 * lane;
        scales = slot + U::kScaleAt + 16 * (lane >> 2);
    }
    __device__ void codes(int b, uint32_t (&a)[4]) const {
        const uint4 v = shared16(slot_lane + (b / 4) * U::kBytes + (b & 3) * 512);
        a[0] = v.x; a[2] = v.y; a[1] = v.z; a[3] = v.w;
    }
    __device__ float scale(int first, int more, int row) const {
        return __half2float(*reinterpret_cast<const __half *>(scales + (first / 4) * U::kBytes + row * 8 + 2 * (first & 3) + 2 * more));
    }
    __device__ float least(int, int, int) const { return 0.0f; }
    __device__ float factor(int) const { return 1.0f; }
    __device__ float least_factor(int) const { return 0.0f; }
};

template <int kFormat, int kRows>
struct BlockProduct {
    using C = Codes<kFormat>;
    static constexpr int kR = kRows < 4 ? kRows : 4, kSets = kRows / kR, kG = 4 / kR;  // kG groups share an accumulator
    static constexpr int kGroups = 8 * C::kSub, kBlocks = kG * 1 / C::kSub > 0 ? kG / C::kSub : 1;
    float sum[kSets][2];
    // Made from all that was read.
    __device__ uint32_t used() const { return __float_as_uint(sum[0][0]) ^ __float_as_uint(sum[0][1]); }
    __device__ void clear() {
#pragma unroll
        for (int s = 0; s < kSets; ++s) sum[s][0] = sum[s][1] = 0.0f;
    }
    __device__ void add(const uint8_t *slot, const uint8_t *xs, int x_row, int chunk, int, int lane) {
        const int n = lane >> 2, c = lane & 3;
        // As a column: part of x, row, group. As an owner of sums: row and group of columns 2c, 2c + 1.
        const int part = n & 1, in_row = (n >> 1) % kR, in_group = (n >> 1) / kR, my_row = c % kR, my_group = c / kR;
        const uint8_t *x = xs + ((chunk * 8 + in_group / C::kSub) * kRows + in_row) * 64 + part * 32 + c * 8;
        const uint8_t *scales = xs + kRows * x_row + ((chunk * 8 + my_group / C::kSub) * kRows + my_row) * 16;
        C codes;
        codes.load(slot, lane);
        float total[kSets][2] = {}, least[kSets][2] = {};
#pragma unroll
        for (int chain = 0; chain < kGroups / kG; ++chain) {
            const int first = chain * kG, block = first / C::kSub;
            float s[2], m[2];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                s[row] = codes.scale(first, my_group, row);
                if constexpr (C::kHasMin) m[row] = codes.least(first, my_group, row);
            }
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                uint2 v = shared8(x + (block * kRows + 4 * set) * 64);
                if constexpr (C::kSub == 2) {
                    const uint32_t sub = ((first + in_group) & 1) ? 0xff00ff00u : 0x00ff00ffu;
                    v.x &= sub;
                    v.y &= sub;
                }
                int d[4] = {0, 0, 0, 0};
#pragma unroll
                for (int b = 0; b < kBlocks; ++b) {
                    uint32_t a[4];
                    codes.codes(block + b, a);
                    const uint32_t mask = kBlocks == 1 || in_group / C::kSub == b ? ~0u : 0u;
                    mma_int8<C::kUnsigned>(d, a, v.x & mask, v.y & mask);
                }
                const float4 f = *reinterpret_cast<const float4 *>(scales + (block * kRows + 4 * set) * 16);
                const float lump = C::kSub == 1 ? f.y + f.z : ((first + my_group) & 1) ? f.z : f.y;
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    float t = f.x * static_cast<float>(d[2 * row] * 256 + d[2 * row + 1]);
                    if constexpr (C::kZero != 0) t = fmaf(-static_cast<float>(C::kZero), lump, t);
                    total[set][row] = fmaf(s[row], t, total[set][row]);
                    if constexpr (C::kHasMin) least[set][row] = fmaf(m[row], lump, least[set][row]);
                }
            }
        }
#pragma unroll
        for (int set = 0; set < kSets; ++set)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                sum[set][row] = fmaf(codes.factor(row), total[set][row], sum[set][row]);
                if constexpr (C::kHasMin) sum[set][row] = fmaf(-codes.least_factor(row), least[set][row], sum[set][row]);
            }
    }
    __device__ void store(float *to, int lane) const {
        const int r = lane >> 2, c = lane & 3;
#pragma unroll
        for (int set = 0; set < kSets; ++set)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float v = sum[set][row];
                if constexpr (kR == 1) v += __shfl_xor_sync(~0u, v, 1);
                if constexpr (kR <= 2) v += __shfl_xor_sync(~0u, v, 2);
                if (c < kR) to[(c + 4 * set) * 16 + r + 8 * row] = v;
            }
    }
};

template <int kFormat, int kRows>
struct Product : BlockProduct<kFormat, kRows> {};
template <int kRows>
struct Product<PK_BF16, kRows> : RowsProduct<PK_BF16, kRows> {};
template <int kRows>
struct Product<PK_FP8_E4M3, kRows> : RowsProduct<PK_FP8_E4M3, kRows> {};

}  // namespace pk::persist
