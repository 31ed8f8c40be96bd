// What a warp of the flat matmul does with a stage of weights and x (flat.cuh).
#pragma once
#include "once.cuh"
#include "skinny_parts.cuh"

namespace pk {

// What the halves of a tile of 16 rows are: neighbours, gate and up, or 64 rows apart in a head.
constexpr int kTileWhole = 0, kTileGated = 1, kTileHeads = 2;
constexpr int kFlatWarps = 8, kFlatStages = 32, kFlatThreads = kFlatWarps * 32 + 128;

template <int kFormat, int kNT, int kWM, int kT, int kSteps, int kSplit, int kPair>
struct FlatShape {
    static constexpr bool kIsFp8 = Rows<kFormat>::kIsFp8;
    static constexpr int kWK = kFlatWarps / kWM, kStep = kIsFp8 ? 32 : 16, kStageK = kStep * kWK * kSteps, kElement = kIsFp8 ? 1 : 2;
    static constexpr int kChunks = kStageK * kElement / 128, kTileBytes = 2048 * kChunks, kXBoxes = kStageK / 64, kXBytes = kXBoxes * kNT * 128, kN8 = kNT / 8;
    static constexpr int kReceived = kPair == 2 ? kWM * kT * kN8 * 256 : 0;
    static_assert(kStageK * kElement % 128 == 0 && kStageK % 64 == 0);
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

// One step of a warp's tiles: 16 of K (FP8: 32). at: where a lane finds its row of each tile in a stage, without the swizzle; w, x: the stage; in: the step's place in
// its 128 bytes of W, step: in the stage. Returns what was read, for an arrival to wait for.
template <class S, int kNT, int kT, bool kScalesOfHalves>
__device__ __forceinline__ uint32_t flat_step(float (&acc)[kT][kNT / 8][4], const float (&scales)[2][kT], const uint32_t (&at)[kT], const uint32_t (&half)[kT], uint32_t w, uint32_t x, int step, int lane) {
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
                for (int e = 0; e < 4; ++e) acc[t][n][e] = fmaf(part[n][e], scales[kScalesOfHalves ? e >> 1 : 0][t], acc[t][n][e]);
            used ^= v[t][1].y;
        }
    }
    return used;
}

#endif

}  // namespace pk
