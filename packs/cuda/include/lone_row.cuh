// What kernels for a lone row share: units of weights a few steps ahead in registers, and x as their products want it.
#pragma once
#include "experts_piece.cuh"

namespace pk {

constexpr int kBlockWarps = kExpertThreads / 32;

constexpr int kSlots = 3, kSlotBytes = 2048 + 128;
constexpr int64_t kRingBytes = kBlockWarps * kSlots * kSlotBytes;

// A lane's part of 16 rows of a matrix: where it begins, and the factors of the units (null: 1).
struct Rows16 {
    const uint8_t *rows;
    int64_t row_bytes;
    const float *factors;

    Rows16() = default;
    __device__ Rows16(bool is_first, const Rows16 &a, const Rows16 &b) : rows(is_first ? a.rows : b.rows), row_bytes(is_first ? a.row_bytes : b.row_bytes), factors(is_first ? a.factors : b.factors) {}
    __device__ Rows16(const ExpertWeight &w, const uint8_t *matrix, int row0) : row_bytes(w.row_bytes) {
        const int lane = threadIdx.x & 31;
        rows = matrix + (row0 + (lane >> 2)) * row_bytes + 16 * (lane & 3);
        factors = w.block_scale_at >= 0 ? reinterpret_cast<const float *>(matrix + w.block_scale_at) + (row0 >> 7) * w.block_stride : nullptr;
    }
};

// A warp's units of weights (16 rows of 128 bytes and a factor) on their way through shared memory. Each lane reads what it has asked for itself. In
// registers every unit under way would be a copy of the product's code, and code that runs once is read from L2 instruction by instruction.
struct WarpRing {
    uint32_t base;
    int asked = 0, taken = 0;
    __device__ explicit WarpRing(const uint8_t *ring) : base(shared_address(ring) + (threadIdx.x >> 5) * kSlots * kSlotBytes) {}

    // A unit of 16 rows; nothing when `is` is false. Called once a step whatever there is to ask.
    __device__ __forceinline__ void ask(bool is, const Rows16 &from, int unit) {
        const int lane = threadIdx.x & 31;
        const uint32_t slot = base + asked, to = slot + lane * 16, factor = slot + 2048 + lane * 4;
        if (is) {
            const uint8_t *upper = from.rows + unit * 128, *lower = upper + 8 * from.row_bytes;
            copy16_async(to, upper, true);
            copy16_async(to + 512, upper + 64, true);
            copy16_async(to + 1024, lower, true);
            copy16_async(to + 1536, lower + 64, true);
            if (from.factors != nullptr) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(factor), "l"(from.factors + unit) : "memory");
            else asm volatile("st.shared.f32 [%0], %1;" ::"r"(factor), "f"(1.0f) : "memory");
        }
        commit_async();
        asked = asked == (kSlots - 1) * kSlotBytes ? 0 : asked + kSlotBytes;
    }
    // The oldest unit that was asked for; returns its factor.
    __device__ __forceinline__ float take(RowsRegisters &r) {
        const int lane = threadIdx.x & 31;
        wait_async<kSlots - 1>();
        const uint32_t slot = base + taken, from = slot + lane * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.v[i].x), "=r"(r.v[i].y), "=r"(r.v[i].z), "=r"(r.v[i].w) : "r"(from + 512 * i) : "memory");
        float factor;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(factor) : "r"(slot + 2048 + lane * 4) : "memory");
        taken = taken == (kSlots - 1) * kSlotBytes ? 0 : taken + kSlotBytes;
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

__device__ __forceinline__ float matrix_scale(const ExpertWeight &w, int expert) { return __ldg(reinterpret_cast<const float *>(w.data + expert * w.stride + w.scale_at)); }

__device__ __forceinline__ void load8_coherent(const float *p, float (&v)[8]) {
    const float4 a = __ldcg(reinterpret_cast<const float4 *>(p)), b = __ldcg(reinterpret_cast<const float4 *>(p) + 1);
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}

// A thread's part of up to kMostRow bf16 values that other blocks or kernels wrote: all asked for at once, staged when they are here.
constexpr int kRowParts = 4, kMostRow = kRowParts * kExpertThreads * 8;
struct RowPart {
    uint4 v[kRowParts];

    __device__ __forceinline__ void load(const bf16 *x, int n) {
#pragma unroll
        for (int i = 0; i < kRowParts; ++i)
            if (const int k = (i * kExpertThreads + static_cast<int>(threadIdx.x)) * 8; k < n) v[i] = __ldcg(reinterpret_cast<const uint4 *>(x + k));
    }
    template <int kFormat>
    __device__ __forceinline__ void stage(uint8_t *xs, int n) const {
#pragma unroll
        for (int i = 0; i < kRowParts; ++i)
            if (const int k = (i * kExpertThreads + static_cast<int>(threadIdx.x)) * 8; k < n) {
                const uint4 p = v[i];
                const float x[8] = {low_f32(p.x), high_f32(p.x), low_f32(p.y), high_f32(p.y), low_f32(p.z), high_f32(p.z), low_f32(p.w), high_f32(p.w)};
                stage8<kFormat>(xs, k, x);
            }
    }
};

constexpr int kNormParts = 4, kMostNormed = kNormParts * kExpertThreads * 8;

// A thread's part of a row and of its norm's weight.
struct NormedPart {
    float v[kNormParts][8], w[kNormParts][8];

    // m: a multiple of 8, at most kMostNormed.
    __device__ __forceinline__ void load(const float *x, const float *weight, int m) {
#pragma unroll
        for (int i = 0; i < kNormParts; ++i)
            if (const int k = (i * kExpertThreads + static_cast<int>(threadIdx.x)) * 8; k < m) {
                load8_coherent(x + k, v[i]);
                load8(weight, k, PK_F32, w[i]);
            }
    }
    // The row's rms norm times the weight, staged for BF16 and for kFormat (the same place for BF16 itself); the first block also writes it to `normed`. sums: [kBlockWarps].
    template <int kFormat>
    __device__ __forceinline__ void stage(float eps, int m, uint8_t *plain, uint8_t *own, bf16 *normed, float *sums) {
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < kNormParts; ++i)
            if ((i * kExpertThreads + static_cast<int>(threadIdx.x)) * 8 < m) {
#pragma unroll
                for (int e = 0; e < 8; ++e) square = fmaf(v[i][e], v[i][e], square);
            }
        square = warp_sum(square);
        if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = square;
        __syncthreads();
        square = 0.0f;
#pragma unroll
        for (int i = 0; i < kBlockWarps; ++i) square += sums[i];
        const float factor = rsqrtf(square / static_cast<float>(m) + eps);
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
};

}  // namespace pk
