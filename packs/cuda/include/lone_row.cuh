// What kernels for a lone row share: units of weights a few steps ahead in registers, and x as their products want it.
#pragma once
#include "experts_piece.cuh"
#include "once.cuh"

namespace pk {

// Sixteen warps: a unit's product is a chain of some 700 cycles, which others must fill.
constexpr int kLoneThreads = 512, kBlockWarps = kLoneThreads / 32;

// Launches overlap where the kernels were compiled with the wait for the one before.
#ifdef PK_WGMMA
constexpr bool kOverlaps = true;
#else
constexpr bool kOverlaps = false;
#endif

constexpr int kSlots = 2, kSlotBytes = 2048 + 128;
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

// As copy16_async, of weights, which are read once.
__device__ __forceinline__ void copy16_once(uint32_t shared, const void *global) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(kReadOnce) : "memory");
#else
    copy16_async(shared, global, true);
#endif
}

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
            copy16_once(to, upper);
            copy16_once(to + 512, upper + 64);
            copy16_once(to + 1024, lower);
            copy16_once(to + 1536, lower + 64);
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

// A row of x that is multiplied with FP8 is f16 over a power of two, which brings its largest value to between 2^14 and 2^15: the conversion unit makes f16 of two codes at once.
struct RowScale {
    float factor = 1.0f, inverse = 1.0f;

    RowScale() = default;
    __device__ __forceinline__ explicit RowScale(float largest) {
        const uint32_t exponent = max(__float_as_uint(largest) >> 23 & 255u, 15u);
        inverse = __uint_as_float((268u - exponent) << 23);
        factor = __uint_as_float((exponent - 14u) << 23);
    }
};

__device__ __forceinline__ uint32_t e4m3_pair(uint32_t codes, bool is_high) {
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(is_high ? codes >> 16 : codes & 0xffff), __NV_E4M3);
    return *reinterpret_cast<const uint32_t *>(&h);
}
__device__ __forceinline__ void mma_f16_row(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Adds 16 rows of a unit times one row of x: acc[0] is row lane / 4, acc[1] is eight rows further (every column of the product is the same row).
template <int kFormat>
__device__ __forceinline__ void multiply_row(const RowsRegisters &r, float (&acc)[2], const uint8_t *x_lane, float factor) {
    float raw[2][4] = {};
#pragma unroll
    for (int b = 0; b < Rows<kFormat>::kU / 32; ++b) {
        const uint4 x = *reinterpret_cast<const uint4 *>(x_lane + b * 64);
        if constexpr (Rows<kFormat>::kIsFp8) {
            const uint32_t upper[2] = {row_word(r.v[b / 2], (b & 1) * 2), row_word(r.v[b / 2], (b & 1) * 2 + 1)}, lower[2] = {row_word(r.v[2 + b / 2], (b & 1) * 2), row_word(r.v[2 + b / 2], (b & 1) * 2 + 1)};
            mma_f16_row(raw[0], e4m3_pair(upper[0], false), e4m3_pair(lower[0], false), e4m3_pair(upper[0], true), e4m3_pair(lower[0], true), x.x, x.y);
            mma_f16_row(raw[1], e4m3_pair(upper[1], false), e4m3_pair(lower[1], false), e4m3_pair(upper[1], true), e4m3_pair(lower[1], true), x.z, x.w);
        } else {
            uint32_t upper[4], lower[4];
            rows_codes<kFormat, 0>(r, b, 0, upper);
            rows_codes<kFormat, 0>(r, b, 1, lower);
            mma_bf16(raw[0], upper[0], lower[0], upper[1], lower[1], x.x, x.y);
            mma_bf16(raw[1], upper[2], lower[2], upper[3], lower[3], x.z, x.w);
        }
    }
    acc[0] = fmaf(factor, raw[0][0] + raw[1][0], acc[0]);
    acc[1] = fmaf(factor, raw[0][2] + raw[1][2], acc[1]);
}

// Eight values from k on, a multiple of eight, as the product of a format wants x.
template <int kFormat>
__device__ __forceinline__ void stage8(uint8_t *xs, int k, const float (&v)[8], float inverse) {
    uint4 packed = pack8(v);
    if constexpr (Rows<kFormat>::kIsFp8) {
        uint32_t *w = &packed.x;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __half2 h = __floats2half2_rn(v[2 * i] * inverse, v[2 * i + 1] * inverse);
            w[i] = *reinterpret_cast<const uint32_t *>(&h);
        }
    }
    *reinterpret_cast<uint4 *>(xs + 2 * staged_position<kFormat>(k)) = packed;
}

// The largest over the block of what is not negative. shared: [kBlockWarps].
__device__ __forceinline__ float block_largest(float v, float *shared) {
    const uint32_t most = __reduce_max_sync(~0u, __float_as_uint(v));
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = __uint_as_float(most);
    __syncthreads();
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlockWarps; ++i) all = fmaxf(all, shared[i]);
    return all;
}

__device__ __forceinline__ float matrix_scale(const ExpertWeight &w, int expert) { return __ldg(reinterpret_cast<const float *>(w.data + expert * w.stride + w.scale_at)); }

__device__ __forceinline__ void load8_coherent(const float *p, float (&v)[8]) {
    const float4 a = __ldcg(reinterpret_cast<const float4 *>(p)), b = __ldcg(reinterpret_cast<const float4 *>(p) + 1);
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}

// A thread's part of up to kMostRow bf16 values that other blocks or kernels wrote: all asked for at once, staged when they are here.
constexpr int kRowParts = 2, kMostRow = kRowParts * kLoneThreads * 8;
struct RowPart {
    uint4 v[kRowParts];

    __device__ __forceinline__ void load(const bf16 *x, int n) {
#pragma unroll
        for (int i = 0; i < kRowParts; ++i)
            if (const int k = (i * kLoneThreads + static_cast<int>(threadIdx.x)) * 8; k < n) v[i] = __ldcg(reinterpret_cast<const uint4 *>(x + k));
    }
    // shared: [kBlockWarps]. Returns what the products are to be multiplied with.
    template <int kFormat>
    __device__ __forceinline__ float stage(uint8_t *xs, int n, float *shared) const {
        float x[kRowParts][8], largest = 0.0f;
#pragma unroll
        for (int i = 0; i < kRowParts; ++i)
            if ((i * kLoneThreads + static_cast<int>(threadIdx.x)) * 8 < n) {
                const uint32_t w[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    x[i][2 * e] = low_f32(w[e]);
                    x[i][2 * e + 1] = high_f32(w[e]);
                    largest = fmaxf(largest, fmaxf(fabsf(x[i][2 * e]), fabsf(x[i][2 * e + 1])));
                }
            }
        RowScale scale;
        if constexpr (Rows<kFormat>::kIsFp8) scale = RowScale(block_largest(largest, shared));
#pragma unroll
        for (int i = 0; i < kRowParts; ++i)
            if (const int k = (i * kLoneThreads + static_cast<int>(threadIdx.x)) * 8; k < n) stage8<kFormat>(xs, k, x[i], scale.inverse);
        __syncthreads();
        return scale.factor;
    }
};

constexpr int kNormParts = 2, kMostNormed = kNormParts * kLoneThreads * 8;

// A thread's part of a row and of its norm's weight.
struct NormedPart {
    float v[kNormParts][8], w[kNormParts][8];

    // m: a multiple of 8, at most kMostNormed. The weight comes from memory, the row from a cache: it may be asked for earlier.
    __device__ __forceinline__ void load_weight(const float *weight, int m) {
#pragma unroll
        for (int i = 0; i < kNormParts; ++i)
            if (const int k = (i * kLoneThreads + static_cast<int>(threadIdx.x)) * 8; k < m) load8(weight, k, PK_F32, w[i]);
    }
    __device__ __forceinline__ void load(const float *x, int m) {
#pragma unroll
        for (int i = 0; i < kNormParts; ++i)
            if (const int k = (i * kLoneThreads + static_cast<int>(threadIdx.x)) * 8; k < m) load8_coherent(x + k, v[i]);
    }
    // The row's rms norm times the weight, staged for BF16 and for kFormat (the same place for BF16 itself); the first block also writes it to `normed`. sums: [2 kBlockWarps]. Returns what
    // products of kFormat are to be multiplied with.
    template <int kFormat>
    __device__ __forceinline__ float stage(float eps, int m, uint8_t *plain, uint8_t *own, bf16 *normed, float *sums) {
        float square = 0.0f, largest = 0.0f;
#pragma unroll
        for (int i = 0; i < kNormParts; ++i)
            if ((i * kLoneThreads + static_cast<int>(threadIdx.x)) * 8 < m) {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    square = fmaf(v[i][e], v[i][e], square);
                    v[i][e] *= w[i][e];
                    largest = fmaxf(largest, fabsf(v[i][e]));
                }
            }
        square = warp_sum(square);
        if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = square;
        largest = block_largest(largest, sums + kBlockWarps);
        square = 0.0f;
#pragma unroll
        for (int i = 0; i < kBlockWarps; ++i) square += sums[i];
        const float factor = rsqrtf(square / static_cast<float>(m) + eps);
        const RowScale scale(largest * factor);
#pragma unroll
        for (int i = 0; i < kNormParts; ++i) {
            const int k = (i * kLoneThreads + static_cast<int>(threadIdx.x)) * 8;
            if (k >= m) continue;
#pragma unroll
            for (int e = 0; e < 8; ++e) v[i][e] = __bfloat162float(__float2bfloat16(v[i][e] * factor));
            stage8<PK_BF16>(plain, k, v[i], 1.0f);
            if constexpr (kFormat != PK_BF16) stage8<kFormat>(own, k, v[i], scale.inverse);
            if (blockIdx.x == 0) store8(normed, k, PK_BF16, v[i]);
        }
        __syncthreads();
        return kFormat == PK_BF16 ? 1.0f : scale.factor;
    }
};

}  // namespace pk
