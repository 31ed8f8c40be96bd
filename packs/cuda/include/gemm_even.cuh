// Even matmul on Hopper: y[rows, N] = x[rows, K] W^T in BF16 and FP8 for 33 to 128 rows, at the speed of reading W.
//
// A tile is all rows of x and so many of W that the blocks' shares are even: gated ones and those of very many columns are a block's own, others are cut along K among the
// blocks of a cluster, which send their sums to each other's shared memory and deal the rows. One producer thread copies W ahead of the kernels in front, x (as many rows as
// the launch is for) behind them; a warpgroup multiplies 64 rows of x. FP8: what 128 of K add up to is added with its scales, while the next 128 multiply where registers
// allow it. One way to end a launch is one kernel (kEnd): what is not asked for is no code, which would come from memory behind the weights.
// Does not handle: steps that may be idle (kEndWhole's may where it is for some numbers of rows only; then it begins when the kernels in front are done), weights that the kernel in front leaves, softcaps, biases but in the plain form.
#pragma once
#include "end_logits.cuh"
#include "once.cuh"
#include "ring_turn.cuh"
#include "wgmma_wide.cuh"

namespace pk {

template <bool kIsFp8, int kM, int kWidth, int kEnd>
struct EvenShape {
    static_assert(!kIsFp8 || kWidth == 128 || kWidth == 256);
    static constexpr int kBoxK = kIsFp8 ? 128 : 64, kScaleBytes = kIsFp8 ? kM * 4 : 0;
    // Rows of W of one product, whose sums FP8 has twice: they have one scale.
    static constexpr int kAtom = kIsFp8 ? 128 : kWidth, kAtoms = kWidth / kAtom;
    static constexpr bool kMoves = kM == 128 && (kIsFp8 || kWidth == 256);  // registers to those who multiply
    static constexpr int kFewer = kIsFp8 ? 40 : 56, kMore = kIsFp8 ? 232 : 224;
    static constexpr int kWarps = kM / 16, kThreads = 128 + kM * 2, kStageBytes = (kM + kWidth) * 128, kSmallBytes = 256 + 4 * kM * 4 + (kEnd == kEndHeads ? 1792 : 0);
    static constexpr int kFit = (232448 - kSmallBytes) / (kStageBytes + kScaleBytes), kRing = kFit > 12 ? 12 : kFit, kBytes = kRing * (kStageBytes + kScaleBytes) + kSmallBytes;
    static_assert(kRing * kStageBytes >= kM / 16 * 18 * (kWidth * 4 + 64));  // sums of all blocks, and of turns that not all have
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int kWidth>
__device__ __forceinline__ void multiply_bf16(float (&d)[kWidth / 2], uint64_t x, uint64_t w) {
    if constexpr (kWidth == 256) wgmma_bf16_n256(d, x, w, 1);
    else Wgmma<kWidth>::shared(d, x, w, 1);
}
#endif

__device__ __forceinline__ void fetch_map(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Where blocks of a cluster receive others' sums: stages of the ring that are done with long before the last one, where there are so many; and the step behind which they are.
template <int kRing>
struct Receiving {
    uint32_t first = 0;  // the first such stage, a byte a block
    int told_after = 0;
    __device__ __forceinline__ Receiving(int n_steps, int n_parts, int rank, int n_stages) {
        int begin = 0;
#pragma unroll
        for (int part = 0; part < kMostClusterParts; ++part) {
            if (part >= n_parts) break;
            const int end = over_parts(n_steps * (part + 1), n_parts), last = (end - begin - 1) % kRing;
            const bool is_behind = last + n_stages < kRing;
            if (is_behind) first |= (last + 1) << (8 * part);
            if (part == rank) told_after = max(begin, end - 1 - (is_behind ? kRing - n_stages : last < n_stages ? 0 : last - n_stages + 1));
            begin = end;
        }
    }
    __device__ __forceinline__ int stage_of(int part) const { return first >> (8 * part) & 255; }
};

template <bool kIsFp8, int kM, int kWidth, int kEnd>
__global__ void __launch_bounds__(EvenShape<kIsFp8, kM, kWidth, kEnd>::kThreads, 1) gemm_even_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmArguments a, int n_squares, const __grid_constant__ Picked picked) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = EvenShape<kIsFp8, kM, kWidth, kEnd>;
    constexpr int kRing = S::kRing, kBytes = S::kStageBytes, kBoxK = S::kBoxK;
    constexpr bool kGated = kEnd == kEndGated || kEnd == kEndGatedCut, kWhole = kEnd == kEndGated || kEnd == kEndWhole;
    extern __shared__ __align__(1024) uint8_t ring[];
    uint64_t *full = reinterpret_cast<uint64_t *>(ring + kRing * kBytes), *empty = full + kRing, *are_factored = empty + kRing, *received = are_factored + 1;
    float *factors = reinterpret_cast<float *>(ring + kRing * kBytes + 256);
    HeadBeside &head_beside = *reinterpret_cast<HeadBeside *>(factors + 4 * kM);
    float *scale_ring = reinterpret_cast<float *>(ring + kRing * kBytes + S::kSmallBytes);
    using D = Deal<kM, kWidth, kEnd>;
    const int n_parts = kWhole ? 1 : cluster_blocks(), rank = kWhole ? 0 : cluster_rank(), n_steps = (a.k + kBoxK - 1) / kBoxK;
    const int k0 = over_parts(n_steps * rank, n_parts), last_k = over_parts(n_steps * (rank + 1), n_parts), first = over_parts(blockIdx.x, n_parts), stride = over_parts(gridDim.x, n_parts);
    int n_rows = 0;
    // BF16's end is rehearsed, for no rows, while the kernels ahead still run: its code would come from memory behind the weights. FP8's products take longer than it saves (LOG.md, M45, M67).
    constexpr bool kRehearses = !kIsFp8 && kEnd != kEndWhole;
    bool is_real = !kRehearses;
    if constexpr (kEnd == kEndWhole) {
        if (a.min_rows > 1) {  // which may not be this step's
            wait_dependence();
            n_rows = rows_of(a.info, a.rows_symbol);
            if (n_rows < a.min_rows || n_rows > a.most_rows) return;
        }
    }
    const int lane = threadIdx.x & 31;
    if (lane == 0) {
        const int warp_of_all = threadIdx.x >> 5;
        if (warp_of_all > 0 && warp_of_all <= (kEnd == kEndHeads ? 3 : kGated ? 2 : 1)) fetch_map(maps.w + warp_of_all - 1);
        // Barriers one after the other would take a thread as long as a trip to memory.
        for (int i = warp_of_all; i < kRing; i += S::kThreads / 32) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, kM / 64);
        }
        if (warp_of_all == 0) {
            barrier_init(are_factored, 3);
            barrier_init(received, 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release_dependents();
    auto weight_of = [&](int tile) { return kGated ? 0 : a.n_w > 2 && tile >= a.w[2].first_tile ? 2 : a.n_w > 1 && tile >= a.w[1].first_tile ? 1 : 0; };
    auto row_of = [&](int tile, int weight) { return (tile - a.w[weight].first_tile) * (kGated ? kWidth / 2 : kWidth); };
    RingTurn<kRing> in_ring;
    if (threadIdx.x < 128) {
        if constexpr (S::kMoves) fewer_registers<S::kFewer>();
        if (threadIdx.x >= 32) {
            wait_dependence();
            if constexpr (kEnd == kEndHeads) load_head(a.heads, (a.w[weight_of(first)].first_column + row_of(first, weight_of(first))) >> 7, threadIdx.x - 32, 96, rows_of(a.info, a.rows_symbol), head_beside);
            if constexpr (kEnd == kEndWhole) find_plain<kM>(picked, threadIdx.x - 32, rows_of(a.info, a.rows_symbol), factors);
            else even_factors<kM>(a.norm, n_squares, (threadIdx.x >> 5) - 1, lane, factors + kM, factors);
            if (lane == 0) barrier_arrive(are_factored);
            return;
        }
        if (threadIdx.x != 0) return;
        const int bytes = a.most_rows * 128 + kWidth * 128 + S::kScaleBytes;
        auto copy_weights = [&](int tile, int k, int stage) {
            barrier_expect(full + stage, bytes);
            const int weight = weight_of(tile), row = row_of(tile, weight);
            const uint32_t to = shared_address(ring + stage * kBytes + kM * 128);
            copy_box_once(to, maps.w + weight, k * kBoxK, row, full + stage);
            if constexpr (kGated) copy_box_once(to + kWidth / 2 * 128, maps.w + 1, k * kBoxK, row, full + stage);
        };
        int n_ahead = min(kRing, last_k - k0);
#pragma unroll 1
        for (int i = 0; i < n_ahead; ++i) copy_weights(first, k0 + i, i);
        fetch_map(&maps.x);
        wait_dependence();
#pragma unroll 1
        for (int tile = first; tile < a.n_tiles; tile += stride) {
#pragma unroll 1
            for (int k = k0; k < last_k; ++k) {
                if (--n_ahead < 0) {
                    barrier_wait(empty + in_ring.stage, in_ring.phase ^ 1);
                    copy_weights(tile, k, in_ring.stage);
                }
                if constexpr (kIsFp8) copy_bytes(shared_address(scale_ring + in_ring.stage * kM), a.x_scale + k * a.x_scale_stride, S::kScaleBytes, full + in_ring.stage);
                copy_box(ring + in_ring.stage * kBytes, &maps.x, k * kBoxK, 0, full + in_ring.stage);
                in_ring.advance();
            }
        }
        return;
    }
    if constexpr (S::kMoves) more_registers<S::kMore>();
    const int warp = (threadIdx.x >> 5) - 4;
    auto release = [&](int used) {
        if ((threadIdx.x & 127) == 0) barrier_arrive(empty + used);
    };
    const uint32_t w_first = matrix_descriptor_low(shared_address(ring) + kM * 128), x_first = matrix_descriptor_low(shared_address(ring) + (warp >> 2) * 64 * 128);
    constexpr uint64_t kHigh = uint64_t{0x40000040} << 32;
    auto begin = [&] {
        wait_dependence();
        n_rows = rows_of(a.info, a.rows_symbol);
        if constexpr (!kWhole)
            if (threadIdx.x == 128) barrier_expect(received, D::received(n_parts, rank, n_rows));
    };
    // FP8: scales of a tile's 128 rows of W (gated: of gate's and of up's) and every 128 of K. A lane keeps those of step 32 i + lane, and the next ones.
    int scales[S::kAtoms];  // where they begin
    float scale_now[S::kAtoms] = {}, scale_next[S::kAtoms];
    auto scales_of = [&](const GemmWeight &w, int at, int k) { return w.block_scale == nullptr ? 1.0f : k + lane < n_steps ? __ldg(w.block_scale + at + k + lane) : 0.0f; };
    auto look_up_scales = [&](int tile) {
        if constexpr (kIsFp8) {
            const int weight = weight_of(tile), row = row_of(tile, weight);
#pragma unroll
            for (int q = 0; q < S::kAtoms; ++q) {
                const GemmWeight &w = a.w[kGated ? q : weight];
                scales[q] = (min(row + (kGated ? 0 : 128 * q), w.rows - 1) >> 7) * static_cast<int>(w.block_stride);
                scale_next[q] = scales_of(w, scales[q], k0);
            }
        }
    };
    const Receiving<kRing> receiving(n_steps, n_parts, rank, (D::bytes(n_parts) + kBytes - 1) / kBytes);
    const int told_after = kWhole ? last_k - 1 : receiving.told_after;
    look_up_scales(first);
    if constexpr (!kRehearses) begin();
#pragma unroll 1
    for (int tile = first; tile < a.n_tiles;) {
        const int k1 = is_real ? last_k : k0, weight = weight_of(tile), row = row_of(tile, weight);
        float sums[kWidth / 2];
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) sums[i] = 0.0f;
        const int row_in = 16 * warp + (lane >> 2);
        if constexpr (kIsFp8) {
            constexpr int kAtom = S::kAtom, kAtoms = S::kAtoms;
            const float *x_scales = scale_ring + row_in;
            // A stage that is there: where its operands are, its scales of W and of a lane's two rows of x.
            struct Stage {
                uint32_t x_low, w_low;
                int place;
                float w[kAtoms], x[2];
            };
            auto await = [&](int k) {
                Stage s;
                const int turn = (k - k0) & 31;
                if (turn == 0) {
#pragma unroll
                    for (int q = 0; q < kAtoms; ++q) {
                        scale_now[q] = scale_next[q];
                        scale_next[q] = scales_of(a.w[kGated ? q : weight], scales[q], k + 32);
                    }
                }
#pragma unroll
                for (int q = 0; q < kAtoms; ++q) s.w[q] = __shfl_sync(~0u, scale_now[q], turn);
                s.place = in_ring.stage;
                barrier_wait(full + s.place, in_ring.phase);
                s.x_low = __shfl_sync(~0u, x_first + s.place * (kBytes / 16), 0);
                s.w_low = __shfl_sync(~0u, w_first + s.place * (kBytes / 16), 0);
                s.x[0] = x_scales[s.place * kM];
                s.x[1] = x_scales[s.place * kM + 8];
                in_ring.advance();
                return s;
            };
            auto multiply = [&](float (&part)[kAtom / 2], const Stage &s, int atom) {
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i) WgmmaFp8<kAtom>::shared(part, kHigh | (s.x_low + 2 * i), kHigh | (s.w_low + atom * kAtom * 8 + 2 * i), i > 0);
                wgmma_commit();
            };
            // The compiler may not touch a part before it is complete.
            auto hold = [&](float (&part)[kAtom / 2]) {
#pragma unroll
                for (int j = 0; j < kAtom / 2; ++j) asm volatile("" : "+f"(part[j])::"memory");
            };
            auto add = [&](const float (&part)[kAtom / 2], const Stage &s, int atom) {
                const float low = s.x[0] * s.w[atom], high = s.x[1] * s.w[atom];
#pragma unroll
                for (int j = 0; j < kAtom / 8; ++j) {
                    float *sum = sums + atom * kAtom / 2 + 4 * j;
                    sum[0] = fmaf(part[4 * j], low, sum[0]);
                    sum[1] = fmaf(part[4 * j + 1], low, sum[1]);
                    sum[2] = fmaf(part[4 * j + 2], high, sum[2]);
                    sum[3] = fmaf(part[4 * j + 3], high, sum[3]);
                }
            };
            // A stage's last part is complete.
            auto finish = [&](float (&part)[kAtom / 2], const Stage &s, int k) {
                hold(part);
                release(s.place);
                if (!kWhole && k == told_after) tell_cluster();
                add(part, s, kAtoms - 1);
            };
            if (k0 < k1) {
                float one[kAtom / 2];
                Stage s = await(k0);
                int k = k0;
                if constexpr (kAtoms == 1) {
                    // Two parts by turns: one is added while the other multiplies.
                    float two[kAtom / 2];
                    multiply(one, s, 0);
#pragma unroll 1
                    for (; k + 2 < k1; k += 2) {
                        const Stage t = await(k + 1);
                        multiply(two, t, 0);
                        wgmma_wait<1>();
                        finish(one, s, k);
                        s = await(k + 2);
                        multiply(one, s, 0);
                        wgmma_wait<1>();
                        finish(two, t, k + 1);
                    }
                    if (k + 1 < k1) {
                        const Stage t = await(k + 1);
                        multiply(two, t, 0);
                        wgmma_wait<1>();
                        finish(one, s, k);
                        wgmma_wait<0>();
                        finish(two, t, k + 1);
                    } else {
                        wgmma_wait<0>();
                        finish(one, s, k);
                    }
                } else {
                    // One part at a time; the next stage is looked for while the last of this one multiplies.
#pragma unroll 1
                    for (; k < k1; ++k) {
                        multiply(one, s, 0);
                        wgmma_wait<0>();
                        hold(one);
                        add(one, s, 0);
                        multiply(one, s, 1);
                        Stage next = s;
                        if (k + 1 < k1) next = await(k + 1);
                        wgmma_wait<0>();
                        finish(one, s, k);
                        s = next;
                    }
                }
            }
            if (kWhole && is_real) look_up_scales(min(tile + stride, a.n_tiles - 1));
        } else {
            int previous = -1;
#pragma unroll 1
            for (int k = k0; k < k1; ++k) {
                barrier_wait(full + in_ring.stage, in_ring.phase);
                const uint32_t x_low = __shfl_sync(~0u, x_first + in_ring.stage * (kBytes / 16), 0), w_low = __shfl_sync(~0u, w_first + in_ring.stage * (kBytes / 16), 0);
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; ++s) multiply_bf16<kWidth>(sums, kHigh | (x_low + 2 * s), kHigh | (w_low + 2 * s));
                wgmma_commit();
                wgmma_wait<1>();
                if (previous >= 0) release(previous);
                if (!kWhole && k - 1 == told_after) tell_cluster();
                previous = in_ring.stage;
                in_ring.advance();
            }
            wgmma_wait<0>();
            if (is_real) release(previous);
            if (is_real && !kWhole && told_after == last_k - 1) tell_cluster();
        }
        // Who this is, read again: what follows from it would be kept in registers over the products.
        const int thread = fresh_thread(), in_warp = thread & 31, of_warps = (thread >> 5) - 4, own_rank = kWhole ? 0 : cluster_rank(), all_parts = kWhole ? 1 : cluster_blocks();
        if (is_real) barrier_wait(are_factored, 0);
        if constexpr (kEnd == kEndGated) {
            const int at = 16 * of_warps + (in_warp >> 2);
            const float f[2] = {factors[at], factors[at + 8]};
            end_gated<kWidth>(a, row, 16 * of_warps, in_warp, n_rows, f, sums);
        } else if constexpr (kEnd == kEndWhole) {
            end_whole<kWidth>(a, a.w[weight], picked, tile, row, 16 * of_warps, in_warp, n_rows, factors, sums);
        } else if constexpr (kEnd == kEndHeads) {
            end_head(a, ring + receiving.stage_of(own_rank) * kBytes, kBytes * (receiving.stage_of(own_rank ^ 1) - receiving.stage_of(own_rank)), received, a.w[weight], row, own_rank, of_warps, in_warp, n_rows, is_real, factors, head_beside, sums);
        } else {
            end_rows<D, kIsFp8, kWidth, kEnd>(a, ring + receiving.stage_of(own_rank) * kBytes, [&](int part) { return kBytes * (receiving.stage_of(part) - receiving.stage_of(own_rank)); }, received, tile, a.w[weight], row, all_parts, own_rank, of_warps, in_warp, n_rows, is_real, factors, [&](EndBeside &beside) {
                load_beside<D, kEnd>(a, a.w[weight], row, of_warps, in_warp, all_parts, own_rank, n_rows, beside);
            }, sums);
        }
        if (is_real) {
            if constexpr (!kWhole) break;
            tile += stride;
        } else {
            begin();
            is_real = true;
        }
    }
#endif
}

}  // namespace pk
