// How a tall matmul multiplies FP8 (gemm_tall.cuh): what a stage's 128 of K add up to is added with its scales, so that the tensor core's short accumulator never sums more.
#pragma once
#include "ring_turn.cuh"
#include "tall_ends.cuh"

namespace pk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Scales of a tile's 128 rows of W, gated ones' of gate and of up: a lane has those of step 32 i + lane, and the next ones; read by shuffles, they are there in time.
template <int kBlocks>
struct BlockScales {
    float now[kBlocks], next[kBlocks];
    // Asks for those of steps k on, of n_steps.
    __device__ __forceinline__ void ask(const GemmArguments &a, int tile, int k, int n_steps) {
        k += threadIdx.x & 31;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const GemmWeight &w = a.w[kBlocks > 1 ? b : weight_of(a, tile * 128)];
            next[b] = w.block_scale == nullptr ? 1.0f : k < n_steps ? __ldg(w.block_scale + (tile - w.first_tile / 128) * w.block_stride + k) : 0.0f;
        }
    }
};

// Adds products of steps k0 to last_k to kSets sets of sums: of two units of x, 128 rows apart, by 128 rows of W, or (kHalves) of one by two times 128 rows of W. x_scales: of a lane's first
// row, in the ring's first stage; release(stage) tells that a warpgroup is through with one.
template <class S, bool kHalves, int kSets, class Release>
__device__ __forceinline__ void multiply_fp8(const GemmArguments &a, int tile, RingTurn<kTallStages> &in_ring, uint64_t (&full)[kTallStages], int k0, int last_k, int n_steps, uint32_t x_first, uint32_t w_first, const float *x_scales,
                                             BlockScales<kHalves ? 2 : 1> &w_scales, float (&acc)[2][64], const Release &release) {
    constexpr uint64_t kHigh = uint64_t{0x40000040} << 32;
    constexpr uint32_t kApart = 128 * 128 / 16;  // of a set's operand and the next one's
    constexpr int kUnits = kHalves ? 1 : kSets, kBlocks = kHalves ? 2 : 1;
    float part[64], x[kUnits][2];
    uint32_t x_low, w_low;
    // A stage's scales are read before its products begin: all warps have theirs when the first is through.
    auto await_stage = [&] {
        barrier_wait(full + in_ring.stage, in_ring.phase);
        x_low = __shfl_sync(~0u, x_first + in_ring.stage * (S::kStageBytes / 16), 0);
        w_low = __shfl_sync(~0u, w_first + in_ring.stage * (S::kStageBytes / 16), 0);
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
#pragma unroll
            for (int h = 0; h < 2; ++h) x[u][h] = x_scales[in_ring.stage * S::kTileRows + u * 128 + 8 * h];
    };
    await_stage();
#pragma unroll 1
    for (int k = k0; k < last_k; ++k) {
        const int used = in_ring.stage, turn = (k - k0) & 31;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_e4m3_n128(part, kHigh | (x_low + (kHalves ? 0 : set * kApart) + 2 * i), kHigh | (w_low + (kHalves ? set * kApart : 0) + 2 * i), i > 0);
            wgmma_commit();
            // While they run: their scales, then the next stage.
            if (set == 0 && turn == 0) {
#pragma unroll
                for (int b = 0; b < kBlocks; ++b) w_scales.now[b] = w_scales.next[b];
                w_scales.ask(a, tile, k + 32, n_steps);
            }
            const float w = __shfl_sync(~0u, w_scales.now[kHalves ? set : 0], turn), low = x[kHalves ? 0 : set][0] * w, high = x[kHalves ? 0 : set][1] * w;
            if (set == kSets - 1) {
                in_ring.advance();
                if (k + 1 < last_k) await_stage();
            }
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(part[i])::"memory");
            if (set == kSets - 1) release(used);
#pragma unroll
            for (int i = 0; i < 64; ++i) acc[set][i] = fmaf(i & 2 ? high : low, part[i], acc[set][i]);
        }
    }
}
#endif

}  // namespace pk
