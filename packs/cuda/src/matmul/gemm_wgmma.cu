// Tiled matmul on Hopper: y[rows, N] = x[rows, K] W^T in BF16 with TMA, an mbarrier ring and wgmma, for more than 1,536 rows, and what tall tiles refuse of more than 512.
//
// Block: one producer thread that copies boxes, two consumer warpgroups; persistent over tiles of 128 x 256, grouped so that concurrent
// blocks share boxes in L2; 64 of K a stage, 64 rows a warpgroup. With an activation the first half of a tile is gate, the second
// up. Assumes swizzled 128-byte boxes (K padded to whole boxes). Does not handle: fewer rows than min_rows; FP8 (gemm_fp8.cu).
#include <algorithm>

#include "../../include/gemm_boxes.cuh"
#include "../../include/gemm_store.cuh"
#include "../../include/ring_turn.cuh"
#include "../../include/wgmma.cuh"

namespace pk {
namespace {

constexpr int kThreads = 384, kOutBytes = 8 * kStoreFloats * 4;
constexpr int kRows = 128, kColumns = 256, kGroupM = 2048 / kRows;  // tiles of x that go through W together
constexpr int kRing = 4, kStageBytes = (kRows + kColumns) * 128, kSharedBytes = kRing * kStageBytes + 1024 + kOutBytes;

__global__ void __launch_bounds__(kThreads, 1) gemm_wgmma_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kHalf = kColumns / 2;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t full[kRing], empty[kRing];
    uint8_t *ring = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    float *out_tile = reinterpret_cast<float *>(ring + kRing * kStageBytes);
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const int n_steps = (a.k + 63) / 64;
    // What is needed once a tile stays in shared memory: registers are for sums.
    __shared__ volatile int true_rows;
    if (threadIdx.x == 0) {
        init_ring(full, empty, 2);
    }
    wait_dependence();
    if (threadIdx.x == 0) true_rows = rows_of(a.info, a.rows_symbol);
    __syncthreads();
    release_dependents();
    if (true_rows < a.min_rows) return;
    auto tile_of = [&](int index) { return gemm_tile<kRows, kColumns, kGroupM>(a, index, (true_rows + kRows - 1) / kRows, gated); };
    const int n_tiles = (true_rows + kRows - 1) / kRows * a.n_tiles;
    const int group = threadIdx.x >> 7;
    RingTurn<kRing> in_ring;
    auto release = [&](int used) {
        if ((threadIdx.x & 127) == 0) barrier_arrive(empty + used);
    };
    if (group == 0) {
        fewer_registers<40>();
        if (threadIdx.x != 0) return;
        for (int index = blockIdx.x; index < n_tiles; index += gridDim.x) {
            const GemmTile t = tile_of(index);
            const CUtensorMap *first = maps.w + t.weight, *second = gated ? maps.w + 1 : first;
            for (int k = 0; k < n_steps; ++k) {
                barrier_wait(empty + in_ring.stage, in_ring.phase ^ 1);
                barrier_expect(full + in_ring.stage, kStageBytes);
                uint8_t *to = ring + in_ring.stage * kStageBytes;
                copy_box(to + kRows * 128, first, k * 64, t.n0, full + in_ring.stage);
                copy_box(to + (kRows + kHalf) * 128, second, k * 64, gated ? t.n0 : t.n0 + kHalf, full + in_ring.stage);
                copy_box(to, &maps.x, k * 64, t.m0, full + in_ring.stage);
                in_ring.advance();
            }
        }
        return;
    }
    more_registers<232>();
    const int wg = group - 1;
    const uint32_t w_first = matrix_descriptor_low(shared_address(ring) + kRows * 128), x_first = matrix_descriptor_low(shared_address(ring) + wg * (kRows / 2) * 128);
    for (int index = blockIdx.x; index < n_tiles; index += gridDim.x) {
        const GemmTile t = tile_of(index);
        float acc[128];
        int previous = -1;
        for (int k = 0; k < n_steps; ++k) {
            barrier_wait(full + in_ring.stage, in_ring.phase);
            // The same for all lanes, which the compiler learns from the shuffle: half the moves to uniform registers.
            const uint32_t x_low = __shfl_sync(~0u, x_first + in_ring.stage * (kStageBytes / 16), 0), w_low = __shfl_sync(~0u, w_first + in_ring.stage * (kStageBytes / 16), 0);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) wgmma_bf16_n256(acc, (uint64_t{0x40000040} << 32) | (x_low + 2 * i), (uint64_t{0x40000040} << 32) | (w_low + 2 * i), k > 0 || i > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (previous >= 0) release(previous);
            previous = in_ring.stage;
            in_ring.advance();
        }
        wgmma_wait<0>();
        release(previous);
        const int warp8 = fresh_thread() / 32 - 4;
        store_sums<kColumns>(a, t.weight, gated, t.n0, t.m0 + (warp8 >> 2) * (kRows / 2) + (warp8 & 3) * 16, true_rows, acc, out_tile);
    }
#endif
}

}  // namespace

bool has_wgmma(const pk_ctx *ctx) {
#if defined(PK_WGMMA)
    return ctx->capability == 90;
#else
    (void)ctx;
    return false;
#endif
}

int32_t launch_gemm_wgmma(const Launch &l, GemmArguments a, int64_t max_rows) {
    if (is_tall(l, a, max_rows)) return launch_gemm_tall(l, a, max_rows);
    if (max_rows <= (a.x_scale ? kFp8ClusterRows : kClusterRows)) return launch_gemm_cluster(l, a, max_rows);
    if (a.x_scale) return launch_gemm_fp8(l, a, max_rows);
    GemmMaps maps;
    if (int32_t e = gemm_maps<kRows, kColumns>(l, &maps, a, max_rows, a.k, false)) return e;
    const int64_t all = (max_rows + kRows - 1) / kRows * a.n_tiles;
    return launch(l, "gemm_wgmma", gemm_wgmma_kernel, dim3(static_cast<unsigned>(std::min<int64_t>(all, l.ctx->n_processors))), dim3(kThreads), kSharedBytes, maps, a);
}

}  // namespace pk
