// Inner products of a chunk from the ring with x in shared memory.
//
// Row-major formats: eight rows, mma m16n8k16 in bf16, or in f16 with x over a power of two for FP8. The first eight rows of the operand are the first
// halves of the chunk's rows, the others their second halves; the columns hold x of the first or second half (n & 2), in the order in which odd or even rows
// are read (n & 1): odd ones take 64 bytes ahead of the 64 before them, so that eight lanes reach 128 different bytes. Block formats: 16 rows, mma
// m16n8k32 in integers. The eight columns hold (group, high or low byte of x): a column's x is zero outside its own group, so
// that one accumulator collects the sums of four groups and scales are applied once for all of them.
// Block formats take a chunk of two tiles at once, whose products hide each other's waits.
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
__device__ __forceinline__ uint32_t shared4(const uint8_t *p) { return *reinterpret_cast<const uint32_t *>(p); }

// ---- row-major ----

template <int kFormat>
struct RowsProduct {
    float sum[4];
    __device__ void clear() { sum[0] = sum[1] = sum[2] = sum[3] = 0.0f; }
    // Made from all that was read.
    __device__ uint32_t used() const { return __float_as_uint(sum[0]) ^ __float_as_uint(sum[1]) ^ __float_as_uint(sum[2]) ^ __float_as_uint(sum[3]); }
    // x: the staged row; chunk: its index within the row.
    __device__ void add(const uint8_t *slot, const uint8_t *xs, int x_row, int chunk, bool has_scales, int lane) {
        const int r = lane >> 2, c = lane & 3, odd = (r & 1) * 64;
        constexpr int kStep = 2 * chunk_elements(kFormat);
        const uint8_t *x = xs + chunk * kStep + (r >> 1 & 1) * (kStep / 2) + 16 * c, *rows = slot + r * kBoxWidth + 16 * c;
        if constexpr (kFormat == PK_BF16) {
#pragma unroll 2
            for (int part = 0; part < 4; ++part) {
                const uint8_t *w = rows + (64 * part ^ odd);
                const uint4 a = shared16(w), b = shared16(w + kBoxWidth / 2), v = shared16(x + (64 * part ^ odd));
                mma_bf16(sum, a.x, b.x, a.y, b.y, v.x, v.y);
                mma_bf16(sum, a.z, b.z, a.w, b.w, v.z, v.w);
            }
        } else {
            const float2 factor = *reinterpret_cast<const float2 *>(xs + x_row + 8 * chunk);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                // Two rows of products side by side: each waits for the one before.
                float d[2][4] = {};
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint8_t *w = rows + (64 * (2 * part + j) ^ odd);
                    const int at = 256 * part + (192 * j ^ 3 * odd);  // put_f16
                    const uint4 a = shared16(w), b = shared16(w + kBoxWidth / 2), v = shared16(x + at), u = shared16(x + (at ^ 64));
                    step(d[j], a.x, b.x, v.x, v.y);
                    step(d[j], a.y, b.y, v.z, v.w);
                    step(d[j], a.z, b.z, u.x, u.y);
                    step(d[j], a.w, b.w, u.z, u.w);
                }
                float2 s = factor;
                if (has_scales) {
                    const float *scales = reinterpret_cast<const float *>(slot + kBoxBytes) + part;
                    s.x *= scales[0];
                    s.y *= scales[2];
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[i] = fmaf(i < 2 ? s.x : s.y, d[0][i] + d[1][i], sum[i]);
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
    // to: [8]
    __device__ void store(float *to, int lane) const {
        const bool is_odd = lane & 4;
        const float first = is_odd ? sum[1] : sum[0], second = __shfl_down_sync(~0u, is_odd ? sum[3] : sum[2], 1);
        if ((lane & 3) == 0) to[lane >> 2] = first + second;
    }
};

// ---- block formats ----

// What a warp reads of a chunk of 256 elements. A part of it is four groups that share a scale each, which one accumulator takes together.
// load: what is read once a chunk; part: the codes of a part; sums: of rows r and r + 8, with x masked per block and half. kSub: groups per 32
// elements; kZero: what is subtracted from codes; kOver: what integers are multiplied with.
template <int kFormat> struct Codes;

template <> struct Codes<PK_Q4_K> {
    static constexpr bool kHasMin = true;
    static constexpr int kSub = 1, kZero = 0, kUnroll = 2;
    static constexpr float kOver = 16.0f;
    using U = Unit<PK_Q4_K>;
    uint4 low[2], scales[2];  // of a row: eight scales, eight minima
    __device__ void load(const uint8_t *slot, const uint8_t *, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i] = shared16(slot + U::kScaleAt + 32 * (lane >> 2) + 16 * i);
    }
    __device__ void part(const uint8_t *slot, const uint8_t *, int part, int lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i) low[i] = shared16(slot + 1024 * part + 512 * i + 16 * lane);
    }
    // High nibbles stay where they are, 16 times too large, so they have sums of their own: two operations a word, not three.
    __device__ void sums(const uint32_t (&x)[4][2], int (&t)[2]) const {
        constexpr uint32_t kLow = 0x0f0f0f0fu;
        int d[4] = {0, 0, 0, 0}, e[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t a[4] = {low[i].x & kLow, low[i].y & kLow, low[i].z & kLow, low[i].w & kLow}, b[4] = {low[i].x & ~kLow, low[i].y & ~kLow, low[i].z & ~kLow, low[i].w & ~kLow};
            mma_int8<true>(d, a, x[2 * i][0], x[2 * i + 1][0]);
            mma_int8<true>(e, b, x[2 * i][1], x[2 * i + 1][1]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) t[row] = (d[2 * row] * 256 + d[2 * row + 1]) * 16 + (e[2 * row] * 256 + e[2 * row + 1]);
    }
    __device__ float scale(int part, int group, int row) const { return byte_plus_2_23(part ? scales[row].y : scales[row].x, group) - 8388608.0f; }
    __device__ float least(int part, int group, int row) const { return byte_plus_2_23(part ? scales[row].w : scales[row].z, group) - 8388608.0f; }
    // Of the whole chunk: what sums of scaled codes, and of minima, are multiplied with.
    __device__ static void factors(const uint8_t *slot, const uint8_t *, int lane, float (&factor)[2], float (&least)[2]) {
        const uint2 f = shared8(slot + U::kFactorAt + 8 * (lane >> 2));
        factor[0] = half_at(f.x, 0);
        factor[1] = half_at(f.y, 0);
        least[0] = half_at(f.x, 1);
        least[1] = half_at(f.y, 1);
    }
};

template <> struct Codes<PK_Q6_K> {
    static constexpr bool kHasMin = false;
    static constexpr int kSub = 2, kZero = 32, kUnroll = 1;
    static constexpr float kOver = 1.0f;
    using U = Unit<PK_Q6_K>;
    static_assert(U::kBytes == kFirstBytes + kRestBytes && U::kLowBytes + 512 >= kFirstBytes && kFirstBytes % 16 == 0);
    uint4 low;
    uint32_t high[2], scales[2];
    const uint8_t *highs[2];  // of rows r and r + 8
    __device__ void load(const uint8_t *slot, const uint8_t *rest, int lane) {
        highs[0] = (16 * lane < kFirstBytes - U::kLowBytes ? slot : rest - kFirstBytes) + U::kLowBytes + 16 * lane;
        highs[1] = rest - kFirstBytes + U::kLowBytes + 512 + 16 * lane;
    }
    __device__ void part(const uint8_t *slot, const uint8_t *rest, int part, int lane) {
        low = shared16(slot + 512 * part + 16 * lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            high[i] = shared4(highs[i] + 4 * part);
            scales[i] = shared4(rest - kFirstBytes + U::kScaleAt + 32 * (lane >> 2) + 16 * i + 4 * part);
        }
    }
    __device__ void sums(const uint32_t (&x)[2][2], int (&t)[2]) const {
        int d[4] = {0, 0, 0, 0};
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            uint32_t a[4];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const uint32_t w = word_of(low, b * 2 + row), h = high[row];
                const int s = b * 8;
                a[row] = (w & 0x0f0f0f0fu) | (shifted(h, s - 4) & 0x00300030u) | (shifted(h, s - 8) & 0x30003000u);
                a[row + 2] = ((w >> 4) & 0x0f0f0f0fu) | (shifted(h, s - 2) & 0x00300030u) | (shifted(h, s - 6) & 0x30003000u);
            }
            mma_int8<true>(d, a, x[b][0], x[b][1]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) t[row] = d[2 * row] * 256 + d[2 * row + 1];
    }
    __device__ float scale(int, int group, int row) const { return byte_plus_2_23(scales[row], group) - 8388736.0f; }
    __device__ float least(int, int, int) const { return 0.0f; }
    __device__ static void factors(const uint8_t *, const uint8_t *rest, int lane, float (&factor)[2], float (&)[2]) {
        const uint32_t f = shared4(rest - kFirstBytes + U::kFactorAt + 4 * (lane >> 2));
        factor[0] = half_at(f, 0);
        factor[1] = half_at(f, 1);
    }
};

// Two units of 128.
template <> struct Codes<PK_Q8_0> {
    static constexpr bool kHasMin = false;
    static constexpr int kSub = 1, kZero = 0, kUnroll = 1;
    static constexpr float kOver = 1.0f;
    using U = Unit<PK_Q8_0>;
    uint4 all[4];
    const uint8_t *scales;
    __device__ void load(const uint8_t *, const uint8_t *, int) {}
    __device__ void part(const uint8_t *slot, const uint8_t *, int part, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) all[i] = shared16(slot + part * U::kBytes + 512 * i + 16 * lane);
        scales = slot + part * U::kBytes + U::kScaleAt + 16 * (lane >> 2);
    }
    __device__ void sums(const uint32_t (&x)[4][2], int (&t)[2]) const {
        int d[2][4] = {};
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const uint32_t a[4] = {all[b].x, all[b].z, all[b].y, all[b].w};
            mma_int8<false>(d[b & 1], a, x[b][0], x[b][1]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) t[row] = (d[0][2 * row] + d[1][2 * row]) * 256 + (d[0][2 * row + 1] + d[1][2 * row + 1]);
    }
    __device__ float scale(int, int group, int row) const { return __half2float(*reinterpret_cast<const __half *>(scales + row * 8 + 2 * group)); }
    __device__ float least(int, int, int) const { return 0.0f; }
    __device__ static void factors(const uint8_t *, const uint8_t *, int, float (&)[2], float (&)[2]) {}
};

// One tile, or two that lie side by side in the ring: what is read of x serves both.
template <int kFormat>
struct BlockProduct {
    using C = Codes<kFormat>;
    static constexpr int kBlocks = 4 / C::kSub, kParts = 8 / kBlocks;
    float sum[2][2];  // of a tile's rows r and r + 8
    __device__ void clear() { sum[0][0] = sum[0][1] = sum[1][0] = sum[1][1] = 0.0f; }
    // Made from all that was read of a tile.
    __device__ uint32_t used(int tile) const { return __float_as_uint(sum[tile][0]) ^ __float_as_uint(sum[tile][1]); }
    // rest: what lies behind the first kFirstBytes of Q6_K's chunks.
    template <int kTiles>
    __device__ void add(const uint8_t *const (&slot)[kTiles], const uint8_t *const (&rest)[kTiles], const uint8_t *xs, int x_row, int chunk, int lane) {
        // As a column: part of x and group. As an owner of sums: group of columns 2c, 2c + 1.
        const int n = lane >> 2, c = lane & 3, in_group = n >> 1;
        const uint8_t *x = xs + (chunk * 8 + in_group / C::kSub) * 64 + (n & 1) * 32 + c * 8, *scales = xs + x_row + (chunk * 8 + c / C::kSub) * 16;
        C codes[kTiles];
        float total[kTiles][2] = {}, least[kTiles][2] = {};
#pragma unroll
        for (int k = 0; k < kTiles; ++k) codes[k].load(slot[k], rest[k], lane);
#pragma unroll C::kUnroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int k = 0; k < kTiles; ++k) codes[k].part(slot[k], rest[k], part, lane);
            uint2 v = shared8(x + part * (kBlocks * 64));
            const float4 f = *reinterpret_cast<const float4 *>(scales + part * (kBlocks * 16));
            if constexpr (C::kSub == 2) {
                const uint32_t sub = in_group & 1 ? 0xff00ff00u : 0x00ff00ffu;
                v.x &= sub;
                v.y &= sub;
            }
            uint32_t masked[kBlocks][2];
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                const uint32_t mask = in_group / C::kSub == b ? ~0u : 0u;
                masked[b][0] = v.x & mask;
                masked[b][1] = v.y & mask;
            }
            const float lump = C::kSub == 1 ? f.y + f.z : c & 1 ? f.z : f.y;
#pragma unroll
            for (int k = 0; k < kTiles; ++k) {
                int d[2];
                codes[k].sums(masked, d);
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    float t = f.x * static_cast<float>(d[row]);
                    if constexpr (C::kZero != 0) t = fmaf(-static_cast<float>(C::kZero), lump, t);
                    total[k][row] = fmaf(codes[k].scale(part, c, row), t, total[k][row]);
                    if constexpr (C::kHasMin) least[k][row] = fmaf(codes[k].least(part, c, row), lump, least[k][row]);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < kTiles; ++k) {
            float factor[2] = {1.0f, 1.0f}, below[2];
            C::factors(slot[k], rest[k], lane, factor, below);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                sum[k][row] = fmaf(factor[row] * (1.0f / C::kOver), total[k][row], sum[k][row]);
                if constexpr (C::kHasMin) sum[k][row] = fmaf(-below[row], least[k][row], sum[k][row]);
            }
        }
    }
    __device__ void store(float *to, int lane, int tile) const {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float v = sum[tile][row];
            v += __shfl_xor_sync(~0u, v, 1);
            v += __shfl_xor_sync(~0u, v, 2);
            if ((lane & 3) == 0) to[(lane >> 2) + 8 * row] = v;
        }
    }
};

template <int kFormat>
struct Product : BlockProduct<kFormat> {};
template <>
struct Product<PK_BF16> : RowsProduct<PK_BF16> {};
template <>
struct Product<PK_FP8_E4M3> : RowsProduct<PK_FP8_E4M3> {};

}  // namespace pk::persist
