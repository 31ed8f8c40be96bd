// What kernels for a lone row share: units of weights a few steps ahead in registers, and x as their products want it.
#pragma once
#include "experts_piece.cuh"

namespace pk {

constexpr int kBlockWarps = kExpertThreads / 32;

constexpr int kSlots = 6, kSlotBytes = 2048 + 128;
constexpr int64_t kRingBytes = kBlockWarps * kSlots * kSlotBytes;

// A warp's units of weights (16 rows of 128 bytes and a factor) on their way through shared memory. Each lane reads what it has asked for itself. In
// registers every unit under way would be a copy of the product's code, and code that runs once is read from L2 instruction by instruction.
struct WarpRing {
    uint32_t base;
    int asked = 0, taken = 0;
    __device__ explicit WarpRing(const uint8_t *ring) : base(shared_address(ring) + (threadIdx.x >> 5) * kSlots * kSlotBytes) {}

    // Unit `unit` of 16 rows, and the factor at `scale` (null: 1); nothing when `is` is false. Called once a step whatever there is to ask.
    __device__ void ask(bool is, const uint8_t *rows, int64_t row_bytes, int unit, const float *scale) {
        const int lane = threadIdx.x & 31;
        const uint32_t slot = base + asked * kSlotBytes, to = slot + lane * 16, factor = slot + 2048 + lane * 4;
        if (is) {
            const uint8_t *from = rows + (lane >> 2) * row_bytes + unit * 128 + 16 * (lane & 3);
            copy16_async(to, from, true);
            copy16_async(to + 512, from + 64, true);
            copy16_async(to + 1024, from + 8 * row_bytes, true);
            copy16_async(to + 1536, from + 8 * row_bytes + 64, true);
            if (scale != nullptr) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(factor), "l"(scale) : "memory");
            else asm volatile("st.shared.f32 [%0], %1;" ::"r"(factor), "f"(1.0f) : "memory");
        }
        commit_async();
        asked = asked + 1 == kSlots ? 0 : asked + 1;
    }
    // The oldest unit that was asked for; returns its factor.
    __device__ float take(RowsRegisters &r) {
        const int lane = threadIdx.x & 31;
        wait_async<kSlots - 1>();
        const uint32_t slot = base + taken * kSlotBytes, from = slot + lane * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.v[i].x), "=r"(r.v[i].y), "=r"(r.v[i].z), "=r"(r.v[i].w) : "r"(from + 512 * i) : "memory");
        float factor;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(factor) : "r"(slot + 2048 + lane * 4) : "memory");
        taken = taken + 1 == kSlots ? 0 : taken + 1;
        return factor;
    }
};

// ask(step) is called for the first kSlots steps, then use(unit, factor, step) for all n in turn, and ask(step + kSlots) after each.
template <class Ask>
__device__ __forceinline__ void prime(const Ask &ask) {
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) ask(i);
}
template <class Ask, class Use>
__device__ __forceinline__ void stream_steps(WarpRing &ring, int n, const Ask &ask, const Use &use) {
#pragma unroll 1
    for (int step = 0; step < n; ++step) {
        RowsRegisters unit;
        const float factor = ring.take(unit);
        use(unit, factor, step);
        ask(step + kSlots);
    }
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

// Asks for a unit of 16 rows of a matrix.
__device__ __forceinline__ void ask_unit(WarpRing &ring, bool is, const ExpertWeight &w, const uint8_t *matrix, int row0, int unit) {
    const float *scale = w.block_scale_at >= 0 ? reinterpret_cast<const float *>(matrix + w.block_scale_at) + (row0 >> 7) * w.block_stride + unit : nullptr;
    ring.ask(is, matrix + row0 * w.row_bytes, w.row_bytes, unit, scale);
}

__device__ __forceinline__ float matrix_scale(const ExpertWeight &w, int expert) { return __ldg(reinterpret_cast<const float *>(w.data + expert * w.stride + w.scale_at)); }

__device__ __forceinline__ void load8_coherent(const float *p, float (&v)[8]) {
    const float4 a = __ldcg(reinterpret_cast<const float4 *>(p)), b = __ldcg(reinterpret_cast<const float4 *>(p) + 1);
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}

// bf16 values that other blocks or kernels wrote, n a multiple of 8.
template <int kFormat>
__device__ __forceinline__ void stage_row(uint8_t *xs, const bf16 *x, int n) {
#pragma unroll 1
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
