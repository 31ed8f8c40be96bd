// Tiled matmul with FP8 weights on Hopper, for more than 256 rows: y[rows, N] = x[rows, K] W^T, both in e4m3, with TMA, an mbarrier ring and wgmma.
//
// What 128 of K add up to is added with its scales (x: per row and 128 of K; W: per 128 x 128), so that the tensor core's short
// accumulator never sums more than 128 products. Block: one producer thread that copies boxes, two or three consumer warpgroups; persistent
// over tiles, grouped so that concurrent blocks share boxes in L2. A stage is 128 of K; a warpgroup multiplies 64 x 128 at a time, once or
// twice a stage. The warpgroups do not wait for each other: while one adds or stores, the others multiply. Tiles are 128 x 256, 192 x 128 or
// 128 x 128, whichever fills the device best; 128 x 256 where y is left narrowed. With an activation the first half of a tile is gate, the second up. Assumes swizzled 128-byte boxes (K padded to
// whole boxes). Does not handle: fewer rows than min_rows.
#include <algorithm>

#include "../../include/gemm_boxes.cuh"
#include "../../include/gemm_store.cuh"
#include "../../include/once.cuh"
#include "../../include/ring_turn.cuh"
#include "../../include/wgmma.cuh"

namespace pk {
namespace {

// Consumer warpgroups, and the pieces of 64 x 128 that each has side by side.
template <int kGroups_, int kPieces_>
struct Form {
    static constexpr int kGroups = kGroups_, kPieces = kPieces_, kRows = 64 * kGroups, kColumns = 128 * kPieces, kThreads = 128 * (kGroups + 1);
    static constexpr int kGroupM = (2048 + kRows - 1) / kRows;  // tiles of x that go through W together
    static constexpr int kBoxBytes = (kRows + kColumns) * 128, kScaleBytes = kRows * 4, kOutBytes = 4 * kGroups * kStoreFloats * 4;
    static constexpr int kRing = (232448 - 2048 - kOutBytes) / (kBoxBytes + kScaleBytes), kSharedBytes = 1024 + kRing * (kBoxBytes + kScaleBytes) + kOutBytes;
    static constexpr int kRegisters = kGroups == 3 ? 160 : 232, kProducerRegisters = kGroups == 3 ? 32 : 40;
};
using Wide = Form<2, 2>;   // 128 x 256
using Tall = Form<3, 1>;   // 192 x 128
using Small = Form<2, 1>;  // 128 x 128

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ float shared_float(uint32_t at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) gemm_fp8_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kRows = S::kRows, kHalf = S::kColumns / 2, kRing = S::kRing;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t full[kRing], empty[kRing];
    uint8_t *ring = raw + (-shared_address(raw) & 1023);  // not by way of a number: the compiler would take it for any memory
    float *scale_ring = reinterpret_cast<float *>(ring + kRing * S::kBoxBytes);
    float *out_tile = scale_ring + kRing * kRows;
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const int n_steps = (a.k + 127) / 128;
    // What is needed once a tile stays in shared memory: registers are for sums.
    __shared__ volatile int true_rows;
    if (threadIdx.x == 0) init_ring(full, empty, 4 * S::kGroups);  // every warp reads scales of a stage
    wait_dependence();
    if (threadIdx.x == 0) true_rows = rows_of(a.info, a.rows_symbol);
    __syncthreads();
    release_dependents();
    if (true_rows < a.min_rows) return;
    auto tile_of = [&](int index) { return gemm_tile<kRows, S::kColumns, S::kGroupM>(a, index, (true_rows + kRows - 1) / kRows, gated); };
    const int n_tiles = (true_rows + kRows - 1) / kRows * a.n_tiles, group = threadIdx.x >> 7;
    int stage = 0;
    uint32_t phase = 0;
    auto advance = [&] {
        if (++stage == kRing) {
            stage = 0;
            phase ^= 1;
        }
    };
    if (group == 0) {
        fewer_registers<S::kProducerRegisters>();
        if (threadIdx.x != 0) return;
        for (int index = blockIdx.x; index < n_tiles; index += gridDim.x) {
            const GemmTile t = tile_of(index);
            const CUtensorMap *first = maps.w + t.weight, *second = gated ? maps.w + 1 : first;
            const int scale_bytes = 4 * min(kRows, static_cast<int>(a.x_scale_stride) - t.m0);
#pragma unroll 1
            for (int k = 0; k < n_steps; ++k) {
                barrier_wait(empty + stage, phase ^ 1);
                barrier_expect(full + stage, S::kBoxBytes + scale_bytes);
                uint8_t *to = ring + stage * S::kBoxBytes;
                copy_box_once(shared_address(to) + kRows * 128, first, k * 128, t.n0, full + stage);
                copy_box_once(shared_address(to) + (kRows + kHalf) * 128, second, k * 128, gated ? t.n0 : t.n0 + kHalf, full + stage);
                copy_bytes(shared_address(scale_ring + stage * kRows), a.x_scale + k * a.x_scale_stride + t.m0, scale_bytes, full + stage);
                copy_box(to, &maps.x, k * 128, t.m0, full + stage);
                advance();
            }
        }
        return;
    }
    more_registers<S::kRegisters>();
    const int wg = group - 1, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const uint32_t w_first = matrix_descriptor_low(shared_address(ring) + kRows * 128), x_first = matrix_descriptor_low(shared_address(ring) + wg * 64 * 128);
    const uint32_t scales_first = shared_address(scale_ring) + 4 * (wg * 64 + warp * 16 + (lane >> 2));
    for (int index = blockIdx.x; index < n_tiles; index += gridDim.x) {
        const GemmTile t = tile_of(index);
        float acc[64 * S::kPieces], part[64];
#pragma unroll
        for (int i = 0; i < 64 * S::kPieces; ++i) acc[i] = 0.0f;
        const bool two_scales = gated || S::kPieces == 2;
        const GemmWeight &w0 = a.w[t.weight], &w1 = a.w[gated ? 1 : t.weight];
        const int n1 = gated || S::kPieces == 1 ? t.n0 : min(t.n0 + 128, w1.rows - 1);
        const float *s0 = w0.block_scale ? w0.block_scale + (t.n0 >> 7) * w0.block_stride : nullptr;
        const float *s1 = w1.block_scale ? w1.block_scale + (n1 >> 7) * w1.block_stride : nullptr;
        // A lane keeps the weights' scales of stage 32 i + lane, and the next ones; read by shuffles, they are there in time.
        auto scales_of = [&](const float *s, int k) { return s == nullptr ? 1.0f : k + lane < n_steps ? __ldg(s + k + lane) : 0.0f; };
        float w_now[2] = {}, w_next[2] = {scales_of(s0, 0), two_scales ? scales_of(s1, 0) : 0.0f};
        // Descriptors differ in the low word only. The same for all lanes, which the compiler learns from the shuffle.
        uint32_t x_low, w_low;
        auto await_stage = [&] {
            barrier_wait(full + stage, phase);
            x_low = __shfl_sync(~0u, x_first + stage * (S::kBoxBytes / 16), 0);
            w_low = __shfl_sync(~0u, w_first + stage * (S::kBoxBytes / 16), 0);
        };
        await_stage();
        for (int k = 0; k < n_steps; ++k) {
            float x0, x1, ws0, ws1;
#pragma unroll
            for (int piece = 0; piece < S::kPieces; ++piece) {
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i) wgmma_e4m3_n128(part, (uint64_t{0x40000040} << 32) | (x_low + 2 * i), (uint64_t{0x40000040} << 32) | (w_low + 1024 * piece + 2 * i), i > 0);
                wgmma_commit();
                // While they run: the scales of this stage, then the next stage.
                const int used = stage;
                if (piece == 0) {
                    if ((k & 31) == 0) {
                        w_now[0] = w_next[0];
                        w_now[1] = w_next[1];
                        w_next[0] = scales_of(s0, k + 32);
                        if (two_scales) w_next[1] = scales_of(s1, k + 32);
                    }
                    ws0 = __shfl_sync(~0u, w_now[0], k & 31);
                    ws1 = two_scales ? __shfl_sync(~0u, w_now[1], k & 31) : ws0;
                    const uint32_t scales = scales_first + stage * kRows * 4;
                    x0 = shared_float(scales);
                    x1 = shared_float(scales + 32);
                }
                if (piece == S::kPieces - 1) {
                    advance();
                    if (k + 1 < n_steps) await_stage();
                }
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(part[i])::"memory");
                if (piece == S::kPieces - 1) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(empty + used);
                }
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    const float w = (S::kPieces == 1 ? !gated || j < 8 : piece == 0) ? ws0 : ws1, f0 = x0 * w, f1 = x1 * w;
                    float *sum = acc + 64 * piece + 4 * j;
                    sum[0] = fmaf(f0, part[4 * j], sum[0]);
                    sum[1] = fmaf(f0, part[4 * j + 1], sum[1]);
                    sum[2] = fmaf(f1, part[4 * j + 2], sum[2]);
                    sum[3] = fmaf(f1, part[4 * j + 3], sum[3]);
                }
            }
        }
        const int own = fresh_thread() / 32 - 4;
        store_sums<S::kColumns>(a, t.weight, gated, t.n0, t.m0 + 16 * own, true_rows, acc, out_tile);
    }
#endif
}

template <class S>
int32_t launch_form(const Launch &l, GemmArguments a, int64_t max_rows) {
    GemmMaps maps;
    if (int32_t e = gemm_maps<S::kRows, S::kColumns>(l, &maps, a, max_rows, (a.k + 127) / 128 * 128, true)) return e;
    const int64_t all = (max_rows + S::kRows - 1) / S::kRows * a.n_tiles;
    Launch own = l;
    own.overlap = true;  // the blocks set themselves up while x is narrowed
    return launch(own, "gemm_fp8", gemm_fp8_kernel<S>, dim3(static_cast<unsigned>(std::min<int64_t>(all, l.ctx->n_processors))), dim3(S::kThreads), S::kSharedBytes, maps, a);
}

// Clocks of a launch: its waves by what a tile takes for each 128 of K, and beside. columns(n): how many tiles of n columns all weights have.
struct Clocks {
    int64_t wide, tall, small;
};
template <class Columns>
Clocks clocks(const Launch &l, int64_t max_rows, int64_t k, Columns columns) {
    auto of = [&](int rows, int wide, int step, int beside) {
        const int64_t n = (max_rows + rows - 1) / rows * columns(wide), waves = (n + l.ctx->n_processors - 1) / l.ctx->n_processors;
        return waves * ((k + 127) / 128 * step + beside);
    };
    return {of(Wide::kRows, Wide::kColumns, 1130, 2800), of(Tall::kRows, Tall::kColumns, 885, 1900), of(Small::kRows, Small::kColumns, 665, 1400)};
}

}  // namespace

// Narrowing by itself takes less than a tenth of a gated product.
bool fp8_leaves_narrowed(const Launch &l, int64_t max_rows, int64_t n, int64_t k) {
    const Clocks c = clocks(l, max_rows, k, [&](int wide) { return (n + wide / 2 - 1) / (wide / 2); });
    return c.wide <= std::min(c.tall, c.small) * 11 / 10;
}

int32_t launch_gemm_fp8(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    if (a.narrowed.x) return launch_form<Wide>(l, a, max_rows);
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const Clocks c = clocks(l, max_rows, a.k, [&](int wide) {
        const int64_t of = gated ? wide / 2 : wide;
        int64_t n = 0;
        for (int i = 0; i < (gated ? 1 : a.n_w); ++i) n += (a.w[i].rows + of - 1) / of;
        return n;
    });
    if (c.wide <= c.tall && c.wide <= c.small) return launch_form<Wide>(l, a, max_rows);
    return c.tall <= c.small ? launch_form<Tall>(l, a, max_rows) : launch_form<Small>(l, a, max_rows);
}

}  // namespace pk
