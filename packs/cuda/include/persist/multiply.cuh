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
// spread: what a column's x becomes; sums: of rows r and r + 8 over a part, x being masked per block and half;
// used: made from the scales that were read. kSub: groups per 32 elements; kZero: what is subtracted from codes; kOver: what integers are multiplied with.
template <int kFormat> struct Codes;

// x of one group in four, as a column has it: zero in the operands of the others. Chosen by comparison, as masks would take registers.
__device__ __forceinline__ void spread_groups(const uint2 &v, int group, uint32_t (&to)[4][2]) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        to[b][0] = group == b ? v.x : 0u;
        to[b][1] = group == b ? v.y : 0u;
    }
}

template <> struct Codes<PK_Q4_K> {
    static constexpr bool kHasMin = true;
    static constexpr int kSub = 1, kZero = 0;
    static constexpr float kOver = 16.0f;
    using U = Unit<PK_Q4_K>;
    uint4 low[2][2], scales[2];  // scales of a row: eight scales, eight minima
    uint2 factors;
    static __device__ __forceinline__ void spread(const uint2 &v, int group, uint32_t (&to)[4][2]) { spread_groups(v, group, to); }
    __device__ void take(const uint8_t *slot, const uint8_t *, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i >> 1][i & 1] = shared16(slot + 512 * i + 16 * lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i] = shared16(slot + U::kScaleAt + 32 * (lane >> 2) + 16 * i);
        factors = shared8(slot + U::kFactorAt + 8 * (lane >> 2));
    }
    __device__ uint32_t used() const { return scales[0].x ^ scales[1].x ^ factors.x; }
    // High nibbles stay where they are, 16 times too large, so they have sums of their own: two operations a word, not three.
    __device__ void sums(int part, const uint32_t (&x)[4][2], int (&t)[2]) const {
        constexpr uint32_t kLow = 0x0f0f0f0fu;
        int d[4] = {0, 0, 0, 0}, e[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 w = low[part][i];
            const uint32_t a[4] = {w.x & kLow, w.y & kLow, w.z & kLow, w.w & kLow}, b[4] = {w.x & ~kLow, w.y & ~kLow, w.z & ~kLow, w.w & ~kLow};
            mma_int8<true>(d, a, x[2 * i][0], x[2 * i + 1][0]);
            mma_int8<true>(e, b, x[2 * i][1], x[2 * i + 1][1]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) t[row] = (d[2 * row] * 256 + d[2 * row + 1]) * 16 + (e[2 * row] * 256 + e[2 * row + 1]);
    }
    __device__ float scale(int part, int group, int row) const { return byte_plus_2_23(part ? scales[row].y : scales[row].x, group) - 8388608.0f; }
    __device__ float least(int part, int group, int row) const { return byte_plus_2_23(part ? scales[row].w : scales[row].z, group) - 8388608.0f; }
    // Of the whole chunk: what sums of scaled codes, and of minima, are multiplied with.
    __device__ float factor(int row) const { return half_at(row ? factors.y : factors.x, 0); }
    __device__ float below(int row) const { return half_at(row ? factors.y : factors.x, 1); }
};

template <> struct Codes<PK_Q6_K> {
    static constexpr bool kHasMin = false;
    static constexpr int kSub = 2, kZero = 32;
    static constexpr float kOver = 16.0f;
    using U = Unit<PK_Q6_K>;
    static_assert(U::kBytes == kFirstBytes + kRestBytes && U::kLowBytes + 512 >= kFirstBytes && kFirstBytes % 16 == 0);
    uint4 low[4], high[2], scales[2];  // high, scales: of rows r and r + 8, a word a part
    uint32_t factors;
    __device__ void take(const uint8_t *slot, const uint8_t *rest, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = shared16(slot + 512 * i + 16 * lane);
        high[0] = shared16((16 * lane < kFirstBytes - U::kLowBytes ? slot : rest - kFirstBytes) + U::kLowBytes + 16 * lane);
        high[1] = shared16(rest - kFirstBytes + U::kLowBytes + 512 + 16 * lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i] = shared16(rest - kFirstBytes + U::kScaleAt + 32 * (lane >> 2) + 16 * i);
        factors = shared4(rest - kFirstBytes + U::kFactorAt + 4 * (lane >> 2));
    }
    __device__ uint32_t used() const { return scales[0].x ^ scales[1].x ^ factors; }
    // A byte of high bits has those of four codes of one block: of the first and the second half's even byte, then of the odd ones. So bits of equal place are
    // operands by themselves, with x in their order: x[0] and x[1] for nibbles of the first and the second block, x[2] for the even bytes' high bits, x[3] for the odd ones'.
    static __device__ __forceinline__ void spread(const uint2 &v, int group, uint32_t (&to)[4][2]) {
        const bool is_odd = group & 1, is_second = group & 2;
        const uint32_t own = is_odd ? 0x3414u : 0x4240u, none = 0x4444u;
        const uint32_t pick[4] = {is_second ? none : own, is_second ? own : none, is_odd ? none : is_second ? 0x2404u : 0x4240u, !is_odd ? none : is_second ? 0x3414u : 0x4341u};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to[i][0] = __byte_perm(v.x, 0, pick[i]);
            to[i][1] = __byte_perm(v.y, 0, pick[i]);
        }
    }
    // High nibbles stay where they are, as in Q4_K.
    __device__ void sums(int part, const uint32_t (&x)[4][2], int (&t)[2]) const {
        constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0x30303030u;
        const uint4 w = low[part];
        const uint32_t h[2] = {word_of(high[0], part), word_of(high[1], part)};
        int d[4] = {0, 0, 0, 0}, e[4] = {0, 0, 0, 0};
        const uint32_t a[4] = {w.x & kLow, w.y & kLow, w.z & kLow, w.w & kLow}, b[4] = {w.x & ~kLow, w.y & ~kLow, w.z & ~kLow, w.w & ~kLow};
        const uint32_t even[4] = {h[0] << 4 & kHigh, h[1] << 4 & kHigh, h[0] << 2 & kHigh, h[1] << 2 & kHigh}, odd[4] = {h[0] & kHigh, h[1] & kHigh, h[0] >> 2 & kHigh, h[1] >> 2 & kHigh};
        mma_int8<true>(d, a, x[0][0], x[1][0]);
        mma_int8<true>(e, b, x[0][1], x[1][1]);
        mma_int8<true>(d, even, x[2][0], x[2][1]);
        mma_int8<true>(d, odd, x[3][0], x[3][1]);
#pragma unroll
        for (int row = 0; row < 2; ++row) t[row] = (d[2 * row] * 256 + d[2 * row + 1]) * 16 + (e[2 * row] * 256 + e[2 * row + 1]);
    }
    __device__ float scale(int part, int group, int row) const { return byte_plus_2_23(word_of(scales[row], part), group) - 8388736.0f; }
    __device__ float least(int, int, int) const { return 0.0f; }
    __device__ float factor(int row) const { return half_at(factors, row); }
    __device__ float below(int) const { return 0.0f; }
};

// Two units of 128.
template <> struct Codes<PK_Q8_0> {
    static constexpr bool kHasMin = false;
    static constexpr int kSub = 1, kZero = 0;
    static constexpr float kOver = 1.0f;
    using U = Unit<PK_Q8_0>;
    uint4 all[2][4];
    uint2 scales[2][2];  // of a row: four groups'
    static __device__ __forceinline__ void spread(const uint2 &v, int group, uint32_t (&to)[4][2]) { spread_groups(v, group, to); }
    __device__ void take(const uint8_t *slot, const uint8_t *, int lane) {
#pragma unroll
        for (int i = 0; i < 8; ++i) all[i >> 2][i & 3] = shared16(slot + (i >> 2) * U::kBytes + 512 * (i & 3) + 16 * lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) scales[i >> 1][i & 1] = shared8(slot + (i >> 1) * U::kBytes + U::kScaleAt + 16 * (lane >> 2) + 8 * (i & 1));
    }
    __device__ uint32_t used() const { return scales[0][0].x ^ scales[0][1].x ^ scales[1][0].x ^ scales[1][1].x; }
    __device__ void sums(int part, const uint32_t (&x)[4][2], int (&t)[2]) const {
        int d[2][4] = {};
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const uint4 w = all[part][b];
            const uint32_t a[4] = {w.x, w.z, w.y, w.w};
            mma_int8<false>(d[b & 1], a, x[b][0], x[b][1]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) t[row] = (d[0][2 * row] + d[1][2 * row]) * 256 + (d[0][2 * row + 1] + d[1][2 * row + 1]);
    }
    __device__ float scale(int part, int group, int row) const { return half_at(group & 2 ? scales[part][row].y : scales[part][row].x, group & 1); }
    __device__ float least(int, int, int) const { return 0.0f; }
    __device__ float factor(int) const { return 1.0f; }
    __device__ float below(int) const { return 0.0f; }
};

// Two chunks at once: the same of two tiles, which share what is read of x, or two of one tile.
template <int kFormat, bool kIsPair>
struct BlockProduct {
    using C = Codes<kFormat>;
    static constexpr int kBlocks = 4 / C::kSub, kParts = 8 / kBlocks, kX = kIsPair ? 1 : 2;
    C codes[2];
    uint2 x[kX][kParts];
    float2 f[kX][kParts];  // scale of x, over kOver; sum of x, times -kZero where codes have a zero
    int d[2][kParts][2];
    float sum[2][2];       // of rows r and r + 8
    __device__ void clear() { sum[0][0] = sum[0][1] = sum[1][0] = sum[1][1] = 0.0f; }
    // slot, rest: of both; rest: what lies behind the first kFirstBytes of Q6_K's chunks. chunk: their numbers.
    __device__ void take(const uint8_t *const (&slot)[2], const uint8_t *const (&rest)[2], const uint8_t *xs, int x_row, const int (&chunk)[2], int lane) {
        // As a column: part of x and group. As an owner of sums: group of columns 2c, 2c + 1.
        const int n = lane >> 2, c = lane & 3, in_group = n >> 1;
#pragma unroll
        for (int k = 0; k < 2; ++k) codes[k].take(slot[k], rest[k], lane);
#pragma unroll
        for (int k = 0; k < kX; ++k)
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                x[k][part] = shared8(xs + (chunk[k] * 8 + in_group / C::kSub) * 64 + (n & 1) * 32 + c * 8 + part * (kBlocks * 64));
                const float4 v = *reinterpret_cast<const float4 *>(xs + x_row + (chunk[k] * 8 + c / C::kSub + part * kBlocks) * 16);
                const float lump = C::kSub == 1 ? v.y + v.z : c & 1 ? v.z : v.y;
                f[k][part] = make_float2(v.x * (1.0f / C::kOver), C::kZero ? -static_cast<float>(C::kZero) * lump : lump);
            }
    }
    // Products of integers. Returns what was made from everything that was read of the slots.
    __device__ uint32_t sums(int lane) {
        const int in_group = lane >> 3;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            uint32_t operands[4][2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (k < kX) C::spread(x[k < kX ? k : 0][part], in_group, operands);
                codes[k].sums(part, operands, d[k][part]);
            }
        }
        uint32_t used = codes[0].used() ^ codes[1].used();
#pragma unroll
        for (int part = 0; part < kParts; ++part) used ^= static_cast<uint32_t>(d[0][part][0] ^ d[1][part][0]);
        return used;
    }
    // Scales what sums left. has_second: false where there was one chunk only.
    __device__ void add(int lane, bool has_second = true) {
        const int c = lane & 3;
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float total = 0.0f, least = 0.0f;
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    const float2 at = f[kIsPair ? 0 : k][part];
                    const float t = C::kZero ? fmaf(at.x, static_cast<float>(d[k][part][row]), at.y) : at.x * static_cast<float>(d[k][part][row]);
                    total = fmaf(codes[k].scale(part, c, row), t, total);
                    if constexpr (C::kHasMin) least = fmaf(codes[k].least(part, c, row), at.y, least);
                }
                float now = fmaf(codes[k].factor(row), total, sum[k][row]);
                if constexpr (C::kHasMin) now = fmaf(-codes[k].below(row), least, now);
                if (kIsPair || k == 0 || has_second) sum[k][row] = now;
            }
    }
    // to: of the tile, or of the first of two, `apart` floats before the other.
    __device__ void store(float *to, int apart, int lane) const {
#pragma unroll
        for (int k = 0; k < (kIsPair ? 2 : 1); ++k)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float v = kIsPair ? sum[k][row] : sum[0][row] + sum[1][row];
                v += __shfl_xor_sync(~0u, v, 1);
                v += __shfl_xor_sync(~0u, v, 2);
                if ((lane & 3) == 0) to[k * apart + (lane >> 2) + 8 * row] = v;
            }
    }
};

}  // namespace pk::persist
