// What kernels for a lone row share: units of weights a few steps ahead in registers, and x as their products want it.
#pragma once
#include "experts_piece.cuh"

namespace pk {

constexpr int kBlockWarps = kExpertThreads / 32;

struct Ahead {
    RowsRegisters regs;
    float scale = 1.0f;
};

// Steps [0, n) of a warp, kAhead of them under way; load(r, step) has been called for the first kAhead.
template <int kAhead, class Load, class Use>
__device__ __forceinline__ void stream_steps(Ahead (&ahead)[kAhead], int n, const Load &load, const Use &use) {
    for (int base = 0; base < n; base += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (base + i >= n) break;
            use(ahead[i], base + i);
            if (base + i + kAhead < n) load(ahead[i], base + i + kAhead);
        }
    }
}
template <int kAhead, class Load>
__device__ __forceinline__ void prime(Ahead (&ahead)[kAhead], int n, const Load &load) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
        if (i < n) load(ahead[i], i);
}

// Eight values from k on, as the product of a format wants x.
template <int kFormat>
__device__ __forceinline__ void stage8(uint8_t *xs, int k, const float (&v)[8]) {
    uint2 low = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])), high = make_uint2(pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    if constexpr (Rows<kFormat>::kIsFp8) {
        low = make_uint2(pack_bf16(v[0], v[2]), pack_bf16(v[1], v[3]));
        high = make_uint2(pack_bf16(v[4], v[6]), pack_bf16(v[5], v[7]));
    }
    *reinterpret_cast<uint2 *>(xs + 2 * staged_position<kFormat>(k)) = low;
    *reinterpret_cast<uint2 *>(xs + 2 * staged_position<kFormat>(k + 4)) = high;
}

template <int kFormat>
__device__ __forceinline__ void load_unit_of(Ahead &r, const ExpertWeight &w, const uint8_t *matrix, int row0, int unit) {
    const int lane = threadIdx.x & 31;
    load_rows<kFormat>(r.regs, matrix + row0 * w.row_bytes, w.row_bytes, unit, lane);
    r.scale = Rows<kFormat>::kIsFp8 ? block_scale_of(w, matrix, row0, unit) : 1.0f;
}

__device__ __forceinline__ float matrix_scale(const ExpertWeight &w, int expert) { return __ldg(reinterpret_cast<const float *>(w.data + expert * w.stride + w.scale_at)); }

__device__ __forceinline__ void load8_coherent(const float *p, float (&v)[8]) {
    const float4 a = __ldcg(reinterpret_cast<const float4 *>(p)), b = __ldcg(reinterpret_cast<const float4 *>(p) + 1);
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}

// bf16 values that other blocks or kernels wrote, n a multiple of 8.
template <int kFormat>
__device__ __forceinline__ void stage_row(uint8_t *xs, const bf16 *x, int n) {
    for (int k = threadIdx.x * 8; k < n; k += kExpertThreads * 8) {
        const uint4 p = __ldcg(reinterpret_cast<const uint4 *>(x + k));
        const float v[8] = {low_f32(p.x), high_f32(p.x), low_f32(p.y), high_f32(p.y), low_f32(p.z), high_f32(p.z), low_f32(p.w), high_f32(p.w)};
        stage8<kFormat>(xs, k, v);
    }
}

constexpr int kNormParts = 4, kMostNormed = kNormParts * kExpertThreads * 8;

// The row's rms norm times `weight`, staged for BF16 and for kFormat (the same place for BF16 itself); the first block also writes it to `normed`. sums: [33]. m: a
// multiple of 8, at most kMostNormed.
template <int kFormat>
__device__ __forceinline__ void stage_normed(const float *x, const float *weight, float eps, int m, uint8_t *plain, uint8_t *own, bf16 *normed, float *sums) {
    float v[kNormParts][8], w[kNormParts][8], square = 0.0f;
#pragma unroll
    for (int i = 0; i < kNormParts; ++i) {
        const int k = (i * kExpertThreads + static_cast<int>(threadIdx.x)) * 8;
        if (k >= m) continue;
        load8_coherent(x + k, v[i]);
        load8(weight, k, PK_F32, w[i]);
    }
#pragma unroll
    for (int i = 0; i < kNormParts; ++i)
        if ((i * kExpertThreads + static_cast<int>(threadIdx.x)) * 8 < m) {
#pragma unroll
            for (int e = 0; e < 8; ++e) square = fmaf(v[i][e], v[i][e], square);
        }
    const float factor = rsqrtf(block_sum(square, sums) / static_cast<float>(m) + eps);
#pragma unroll
    for (int i = 0; i < kNormParts; ++i) {
        const int k = (i * kExpertThreads + static_cast<int>(threadIdx.x)) * 8;
        if (k >= m) continue;
#pragma unroll
        for (int e = 0; e < 8; ++e) v[i][e] *= factor * w[i][e];
        stage8<PK_BF16>(plain, k, v[i]);
        if constexpr (kFormat != PK_BF16) stage8<kFormat>(own, k, v[i]);
        if (blockIdx.x == 0) store8(normed, k, PK_BF16, v[i]);
    }
    __syncthreads();
}

}  // namespace pk
