// What kernels for a few rows share: units of weights through shared memory, and their products with groups of eight rows of x that lie there too.
#pragma once
#include "lone_row.cuh"
#include "shared_load.cuh"
#include "wgmma.cuh"

namespace pk {

constexpr int kUnitBytes = 128, kFewSlotBytes = 16 * kUnitBytes + 256;  // of a row of weights; of a unit and the factors of its upper and lower rows, one a lane

// The 16-byte pieces of a row of weights change places so that lanes read them without conflicts.
__device__ __forceinline__ uint32_t few_swizzle(int row) { return (row & 1) << 2 | (row & 2); }

// Two neighbours of four e4m3 codes as bf16: kHigh says which two.
template <bool kHigh>
__device__ __forceinline__ uint32_t widen2(uint32_t codes) {
    const uint32_t p = __byte_perm(codes, 0, kHigh ? 0x3424 : 0x1404);
    return bits(__hmul2(as_bf162((p & 0x80008000u) | (p >> 4 & 0x07f007f0u)), as_bf162(0x7b807b80u)));
}

// raw[q] += the 16 rows of a unit at `slot` times rows 8 q to 8 q + 7 of x. x: this lane's part of the unit's first row.
template <int kN, bool kFp8>
__device__ __forceinline__ void few_products(uint32_t slot, uint32_t x, int x_row_bytes, float (&raw)[kN][4]) {
    const int lane = threadIdx.x & 31, r = lane >> 2, c = lane & 3;
    const uint32_t row = slot + r * kUnitBytes, swizzle = few_swizzle(r);
#pragma unroll
    for (int b = 0; b < (kFp8 ? 4 : 2); ++b) {
        uint32_t upper[4], lower[4];
        if constexpr (kFp8) {
            const uint32_t at = row + ((2 * b + (c >> 1)) ^ swizzle) * 16 + (c & 1) * 8;
            const uint2 u = ordered_load2(at), v = ordered_load2(at + 8 * kUnitBytes);
            upper[0] = widen2<false>(u.x); upper[1] = widen2<true>(u.x); upper[2] = widen2<false>(u.y); upper[3] = widen2<true>(u.y);
            lower[0] = widen2<false>(v.x); lower[1] = widen2<true>(v.x); lower[2] = widen2<false>(v.y); lower[3] = widen2<true>(v.y);
        } else {
            const uint32_t at = row + ((4 * b + c) ^ swizzle) * 16;
            const uint4 u = ordered_load4(at), v = ordered_load4(at + 8 * kUnitBytes);
            upper[0] = u.x; upper[1] = u.y; upper[2] = u.z; upper[3] = u.w;
            lower[0] = v.x; lower[1] = v.y; lower[2] = v.z; lower[3] = v.w;
        }
        uint4 right[kN];
#pragma unroll
        for (int q = 0; q < kN; ++q) right[q] = ordered_load4(x + 8 * q * x_row_bytes + 64 * b);
#pragma unroll
        for (int q = 0; q < kN; ++q) mma_bf16(raw[q], upper[0], lower[0], upper[1], lower[1], right[q].x, right[q].y);
#pragma unroll
        for (int q = 0; q < kN; ++q) mma_bf16(raw[q], upper[2], lower[2], upper[3], lower[3], right[q].z, right[q].w);
    }
}

// Where a lane's parts of a tile's two groups of eight rows begin: sixteen neighbours of a matrix, or eight of a gate and eight of what it is multiplied with. factors: of a unit, or null.
struct FewTile {
    const uint8_t *upper, *lower;
    const float *upper_factors, *lower_factors;
};

// A warp's units of 16 rows x 128 bytes and their factors on their way through shared memory, kDeep of them.
template <int kDeep>
struct FewRing {
    uint32_t base;
    int asked = 0, taken = 0;
    __device__ explicit FewRing(uint32_t at) : base(at) {}

    // Called once a step whatever there is to ask; every lane has read what take() gave before.
    __device__ __forceinline__ void ask(bool is, const FewTile &tile, int unit) {
        const int lane = threadIdx.x & 31, r = lane >> 2, c = lane & 3;
        __syncwarp();
        if (is) {
            const uint8_t *upper = tile.upper + unit * kUnitBytes, *lower = tile.lower + unit * kUnitBytes;
            const uint32_t slot = base + asked, to = slot + r * kUnitBytes, near = (c ^ few_swizzle(r)) * 16, far = ((c + 4) ^ few_swizzle(r)) * 16, factor = slot + 16 * kUnitBytes + lane * 8;
            copy16_once(to + near, upper);
            copy16_once(to + far, upper + 64);
            copy16_once(to + 8 * kUnitBytes + near, lower);
            copy16_once(to + 8 * kUnitBytes + far, lower + 64);
            if (tile.upper_factors != nullptr) {
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(factor), "l"(tile.upper_factors + unit) : "memory");
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(factor + 4), "l"(tile.lower_factors + unit) : "memory");
            } else {
                asm volatile("st.shared.v2.f32 [%0], {%1, %1};" ::"r"(factor), "f"(1.0f) : "memory");
            }
        }
        commit_async();
        asked = asked == (kDeep - 1) * kFewSlotBytes ? 0 : asked + kFewSlotBytes;
    }
    // Where the oldest unit that was asked for lies.
    __device__ __forceinline__ uint32_t take() {
        wait_async<kDeep - 1>();
        __syncwarp();
        const uint32_t slot = base + taken;
        taken = taken == (kDeep - 1) * kFewSlotBytes ? 0 : taken + kFewSlotBytes;
        return slot;
    }
    // Of its upper and its lower rows.
    __device__ __forceinline__ float2 factors(uint32_t slot) const {
        float2 v;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(slot + 16 * kUnitBytes + (threadIdx.x & 31) * 8) : "memory");
        return v;
    }
};

// Adds what a unit gave.
template <int kN>
__device__ __forceinline__ void few_add(float (&acc)[kN][4], const float (&raw)[kN][4], float2 factors) {
#pragma unroll
    for (int q = 0; q < kN; ++q)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[q][i] = fmaf(i < 2 ? factors.x : factors.y, raw[q][i], acc[q][i]);
}

}  // namespace pk
