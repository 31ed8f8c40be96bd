// Tiled matmul on Hopper for up to 512 rows (FP8: to 256) where gemm_even.cu has no form: y[rows, N] = x[rows, K] W^T, at the speed of reading W where rows are few.
//
// As gemm_wgmma.cu (one producer thread, two consumer warpgroups, tensor copies, wgmma), but what few tiles there are is cut
// along K among the blocks of a cluster: each multiplies its run of K, then the blocks lay their sums into each other's
// shared memory and every one adds and stores a share of the rows. No sums go through L2, nobody polls. A warpgroup has 64 rows and all
// columns (kM 64: all rows and half of the columns). FP8: what 128 of K add up to is added with its
// scales. Weights are asked for before the kernels ahead are done, unless the launch may be idle. Assumes swizzled 128-byte
// boxes (K padded to whole boxes). With an activation the first half of a tile is gate, the second up.
#include <algorithm>
#include <type_traits>

#include "../../include/cluster.cuh"
#include "../../include/cluster_launch.h"
#include "../../include/even_plan.h"
#include "../../include/gemm_boxes.cuh"
#include "../../include/gemm_store.cuh"
#include "../../include/once.cuh"
#include "../../include/parted.h"
#include "../../include/ring_turn.cuh"
#include "../../include/wgmma.cuh"
#include "../../include/wgmma_skinny.cuh"

namespace pk {
namespace {

constexpr int kThreads = 384, kMostParts = 8;  // parts that K is cut into: blocks of a cluster that every device takes

template <bool kIsFp8, int kM, int kWidth>
struct ClusterShape {
    static constexpr int kBoxK = kIsFp8 ? 128 : 64, kStageBytes = (kM + kWidth) * 128, kScaleBytes = kIsFp8 ? kM * 4 : 0, kOutBytes = 8 * kStoreFloats * 4;
    static constexpr int kFit = (232448 - 2048 - kOutBytes) / (kStageBytes + kScaleBytes), kRing = kFit > 8 ? 8 : kFit;
    static constexpr int kBytes = 1024 + kRing * (kStageBytes + kScaleBytes) + kOutBytes;
    // Columns of a warpgroup, and of one product.
    static constexpr int kColumns = kM == 64 ? kWidth / 2 : kWidth, kAtom = kM == 64 ? 64 : kIsFp8 ? 128 : kWidth, kAtoms = kColumns / kAtom;
    static_assert(kRing * kStageBytes >= (kM * kWidth + 8 * 1024) * 4);  // sums of all blocks, and of a piece that not all have
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ void store_at(uint32_t at, float a, float b, float c, float d) { asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory"); }
__device__ __forceinline__ float shared_float(uint32_t at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ void cluster_meets() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// d[64, 64] (+)= a[64, 32] b[64, 32]^T, e4m3, both in shared memory.
__device__ __forceinline__ void wgmma_e4m3_n64(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate));
}
template <int kN>
__device__ __forceinline__ void multiply_bf16(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (kN == 256) wgmma_bf16_n256(d, a, b, accumulate);
    else Wgmma<kN>::shared(d, a, b, accumulate);
}
template <int kN>
__device__ __forceinline__ void multiply_e4m3(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (kN == 128) wgmma_e4m3_n128(d, a, b, accumulate);
    else wgmma_e4m3_n64(d, a, b, accumulate);
}
#endif

template <bool kIsFp8, int kM, int kWidth>
__global__ void __launch_bounds__(kThreads, 1) gemm_cluster_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = ClusterShape<kIsFp8, kM, kWidth>;
    constexpr int kRing = S::kRing, kBytes = S::kStageBytes, kBoxK = S::kBoxK, kColumns = S::kColumns, kAtom = S::kAtom, kAtoms = S::kAtoms;
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t full[kRing], empty[kRing];
    __shared__ volatile int true_rows;
    uint8_t *ring = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    float *scale_ring = reinterpret_cast<float *>(ring + kRing * kBytes);
    float *out_tile = scale_ring + kRing * S::kScaleBytes / 4;
    const bool gated = a.act != PK_ACT_NONE && a.n_w == 2;
    const int n_parts = cluster_blocks(), rank = cluster_rank(), n_steps = (a.k + kBoxK - 1) / kBoxK;
    const int k0 = n_steps * rank / n_parts, last_k = n_steps * (rank + 1) / n_parts;
    const int m_tiles = (a.most_rows + kM - 1) / kM, n_all = m_tiles * a.n_tiles, first = blockIdx.x / n_parts, stride = gridDim.x / n_parts;
    const bool may_be_idle = a.min_rows > 0, is_ahead = !may_be_idle && !a.are_unpacked;
    if (threadIdx.x == 0) {
        init_ring(full, empty, 2);
    }
    if (may_be_idle) {
        wait_dependence();
        if (rows_of(a.info, a.rows_symbol) < a.min_rows) return;
    }
    __syncthreads();
    release_dependents();
    auto tile_of = [&](int index) { return gemm_tile<kM, kWidth, 16>(a, index, m_tiles, gated); };
    const int group = threadIdx.x >> 7;
    RingTurn<kRing> in_ring;
    if (group == 0) {
        fewer_registers<kIsFp8 ? 40 : 56>();
        if (threadIdx.x != 0) return;
        const uint64_t policy = m_tiles == 1 ? kReadOnce : kReadOften;
        auto copy_weights = [&](const GemmTile &t, int k, int stage) {
            barrier_expect(full + stage, kBytes + S::kScaleBytes);
            const CUtensorMap *map = maps.w + t.weight, *second = gated ? maps.w + 1 : map;
            uint8_t *to = ring + stage * kBytes + kM * 128;
            copy_box_once(shared_address(to), map, k * kBoxK, t.n0, full + stage, policy);
            copy_box_once(shared_address(to) + kWidth / 2 * 128, second, k * kBoxK, gated ? t.n0 : t.n0 + kWidth / 2, full + stage, policy);
        };
        int n_ahead = 0;
        if (is_ahead && first < n_all) {
            n_ahead = min(kRing, last_k - k0);
            const GemmTile t = tile_of(first);
            for (int i = 0; i < n_ahead; ++i) copy_weights(t, k0 + i, i);
        }
        wait_dependence();
        for (int index = first; index < n_all; index += stride) {
            const GemmTile t = tile_of(index);
            for (int k = k0; k < last_k; ++k) {
                if (--n_ahead < 0) {
                    barrier_wait(empty + in_ring.stage, in_ring.phase ^ 1);
                    copy_weights(t, k, in_ring.stage);
                }
                if constexpr (kIsFp8) copy_bytes(shared_address(scale_ring + in_ring.stage * kM), a.x_scale + k * a.x_scale_stride + t.m0, S::kScaleBytes, full + in_ring.stage);
                copy_box(ring + in_ring.stage * kBytes, &maps.x, k * kBoxK, t.m0, full + in_ring.stage);
                in_ring.advance();
            }
        }
        return;
    }
    more_registers<kIsFp8 ? 232 : 224>();
    int n_rows = 0;
    auto begin = [&] {
        wait_dependence();
        if (threadIdx.x == 128) true_rows = rows_of(a.info, a.rows_symbol);
        consumers_sync();
        n_rows = true_rows;
    };
    auto release = [&](int used) {
        if ((threadIdx.x & 127) == 0) barrier_arrive(empty + used);
    };
    const int wg = group - 1, lane = threadIdx.x & 31, warp8 = (threadIdx.x >> 5) - 4;
    const uint32_t w_first = matrix_descriptor_low(shared_address(ring) + kM * 128), x_first = matrix_descriptor_low(shared_address(ring) + (kM == 64 ? 0 : wg * 64 * 128));
    // The first row of W in a box that product i of this warpgroup multiplies.
    auto row_of_atom = [&](int i) { return kM == 128 ? i * kAtom : gated ? i * 128 + wg * 64 : wg * kColumns + i * 64; };
    constexpr uint64_t kHigh = uint64_t{0x40000040} << 32;
    // Rehearsed while the kernels ahead are not done: a tile of no products and no rows, so that the code of its end, which would come from memory behind
    // the weights, is there.
    bool rehearses = is_ahead;
    if (!rehearses) begin();
#pragma unroll 1
    for (int index = first; index < n_all;) {
        const bool is_real = !rehearses;
        const int k1 = is_real ? last_k : k0;
        auto go_on = [&] {
            if (is_real) index += stride;
            else begin();
            rehearses = false;
        };
        const GemmTile t = tile_of(index);
        float acc[kAtoms][kAtom / 2];
#pragma unroll
        for (int i = 0; i < kAtoms; ++i)
#pragma unroll
            for (int j = 0; j < kAtom / 2; ++j) acc[i][j] = 0.0f;
        if constexpr (kIsFp8) {
            // Of 64 columns each: where their scales are. A lane keeps those of stage 32 i + lane, and the next ones.
            constexpr int kScales = kColumns / 64;
            const float *scales_at[kScales];
            float w_now[kScales] = {}, w_next[kScales];
            auto scales_of = [&](const float *s, int k) { return s == nullptr ? 1.0f : k + lane < n_steps ? __ldg(s + k + lane) : 0.0f; };
#pragma unroll
            for (int q = 0; q < kScales; ++q) {
                const bool is_up = gated && (kM == 64 ? q == 1 : 2 * q >= kScales && kScales > 1);
                const GemmWeight &w = a.w[is_up ? 1 : t.weight];
                const int column = kM == 64 ? t.n0 + (gated ? 64 * wg : wg * kColumns + 64 * q) : t.n0 + 64 * (is_up ? q - kScales / 2 : q);
                scales_at[q] = w.block_scale ? w.block_scale + (min(column, w.rows - 1) >> 7) * w.block_stride : nullptr;
                w_next[q] = scales_of(scales_at[q], k0 & ~31);
            }
            const uint32_t x_scales = shared_address(scale_ring) + 4 * ((kM == 64 ? 0 : wg * 64) + (warp8 & 3) * 16 + (lane >> 2));
            // A product under way: its sums, and the scales that they will be added with.
            struct Part {
                float sum[kAtom / 2];
            };
            float ws[2][kScales], xs[2][2];
            // Waits for stage k, reads its scales as number `turn`, and says where its operands are.
            auto await = [&](int k, int turn, uint32_t &x_low, uint32_t &w_low) {
                if (k == k0 || (k & 31) == 0) {
#pragma unroll
                    for (int q = 0; q < kScales; ++q) {
                        w_now[q] = w_next[q];
                        w_next[q] = scales_of(scales_at[q], (k & ~31) + 32);
                    }
                }
#pragma unroll
                for (int q = 0; q < kScales; ++q) ws[turn][q] = __shfl_sync(~0u, w_now[q], k & 31);
                barrier_wait(full + in_ring.stage, in_ring.phase);
                x_low = __shfl_sync(~0u, x_first + in_ring.stage * (kBytes / 16), 0);
                w_low = __shfl_sync(~0u, w_first + in_ring.stage * (kBytes / 16), 0);
                xs[turn][0] = shared_float(x_scales + in_ring.stage * kM * 4);
                xs[turn][1] = shared_float(x_scales + in_ring.stage * kM * 4 + 32);
            };
            auto multiply = [&](Part &part, int i, uint32_t x_low, uint32_t w_low) {
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; ++s) multiply_e4m3<kAtom>(part.sum, kHigh | (x_low + 2 * s), kHigh | (w_low + 8 * row_of_atom(i) + 2 * s), s > 0);
                wgmma_commit();
            };
            auto hold = [&](Part &part) {
#pragma unroll
                for (int j = 0; j < kAtom / 2; ++j) asm volatile("" : "+f"(part.sum[j])::"memory");
            };
            auto add = [&](const Part &part, auto i, int turn) {
#pragma unroll
                for (int j = 0; j < kAtom / 8; ++j) {
                    float *sum = acc[decltype(i)::value] + 4 * j;
                    const float w = ws[turn][(decltype(i)::value * kAtom + 8 * j) / 64], f0 = xs[turn][0] * w, f1 = xs[turn][1] * w;
                    sum[0] = fmaf(f0, part.sum[4 * j], sum[0]);
                    sum[1] = fmaf(f0, part.sum[4 * j + 1], sum[1]);
                    sum[2] = fmaf(f1, part.sum[4 * j + 2], sum[2]);
                    sum[3] = fmaf(f1, part.sum[4 * j + 3], sum[3]);
                }
            };
            constexpr std::integral_constant<int, 0> kFirst{};
            constexpr std::integral_constant<int, kAtoms - 1> kLast{};
            uint32_t x_low, w_low;
            if constexpr (kAtoms == 1) {
                // Two stages at a time: one is added while the other multiplies.
                int k = k0;
                for (; k + 1 < k1; k += 2) {
                    Part one, two;
                    await(k, 0, x_low, w_low);
                    const int used = in_ring.stage;
                    multiply(one, 0, x_low, w_low);
                    in_ring.advance();
                    await(k + 1, 1, x_low, w_low);
                    multiply(two, 0, x_low, w_low);
                    wgmma_wait<1>();
                    hold(one);
                    release(used);
                    add(one, kFirst, 0);
                    wgmma_wait<0>();
                    hold(two);
                    release(in_ring.stage);
                    add(two, kFirst, 1);
                    in_ring.advance();
                }
                if (k < k1) {
                    Part one;
                    await(k, 0, x_low, w_low);
                    multiply(one, 0, x_low, w_low);
                    wgmma_wait<0>();
                    hold(one);
                    release(in_ring.stage);
                    add(one, kFirst, 0);
                    in_ring.advance();
                }
            } else {
                for (int k = k0; k < k1; ++k) {
                    await(k, 0, x_low, w_low);
                    Part one;
                    multiply(one, 0, x_low, w_low);
                    if constexpr (kM == 64) {
                        Part two;
                        multiply(two, 1, x_low, w_low);
                        wgmma_wait<1>();
                        hold(one);
                        add(one, kFirst, 0);
                        wgmma_wait<0>();
                        hold(two);
                        release(in_ring.stage);
                        add(two, kLast, 0);
                    } else {
                        wgmma_wait<0>();
                        hold(one);
                        add(one, kFirst, 0);
                        multiply(one, 1, x_low, w_low);
                        wgmma_wait<0>();
                        hold(one);
                        release(in_ring.stage);
                        add(one, kLast, 0);
                    }
                    in_ring.advance();
                }
            }
        } else {
            int previous = -1;
            for (int k = k0; k < k1; ++k) {
                barrier_wait(full + in_ring.stage, in_ring.phase);
                const uint32_t x_low = __shfl_sync(~0u, x_first + in_ring.stage * (kBytes / 16), 0), w_low = __shfl_sync(~0u, w_first + in_ring.stage * (kBytes / 16), 0);
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; ++s)
#pragma unroll
                    for (int i = 0; i < kAtoms; ++i) multiply_bf16<kAtom>(acc[i], kHigh | (x_low + 2 * s), kHigh | (w_low + 8 * row_of_atom(i) + 2 * s), k > k0 || s > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (previous >= 0) release(previous);
                previous = in_ring.stage;
                in_ring.advance();
            }
            wgmma_wait<0>();
            if (is_real) release(previous);
        }
        struct Flat {
            const float (&v)[kAtoms][kAtom / 2];
            __device__ __forceinline__ float operator[](int i) const { return v[i / (kAtom / 2)][i % (kAtom / 2)]; }
        };
        const Flat sums = {acc};
        // Of source warp w: its first row and column.
        auto row_of_warp = [&](int w) { return t.m0 + 16 * (kM == 64 ? w & 3 : w); };
        auto column_of_warp = [&](int w) { return kM == 64 ? t.n0 + (w >> 2) * (gated ? kColumns / 2 : kColumns) : t.n0; };
        if (n_parts == 1) {
            store_sums<kColumns>(a, t.weight, gated, column_of_warp(warp8), row_of_warp(warp8), n_rows, sums, out_tile);
            go_on();
            continue;
        }
        // Pieces of 16 rows and 64 columns (gated: 32 of gate and of up) are dealt out among the blocks; everybody lays down what it has
        // of them, in the ring when all are through with it.
        if (is_real) cluster_meets();
        constexpr int kPieces = kColumns / 64, kPieceBytes = 16 * 64 * 4;
        const uint32_t laid = shared_address(ring);
        if (row_of_warp(warp8) < n_rows) {
            uint32_t to[kPieces];
#pragma unroll
            for (int p = 0; p < kPieces; ++p) {
                const int piece = warp8 * kPieces + p;
                to[p] = address_at(laid + (piece / n_parts * n_parts + rank) * kPieceBytes + lane * 16, piece % n_parts);
            }
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) {
                constexpr int kTwin = kColumns / 16;  // groups of eight columns of gate
                const uint32_t at = gated ? to[j % kTwin / 4] + (j % 4 + j / kTwin * 4) * 512 : to[j / 8] + j % 8 * 512;
                store_at(at, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
            }
        }
        if (is_real) cluster_meets();
#pragma unroll 1
        for (int slot = warp8; slot * n_parts + rank < 8 * kPieces; slot += 8) {
            const int piece = slot * n_parts + rank, from_warp = piece / kPieces, in = piece % kPieces;
            if (is_real && row_of_warp(from_warp) >= n_rows) continue;
            float sum[32] = {};
#pragma unroll 2
            for (int part = 0; part < n_parts; ++part) {
                const float4 *from = reinterpret_cast<const float4 *>(ring + (slot * n_parts + part) * kPieceBytes) + lane;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float4 v = from[j * 32];
                    sum[4 * j] += v.x; sum[4 * j + 1] += v.y; sum[4 * j + 2] += v.z; sum[4 * j + 3] += v.w;
                }
            }
            store_sums<64>(a, t.weight, gated, column_of_warp(from_warp) + in * (gated ? 32 : 64), row_of_warp(from_warp), n_rows, sum, out_tile);
        }
        go_on();
    }
#endif
}

// Clusters of so many blocks that run at once.
template <bool kIsFp8, int kM, int kWidth>
int32_t clusters_of(const Launch &l, int n_blocks, int *n) {
    *n = l.ctx->n_processors;
    return n_blocks == 1 ? PK_OK : most_clusters(l.ctx, "gemm_cluster", reinterpret_cast<const void *>(gemm_cluster_kernel<kIsFp8, kM, kWidth>), n_blocks, kThreads, ClusterShape<kIsFp8, kM, kWidth>::kBytes, n);
}

// The product to be cut: tiles of rows of x, rows of its weights (gated: of one), K.
struct Task {
    int64_t m_tiles, rows[3], n_w, k;
    bool gated;
};

struct Cut {
    int width = 0, n_parts = 0;
    double us = 1e30;
};

// Considers tiles of kWidth. The times were fitted to an 8B's products with 128 to 512 rows on an H200 (LOG.md, M20).
template <bool kIsFp8, int kM, int kWidth>
int32_t consider(const Launch &l, const Task &task, Cut *best) {
    if (kM == 64 && kWidth == 128 && task.gated) return PK_OK;
    constexpr int kBoxK = ClusterShape<kIsFp8, kM, kWidth>::kBoxK;
    constexpr double kW = kWidth * 128.0, kX = kM * 128.0;
    constexpr bool kIsWide = kWidth == 256;
    const int64_t wide = task.gated ? kWidth / 2 : kWidth, n_steps = (task.k + kBoxK - 1) / kBoxK;
    int64_t all = 0;
    for (int i = 0; i < task.n_w; ++i) all += (task.rows[i] + wide - 1) / wide * task.m_tiles;
    for (int parts = 1; parts <= kMostParts && parts <= n_steps; ++parts) {
        int clusters = 0;
        if (int32_t e = clusters_of<kIsFp8, kM, kWidth>(l, parts, &clusters)) return e;
        if (clusters == 0) continue;
        // A step of K: as a block does it, as so many get W from memory, and both operands through the second-level cache.
        auto step = [&](int64_t tiles) {
            const double blocks = static_cast<double>(tiles * parts), own = kIsFp8 ? (kIsWide ? 0.8 : 0.38) : (kIsWide ? 0.58 : 0.32);
            constexpr double kRate = kIsFp8 ? (kIsWide ? 4.1e6 : 3.6e6) : kIsWide ? 3.75e6 : 4.0e6;
            return std::max(kM == 64 ? (kIsFp8 ? 0.79 : 0.6) * own : own, std::max(blocks * kW / task.m_tiles / kRate, blocks * (kW + kX) / 10.5e6));
        };
        const int64_t full = all / clusters, rest = all % clusters, steps = (n_steps + parts - 1) / parts, waves = full + (rest > 0);
        double us = steps * (full * step(clusters) + (rest > 0 ? step(rest) : 0.0));
        // Beginning and end; blocks of their own go through their tiles without a pause.
        us += parts == 1 ? (kIsWide ? 8.0 : 4.0) + 1.5 * static_cast<double>(waves - 1) : (kIsWide ? 10.5 : 5.7) * static_cast<double>(waves);
        // With 64 rows pairs of blocks leave half of the device to a next launch that waits: alone they are as quick as three, in a chain they are not.
        if (!kIsFp8 && kM == 64 && parts == 2) us += 1.5;
        if (us < best->us) *best = {kWidth, parts, us};
    }
    return PK_OK;
}

template <bool kIsFp8, int kM, int kWidth>
int32_t launch_cut(const Launch &l, GemmArguments a, int64_t max_rows, int n_parts) {
    using S = ClusterShape<kIsFp8, kM, kWidth>;
    GemmMaps maps;
    if (int32_t e = gemm_maps<kM, kWidth>(l, &maps, a, max_rows, kIsFp8 ? (a.k + 127) / 128 * 128 : a.k, kIsFp8)) return e;
    a.most_rows = static_cast<int32_t>(max_rows);
    const int64_t all = (max_rows + kM - 1) / kM * a.n_tiles, blocks = n_parts == 1 ? std::min<int64_t>(all, l.ctx->n_processors) : all * n_parts;
    return launch_clusters(l, "gemm_cluster", gemm_cluster_kernel<kIsFp8, kM, kWidth>, blocks, kThreads, S::kBytes, n_parts, maps, a);
}

template <bool kIsFp8, int kM>
int32_t find_cut(const Launch &l, const Task &task, Cut *best) {
    if (int32_t e = consider<kIsFp8, kM, 128>(l, task, best)) return e;
    return consider<kIsFp8, kM, 256>(l, task, best);
}

template <bool kIsFp8, int kM>
int32_t launch_height(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    Task task = {(max_rows + kM - 1) / kM, {}, 0, a.k, a.act != PK_ACT_NONE && a.n_w == 2};
    task.n_w = task.gated ? 1 : a.n_w;
    for (int i = 0; i < task.n_w; ++i) task.rows[i] = a.w[i].rows;
    Cut best;
    if (a.narrowed.x) {
        best = {256, 1, 0.0};
    } else if (int32_t e = find_cut<kIsFp8, kM>(l, task, &best)) {
        return e;
    }
    return best.width == 128 ? launch_cut<kIsFp8, kM, 128>(l, a, max_rows, best.n_parts) : launch_cut<kIsFp8, kM, 256>(l, a, max_rows, best.n_parts);
}

}  // namespace

bool leaves_narrowed(const Launch &l, int64_t max_rows, int64_t n, int64_t k) {
    if (even_leaves_narrowed(l, max_rows, k) || tall_leaves_narrowed(l, max_rows, n, k)) return true;
    if (max_rows > kFp8ClusterRows || max_rows <= 64) return max_rows > 64 && fp8_leaves_narrowed(l, max_rows, n, k);
    Cut best;
    return find_cut<true, 128>(l, {(max_rows + 127) / 128, {n}, 1, k, true}, &best) == PK_OK && best.width == 256 && best.n_parts == 1;
}

int32_t launch_gemm_cluster(const Launch &l, const GemmArguments &a, int64_t max_rows) {
    if (is_even(l, a, max_rows, a.x_scale != nullptr)) return launch_gemm_even(l, a, max_rows);
    if (a.norm.out != nullptr || a.norm.row_squares != nullptr || a.heads.q != nullptr) return fail(PK_UNSUPPORTED, "gemm_cluster: a product of %lld rows is to make norms or heads that only even ones make", static_cast<long long>(max_rows));
    if (max_rows <= 64) return a.x_scale ? launch_height<true, 64>(l, a, max_rows) : launch_height<false, 64>(l, a, max_rows);
    return a.x_scale ? launch_height<true, 128>(l, a, max_rows) : launch_height<false, 128>(l, a, max_rows);
}

}  // namespace pk
