// What a warp of the flat matmul does with a stage of weights and x (flat.cuh).
#pragma once
#include "once.cuh"
#include "skinny_parts.cuh"

namespace pk {

// What the halves of a tile of 16 rows are: neighbours, gate and up, or 64 rows apart in a head.
constexpr int kTileWhole = 0, kTileGated = 1, kTileHeads = 2, kTileHalfHeads = 3;  // the last one: heads whose keys are kept in F16
constexpr int kFlatWarps = 8, kFlatStages = 32, kFlatThreads = kFlatWarps * 32 + 128;

template <int kFormat, int kNT, int kWM, int kT, int kSteps, int kSplit, int kPair>
struct FlatShape {
    static constexpr bool kIsFp8 = Rows<kFormat>::kIsFp8;
    static constexpr int kWK = kFlatWarps / kWM, kStep = kIsFp8 ? 32 : 16, kStageK = kStep * kWK * kSteps, kElement = kIsFp8 ? 1 : 2;
    static constexpr int kChunks = kStageK * kElement / 128, kTileBytes = 2048 * kChunks, kXBoxes = kStageK / 64, kXBytes = kXBoxes * kNT * 128, kN8 = kNT / 8;
    static constexpr int kReceived = kPair == 2 ? kWM * kT * kN8 * 256 : 0;
    // Where many tiles share what a warp reads of x, or there is little of it, FP8 is multiplied in f16, to which the conversion unit takes it, and x put in f16, too.
    static constexpr bool kHalfX = kIsFp8 && (kSplit == kTileGated || kNT == 8);
    static constexpr int kFactorBytes = kHalfX ? kStageK / 256 * kNT * 4 : 0, kThreads = kFlatThreads + (kHalfX ? 128 : 0);
    static_assert((!kHalfX || kStageK % 256 == 0) && kStageK * kElement % 128 == 0 && kStageK % 64 == 0);
    static_assert(4 % kSteps == 0);  // a warp's steps lie in the same 128 bytes of W
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void load_matrix2(uint32_t &a, uint32_t &b, uint32_t shared) { asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(shared)); }
// Arrives once the loads that `bits` was made from have been carried out (LOG.md, P9).
__device__ __forceinline__ void arrive_after(uint64_t *barrier, uint32_t bits) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0x7fc12345;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n@!p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(shared_address(barrier)), "r"(bits) : "memory");
}
__device__ __forceinline__ void copy_box3_once(uint32_t to, const CUtensorMap *map, int x, int y, int z, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "l"(kReadOnce)
                 : "memory");
}
// To the other block of a pair, whose barrier counts the bytes.
__device__ __forceinline__ void send_sums(uint32_t to, float4 v, uint64_t *barrier, int rank) {
    asm volatile(
        "{\n.reg .b32 t, b;\nmapa.shared::cluster.u32 t, %0, %6;\nmapa.shared::cluster.u32 b, %5, %6;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [t], {%1,%2,%3,%4}, [b];\n}" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
}

// Four codes as pairs of f16.
__device__ __forceinline__ void halves_of_fp8(uint32_t codes, uint32_t &low, uint32_t &high) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(low), "=r"(high) : "r"(codes));
}
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_f16_first(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};" : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
// One step of a warp's tiles: 16 of K (FP8: 32). at: where a lane finds its row of each tile in a stage, without the swizzle; w, x: the stage; in: the step's place in
// its 128 bytes of W, step: in the stage. Returns what was read, for an arrival to wait for.
template <class S, int kNT, int kT>
__device__ __forceinline__ uint32_t flat_step(float (&acc)[kT][kNT / 8][4], const float (&scales)[kT], const uint32_t (&at)[kT], const uint32_t (&half)[kT], uint32_t w, uint32_t x, int step, int lane) {
    uint32_t used = 0;
    const int in = 2 * (step & 3);
    if constexpr (!S::kIsFp8) {
        const int m = lane >> 3, r = lane & 7;
        uint32_t b[kNT / 8][2];
        const uint32_t xs = x + (step >> 2) * kNT * 128 + r * 128 + (((in + (m & 1)) ^ r) << 4);
        if constexpr (kNT == 8) {
            load_matrix2(b[0][0], b[0][1], xs);
        } else {
#pragma unroll
            for (int n = 0; n < kNT / 16; ++n) {
                uint32_t v[4];
                load_matrix4(v, xs + (16 * n + 8 * (m >> 1)) * 128);
                b[2 * n][0] = v[0]; b[2 * n][1] = v[1]; b[2 * n + 1][0] = v[2]; b[2 * n + 1][1] = v[3];
            }
        }
#pragma unroll
        for (int n = 0; n < kNT / 8; ++n) used ^= b[n][1];
        const uint32_t from = w + (((in + (m >> 1)) ^ r) << 4);
        uint32_t v[kT][4];
#pragma unroll
        for (int t = 0; t < kT; ++t) load_matrix4(v[t], from + at[t]);
#pragma unroll
        for (int t = 0; t < kT; ++t) {
#pragma unroll
            for (int n = 0; n < kNT / 8; ++n) mma_bf16(acc[t][n], v[t][0], v[t][1], v[t][2], v[t][3], b[n][0], b[n][1]);
            used ^= v[t][3];
        }
    } else {
        const int r = lane >> 2, q = lane & 3;
        uint32_t b[kNT / 8][2][2];
#pragma unroll
        for (int n = 0; n < kNT / 8; ++n) {
            const uint4 v = shared_load4(x + (step >> 1) * kNT * 128 + (8 * n + r) * 128 + (((4 * (step & 1) + q) ^ r) << 4));
            b[n][0][0] = __byte_perm(v.x, v.y, 0x5410); b[n][0][1] = __byte_perm(v.x, v.y, 0x7632);
            b[n][1][0] = __byte_perm(v.z, v.w, 0x5410); b[n][1][1] = __byte_perm(v.z, v.w, 0x7632);
            used ^= v.w;
        }
        const uint32_t from = w + (((in + (q >> 1)) ^ r) << 4) + 8 * (q & 1);
        uint2 v[kT][2];
#pragma unroll
        for (int t = 0; t < kT; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) v[t][h] = shared_load2(from + at[t] + h * half[t]);
        const Part<PK_FP8_E4M3, false> codes = {};
#pragma unroll
        for (int t = 0; t < kT; ++t) {
            float part[kNT / 8][4] = {};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint32_t a[4];
                codes.widen(j ? v[t][0].y : v[t][0].x, a[0], a[2]);
                codes.widen(j ? v[t][1].y : v[t][1].x, a[1], a[3]);
#pragma unroll
                for (int n = 0; n < kNT / 8; ++n) mma_bf16(part[n], a[0], a[1], a[2], a[3], b[n][j][0], b[n][j][1]);
            }
#pragma unroll
            for (int n = 0; n < kNT / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[t][n][e] = fmaf(part[n][e], scales[t], acc[t][n][e]);
            used ^= v[t][1].y;
        }
    }
    return used;
}

// One warp's steps of a stage in f16. scale(t, h): of a half of a tile; x_factors: of the rows of x.
template <class S, int kNT, int kT, int kSteps, class Scale>
__device__ __forceinline__ uint32_t flat_steps_f16(float (&acc)[kT][kNT / 8][4], const Scale &scale, const uint32_t (&at)[kT], const uint32_t (&half)[kT], uint32_t w, uint32_t x, uint32_t x_factors, int first_step, int lane) {
    const int r = lane >> 2, q = lane & 3;
    uint4 b[kSteps][kNT / 8];
    float2 factors[kNT / 8];
    uint32_t used = 0;
#pragma unroll
    for (int n = 0; n < kNT / 8; ++n) {
        const uint2 f = shared_load2(x_factors + (8 * n + 2 * q) * 4);
        factors[n] = make_float2(__uint_as_float(f.x), __uint_as_float(f.y));
        used ^= f.y;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            b[k][n] = shared_load4(x + ((first_step + k) >> 1) * kNT * 128 + (8 * n + r) * 128 + (((4 * ((first_step + k) & 1) + q) ^ r) << 4));
            used ^= b[k][n].w;
        }
    }
#pragma unroll
    for (int t = 0; t < kT; ++t) {
        float part[kNT / 8][4];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            const int in = 2 * ((first_step + k) & 3);
            const uint32_t from = w + at[t] + (((in + (q >> 1)) ^ r) << 4) + 8 * (q & 1);
            const uint2 low = shared_load2(from), high = shared_load2(from + half[t]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                uint32_t a[4];
                halves_of_fp8(j ? low.y : low.x, a[0], a[2]);
                halves_of_fp8(j ? high.y : high.x, a[1], a[3]);
#pragma unroll
                for (int n = 0; n < kNT / 8; ++n) {
                    if (k == 0 && j == 0) mma_f16_first(part[n], a, b[k][n].x, b[k][n].y);
                    else mma_f16(part[n], a, j ? b[k][n].z : b[k][n].x, j ? b[k][n].w : b[k][n].y);
                }
            }
            used ^= high.y;
        }
        const float own[2] = {scale(t, 0), scale(t, 1)};
#pragma unroll
        for (int n = 0; n < kNT / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[t][n][e] = fmaf(part[n][e], own[e >> 1] * (e & 1 ? factors[n].y : factors[n].x), acc[t][n][e]);
    }
    return used;
}

// Rows of x of a stage of 256 of K, a quarter of them, in f16 over a power of two that brings a row's largest to 2^14 at least, in place. A warp.
template <int kNT>
__device__ __forceinline__ void halve_x(uint32_t x, uint32_t factors, int quarter, int lane) {
    constexpr int kRows = kNT / 4, kOnce = kRows < 4 ? kRows : 4;
#pragma unroll 1
    for (int first = quarter * kRows; first < (quarter + 1) * kRows; first += kOnce) {
        uint4 v[kOnce];
        uint32_t at[kOnce], exponent[kOnce];
#pragma unroll
        for (int j = 0; j < kOnce; ++j) {
            at[j] = x + (lane >> 3) * kNT * 128 + (first + j) * 128 + (((lane & 7) ^ ((first + j) & 7)) << 4);
            v[j] = shared_load4(at[j]);
            const uint32_t most = __vmaxu2(__vmaxu2(v[j].x & 0x7fff7fffu, v[j].y & 0x7fff7fffu), __vmaxu2(v[j].z & 0x7fff7fffu, v[j].w & 0x7fff7fffu));
            exponent[j] = max(most & 0xffffu, most >> 16) >> 7;
        }
#pragma unroll
        for (int j = 0; j < kOnce; ++j) exponent[j] = max(__reduce_max_sync(~0u, exponent[j]), 20u);
#pragma unroll
        for (int j = 0; j < kOnce; ++j) {
            const float inverse = __uint_as_float((268 - exponent[j]) << 23);
            auto pack = [&](uint32_t pair) {
                const __half2 h = __floats2half2_rn(low_f32(pair) * inverse, high_f32(pair) * inverse);
                return *reinterpret_cast<const uint32_t *>(&h);
            };
            shared_store4(at[j], make_uint4(pack(v[j].x), pack(v[j].y), pack(v[j].z), pack(v[j].w)));
            if (lane == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(factors + (first + j) * 4), "r"((exponent[j] - 14) << 23) : "memory");
        }
    }
}

#endif

}  // namespace pk
