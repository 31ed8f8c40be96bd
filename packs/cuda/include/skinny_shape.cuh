// The skinny product's launches by format and width: how shared memory is divided, and x put in the order in which a lane holds its weights (src/matmul/skinny.cu).
#pragma once
#include "skinny.cuh"

#include "dealt_tiles.cuh"
#include "device.cuh"
#include "format/rows.cuh"
#include "format/unit.cuh"
#include "once.cuh"
#include "skinny_parts.cuh"
#include "wgmma_skinny.cuh"

namespace pk {
namespace {

constexpr int kSharedBytes = 232448 - 2048, kPitch = 20, kStagingBytes = 16 * kPitch * 4;

template <int kFormat, bool kBlock> struct Stage;
template <int kFormat> struct Stage<kFormat, true> {
    static constexpr int kU = Unit<kFormat>::kU, kTile64 = 4 * Unit<kFormat>::kBytes, kImage = 1;
};
template <int kFormat> struct Stage<kFormat, false> {
    static constexpr int kU = Rows<kFormat>::kU, kTile64 = 8192, kImage = kFormat == PK_BF16 ? 0 : Rows<kFormat>::kIsFp8 ? 2 : 3;
};
template <int kFormat> using StageOf = Stage<kFormat, is_block_format(kFormat)>;

struct Maps {
    CUtensorMap w[3], x;
};

template <int kFormat, int kNT, int kWg, int kT>
struct Shape {
    static constexpr int kM = 64 * kWg * kT, kXBytes = kNT * 128, kWBytes = kWg * kT * StageOf<kFormat>::kTile64, kWPitch = (kWBytes + 1023) / 1024 * 1024;
    static constexpr int kEpilogue = kWg * 4 * kT * kStagingBytes, kLeft = kSharedBytes - kEpilogue;
    static constexpr int kChunks = StageOf<kFormat>::kU / 64;
    // Chunks of x under way; the weights' ring takes what is left.
    static constexpr int kXTurns = StageOf<kFormat>::kImage == 2 ? 4 : 2, kXLeast = kXTurns == 4 || kNT <= 32 ? 8 : kNT >= 128 ? 4 : 6;
    static constexpr int kWFit = (kLeft - kXLeast * kXBytes) / kWPitch, kWStages = kWFit > 12 ? 12 : kWFit;
    static constexpr int kXFit = (kLeft - kWStages * kWPitch) / kXBytes, kXStages = (kXFit > 32 ? 32 : kXFit) / kXTurns * kXTurns;
    static constexpr int kBytes = kXStages * kXBytes + kWStages * kWPitch + kEpilogue + 1024;
    // Stages of weights under way: with more, x and what blocks tell each other would queue behind them.
    static constexpr int kUnderWay = kWStages > 4 ? 4 : kWStages;
    static constexpr int kThreads = kWg * 128 + 128;
    static_assert(kWStages >= 2 && kXStages >= 2 && kBytes + 24 * (kWStages + kXStages) + 64 <= 232448);
};

// Steps of 32 of K that are decoded together: half a unit, less where registers are few.
template <class S, int kNT, int kT>
constexpr int stage_steps() { return kT == 2 && kNT >= 128 ? 1 : kT == 2 && S::kChunks > 2 ? 2 : S::kChunks; }

__device__ __forceinline__ int load_acquire(const int *p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(int *p, int v) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
template <int kThreads>
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// x of 64 of K (FP8: 128) as it was copied, row by row, put in the order in which a lane holds its weights, in place. A warp.
template <int kImage, int kNT>
__device__ __forceinline__ void order_x(uint32_t at, uint32_t next, int lane) {
    constexpr int kRows = kImage == 2 ? 4 : 8;
    const int q = lane & 3, half = kImage == 2 ? (lane >> 2) & 1 : 0;
#pragma unroll
    for (int first = 0; first < kNT; first += 2 * kRows) {
        uint2 v[2][4];
        uint32_t row[2];
        int turn[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int n = first + i * kRows + (kImage == 2 ? lane >> 3 : lane >> 2);
            turn[i] = n & 7;
            row[i] = n * 128;
            if constexpr (kImage == 1) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const uint4 p = shared_load4(at + row[i] + (((2 * q + c) ^ turn[i]) << 4));
                    v[i][2 * c] = make_uint2(p.x, p.y);
                    v[i][2 * c + 1] = make_uint2(p.z, p.w);
                }
            } else {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int byte = kImage == 2 ? 64 * (c & 1) + 32 * half + 8 * q : 32 * c + 8 * q;
                    v[i][c] = shared_load2((kImage == 2 && c >= 2 ? next : at) + row[i] + ((((byte >> 4) ^ turn[i]) << 4) | (byte & 8)));
                }
            }
        }
        if constexpr (kImage != 1) __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (kImage == 2) {
#pragma unroll
                for (int c = 0; c < 4; ++c) v[i][c] = make_uint2(__byte_perm(v[i][c].x, v[i][c].y, 0x5410), __byte_perm(v[i][c].x, v[i][c].y, 0x7632));
            }
            const uint32_t to = (half ? next : at) + row[i];
            shared_store4(to + (((2 * q) ^ turn[i]) << 4), make_uint4(v[i][0].x, v[i][1].x, v[i][2].x, v[i][3].x));
            shared_store4(to + (((2 * q + 1) ^ turn[i]) << 4), make_uint4(v[i][0].y, v[i][1].y, v[i][2].y, v[i][3].y));
        }
    }
}

}  // namespace
}  // namespace pk
