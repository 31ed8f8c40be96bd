// Tiled matmul on Hopper: y[rows, N] = x[rows, K] W^T with TMA, an mbarrier ring and wgmma, for more than 512 rows.
//
// Block: one producer thread that copies boxes, two consumer warpgroups; persistent over tiles, grouped so that concurrent
// blocks share boxes in L2. BF16: 128 x 256 tiles, 64 of K a stage, 64 rows a warpgroup. FP8: 256 x 128 tiles (128 x 256 where
// y is left narrowed), 128 of K a stage, a warpgroup multiplies 64 x 128 twice; what 128 of K add up to is added with its scales
// (x: per row and 128 of K; W: per 128 x 128), so that the tensor core's short accumulator never sums more than 128 products; the
// warpgroups take turns, so that one multiplies while the other adds. With an activation the first half of a tile is gate, the
// second up. Assumes swizzled 128-byte boxes (K padded to whole boxes). Does not handle: fewer rows than min_rows.
#include <algorithm>

#include "../../include/gemm_boxes.cuh"
#include "../../include/gemm_store.cuh"
#include "../../include/wgmma.cuh"

namespace pk {
namespace {

constexpr int kThreads = 384, kOutBytes = 8 * 16 * kStorePitch * 4;
// Tiles of rows of x by rows of W: BF16 128 x 256; FP8 256 x 128, and 128 x 256 where y is left narrowed.
enum Tiling { kBf16, kTall, kWide };
template <int kTiling> constexpr bool kFp8 = kTiling != kBf16;
template <int kTiling> constexpr int kM = kTiling == kTall ? 256 : 128;
template <int kTiling> constexpr int kGroupM = 2048 / kM<kTiling>;  // tiles of x that go through W together
template <int kTiling> constexpr int kN = kTiling == kTall ? 128 : 256;
constexpr int kRing = 4, kStageBytes = 384 * 128;
template <int kTiling> constexpr int kScaleBytes = kFp8<kTiling> ? kM<kTiling> * 4 : 0;  // of a stage: one per row of x
template <int kTiling> constexpr int kSharedBytes = kRing * (kStageBytes + kScaleBytes<kTiling>) + 1024 + kOutBytes;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ float shared_float(uint32_t at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
#endif

template <int kTiling>
__global__ void __launch_bounds__(kThreads, 1) gemm_wgmma_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr bool kIsFp8 = kFp8<kTiling>;
    constexpr int kTileN = kN<kTiling>, kRows = kM<kTiling>, kBytes = kStageBytes, kBoxK = kIsFp8 ? 128 : 64, kHalf = kTileN / 2;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t full[kRing], empty[kRing];
    uint8_t *ring = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    float *scale_ring = reinterpret_cast<float *>(ring + kRing * kBytes);
    float *out_tile = scale_ring + kRing * kScaleBytes<kTiling> / 4;
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const int n_steps = (a.k + kBoxK - 1) / kBoxK;
    // What is needed once a tile stays in shared memory: registers are for sums.
    __shared__ volatile int true_rows;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRing; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    wait_dependence();
    if (threadIdx.x == 0) true_rows = rows_of(a.info, a.rows_symbol);
    __syncthreads();
    release_dependents();
    if (true_rows < a.min_rows) return;
    auto tile_of = [&](int index) { return gemm_tile<kRows, kTileN, kGroupM<kTiling>>(a, index, (true_rows + kRows - 1) / kRows, gated); };
    const int n_tiles = (true_rows + kRows - 1) / kRows * a.n_tiles;
    const int group = threadIdx.x >> 7;
    int stage = 0;
    uint32_t phase = 0;
    auto advance = [&] {
        if (++stage == kRing) {
            stage = 0;
            phase ^= 1;
        }
    };
    auto release = [&](int used) {
        if ((threadIdx.x & 127) == 0) barrier_arrive(empty + used);
    };
    if (group == 0) {
        fewer_registers<40>();
        if (threadIdx.x == 0) {
            auto copy_weights = [&](const GemmTile &t, int k, int stage) {
                barrier_expect(full + stage, kBytes + kScaleBytes<kTiling>);
                const CUtensorMap *first = maps.w + t.weight, *second = gated ? maps.w + 1 : first;
                uint8_t *to = ring + stage * kBytes;
                copy_box(to + kRows * 128, first, k * kBoxK, t.n0, full + stage);
                copy_box(to + (kRows + kHalf) * 128, second, k * kBoxK, gated ? t.n0 : t.n0 + kHalf, full + stage);
            };
            for (int index = blockIdx.x; index < n_tiles; index += gridDim.x) {
                const GemmTile t = tile_of(index);
                for (int k = 0; k < n_steps; ++k) {
                    barrier_wait(empty + stage, phase ^ 1);
                    copy_weights(t, k, stage);
                    if constexpr (kIsFp8) copy_bytes(shared_address(scale_ring + stage * kRows), a.x_scale + k * a.x_scale_stride + t.m0, kScaleBytes<kTiling>, full + stage);
                    copy_box(ring + stage * kBytes, &maps.x, k * kBoxK, t.m0, full + stage);
                    advance();
                }
            }
        }
    } else {
    more_registers<232>();
    // Turns of the two warpgroups, of FP8.
    auto my_turn = [](int wg) { asm volatile("bar.sync %0, 256;" ::"r"(2 + wg) : "memory"); };
    auto your_turn = [](int wg) { asm volatile("bar.arrive %0, 256;" ::"r"(3 - wg) : "memory"); };
    const int wg = group - 1, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    if (kIsFp8 && wg == 1) your_turn(wg);
    const uint32_t w_first = matrix_descriptor_low(shared_address(ring) + kRows * 128), x_first = matrix_descriptor_low(shared_address(ring) + wg * (kRows / 2) * 128);
    const uint32_t scales_first = shared_address(scale_ring) + 4 * (wg * (kRows / 2) + warp * 16 + (lane >> 2));
    for (int index = blockIdx.x; index < n_tiles; index += gridDim.x) {
        const GemmTile t = tile_of(index);
        float acc[128];  // FP8: two halves of 64 x 128, of rows or of columns
        if constexpr (kIsFp8) {
            float part[64];
#pragma unroll
            for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
            const bool two_scales = gated || kTiling == kWide;
            const GemmWeight &w0 = a.w[t.weight], &w1 = a.w[gated ? 1 : t.weight];
            const int n1 = gated || kTiling == kTall ? t.n0 : min(t.n0 + 128, w1.rows - 1);
            const float *s0 = w0.block_scale ? w0.block_scale + (t.n0 >> 7) * w0.block_stride : nullptr;
            const float *s1 = w1.block_scale ? w1.block_scale + (n1 >> 7) * w1.block_stride : nullptr;
            // A lane keeps the weights' scales of stage 32 i + lane, and the next ones; read by shuffles, they are there in time.
            auto scales_of = [&](const float *s, int k) { return s == nullptr ? 1.0f : k + lane < n_steps ? __ldg(s + k + lane) : 0.0f; };
            float w_now[2] = {}, w_next[2] = {scales_of(s0, 0), two_scales ? scales_of(s1, 0) : 0.0f};
            // Descriptors differ in the low word only.
            uint32_t x_low, w_low;
            auto await_stage = [&] {
                barrier_wait(full + stage, phase);
                x_low = __shfl_sync(~0u, x_first + stage * (kBytes / 16), 0);
                w_low = __shfl_sync(~0u, w_first + stage * (kBytes / 16), 0);
            };
            await_stage();
            for (int k = 0; k < n_steps; ++k) {
                float xs[2][2], ws0, ws1;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t x_half = x_low + (kTiling == kTall ? 512 * half : 0), w_half = w_low + (kTiling == kTall ? 0 : 1024 * half);
                    // One warpgroup's products run while the other adds.
                    my_turn(wg);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 4; ++i) wgmma_e4m3_n128(part, (uint64_t{0x40000040} << 32) | (x_half + 2 * i), (uint64_t{0x40000040} << 32) | (w_half + 2 * i), i > 0);
                    wgmma_commit();
                    your_turn(wg);
                    // While they run: the scales of this stage, then the next stage.
                    const int used = stage;
                    if (half == 0) {
                        if ((k & 31) == 0) {
                            w_now[0] = w_next[0];
                            w_now[1] = w_next[1];
                            w_next[0] = scales_of(s0, k + 32);
                            if (two_scales) w_next[1] = scales_of(s1, k + 32);
                        }
                        ws0 = __shfl_sync(~0u, w_now[0], k & 31);
                        ws1 = two_scales ? __shfl_sync(~0u, w_now[1], k & 31) : ws0;
                        const uint32_t scales = scales_first + stage * kRows * 4;
#pragma unroll
                        for (int i = 0; i < (kTiling == kTall ? 2 : 1); ++i) {
                            xs[i][0] = shared_float(scales + 256 * i);
                            xs[i][1] = shared_float(scales + 256 * i + 32);
                        }
                    } else {
                        advance();
                        if (k + 1 < n_steps) await_stage();
                    }
                    wgmma_wait<0>();
#pragma unroll
                    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(part[i])::"memory");
                    if (half == 1) release(used);
                    const int x_at = kTiling == kTall ? half : 0;
#pragma unroll
                    for (int j = 0; j < 16; ++j) {
                        const float w = (kTiling == kTall ? j < 8 : half == 0) ? ws0 : ws1, f0 = xs[x_at][0] * w, f1 = xs[x_at][1] * w;
                        float *sum = acc + 64 * half + 4 * j;
                        sum[0] = fmaf(f0, part[4 * j], sum[0]);
                        sum[1] = fmaf(f0, part[4 * j + 1], sum[1]);
                        sum[2] = fmaf(f1, part[4 * j + 2], sum[2]);
                        sum[3] = fmaf(f1, part[4 * j + 3], sum[3]);
                    }
                }
            }
        } else {
            int previous = -1;
            for (int k = 0; k < n_steps; ++k) {
                barrier_wait(full + stage, phase);
                // The same for all lanes, which the compiler learns from the shuffle: half the moves to uniform registers.
                const uint32_t x_low = __shfl_sync(~0u, x_first + stage * (kBytes / 16), 0), w_low = __shfl_sync(~0u, w_first + stage * (kBytes / 16), 0);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i) wgmma_bf16_n256(acc, (uint64_t{0x40000040} << 32) | (x_low + 2 * i), (uint64_t{0x40000040} << 32) | (w_low + 2 * i), k > 0 || i > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (previous >= 0) release(previous);
                previous = stage;
                advance();
            }
            wgmma_wait<0>();
            release(previous);
        }
        const int warp8 = fresh_thread() / 32 - 4, m_first = t.m0 + (warp8 >> 2) * (kRows / 2) + (warp8 & 3) * 16;
        if constexpr (kTiling == kTall) {
#pragma unroll
            for (int half = 0; half < 2; ++half) store_sums<128>(a, t.weight, gated, t.n0, m_first + 64 * half, true_rows, Half{acc, 64 * half}, out_tile);
        } else {
            store_sums<256>(a, t.weight, gated, t.n0, m_first, true_rows, acc, out_tile);
        }
    }
    if (kIsFp8 && wg == 0) my_turn(wg);
    }
#endif
}

template <int kTiling>
int32_t launch_tiles(const Launch &l, GemmArguments a, int64_t max_rows, int64_t x_cols) {
    GemmMaps maps;
    if (int32_t e = gemm_maps<kM<kTiling>, kN<kTiling>>(l, &maps, a, max_rows, x_cols, kFp8<kTiling>)) return e;
    const int64_t all = (max_rows + kM<kTiling> - 1) / kM<kTiling> * a.n_tiles;
    Launch own = l;
    own.overlap = l.overlap || kFp8<kTiling>;  // FP8: the blocks set themselves up while x is narrowed
    return launch(own, "gemm_wgmma", gemm_wgmma_kernel<kTiling>, dim3(static_cast<unsigned>(std::min<int64_t>(all, l.ctx->n_processors))), dim3(kThreads), kSharedBytes<kTiling>, maps, a);
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

int32_t launch_gemm_wgmma(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    if (max_rows <= kClusterRows) return launch_gemm_cluster(l, a, max_rows);
    if (a.x_scale == nullptr) return launch_tiles<kBf16>(l, a, max_rows, a.k);
    const int64_t padded = (a.k + 127) / 128 * 128;
    return a.narrowed.x ? launch_tiles<kWide>(l, a, max_rows, padded) : launch_tiles<kTall>(l, a, max_rows, padded);
}

}  // namespace pk
