// Even matmul of block formats on Hopper: y[rows, N] = x[rows, K] W^T for 33 to 128 rows, every weight decoded once, into registers.
//
// A tile is all rows of x and 128 or 192 of W, its share of K a block's own or cut among a cluster's, as in gemm_even.cuh, whose ends these are. Weights stand on the M side of wgmma: a warp
// decodes units of 16 rows (flat_part.cuh), a warpgroup of four multiplies its 64 while it decodes what comes next. One thread copies units into a ring, ahead of the kernels in front, one x in
// boxes of 64 of K into another. Then sums go through the rings' memory, since ends want rows of x where products have columns. In qkv the last weight may have a second format.
// Does not handle: K that is no multiple of a unit's, steps that may be idle (kEndWhole's may, and it begins when the kernels in front are done).
#pragma once
#include "even_ends.cuh"
#include "even_plan.h"
#include "flat_part.cuh"
#include "once.cuh"
#include "ring_turn.cuh"
#include "wgmma_skinny.cuh"

namespace pk {

template <int kFormat, int kOther, int kM, int kWidth, int kEnd>
struct EvenUnitsShape {
    using U = Unit<kFormat>;
    static_assert(Unit<kOther>::kU == U::kU && kWidth % 64 == 0);
    static constexpr int kUnitBytes = U::kBytes > Unit<kOther>::kBytes ? U::kBytes : Unit<kOther>::kBytes;
    static constexpr int kGroups = kWidth / 64, kTiles = kWidth / 16, kChunks = U::kU / 64, kConsumers = 128 * kGroups, kThreads = 128 + kConsumers;
    static constexpr int kFewer = kGroups == 2 ? 56 : kEnd == kEndGatedCut ? 40 : 32, kMore = kGroups == 2 ? 224 : kEnd == kEndGatedCut ? 152 : 160;  // registers of those who copy, and who multiply
    static constexpr int kXBytes = kM * 128, kWBytes = kTiles * kUnitBytes, kSmallBytes = 512 + 4 * kM * 4 + (kEnd == kEndHeads ? 1792 : 0);
    // x gets what it takes to be under way all the time, weights the rest: they are asked for while nothing else may be.
    static constexpr int kLeft = 232448 - kSmallBytes, kXLeast = kM == 128 ? 6 : 10, kFit = (kLeft - kXLeast * kXBytes) / kWBytes, kWRing = kFit > 8 ? 8 : kFit;
    static constexpr int kXFit = (kLeft - kWRing * kWBytes) / kXBytes, kXRing = kXFit > 16 ? 16 : kXFit, kRings = kXRing * kXBytes + kWRing * kWBytes;
    // Sums of the block, [row][column], and behind them what others of the cluster send. Between rows so much that lanes meet few banks twice.
    static constexpr int kPitch = kWidth + 12, kTurned = (kM * kPitch * 4 + 127) / 128 * 128, kSent = kEnd == kEndGated || kEnd == kEndWhole ? 0 : kM / 16 * 18 * (kWidth * 4 + 64);
    static constexpr int kRingBytes = kRings > kTurned + kSent ? kRings : kTurned + kSent, kBytes = kRingBytes + kSmallBytes;
    static_assert(kRingBytes % 16 == 0 && kWRing >= 2 && kBytes <= 232448 && 16 * (kXRing + kWRing) + 24 <= 512);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Adds n_units units of K of a warp's 16 rows of W, whose first lies at `first` (the next a stage behind it), times all rows of x.
template <int kFormat, class S, int kM>
__device__ __forceinline__ void multiply_units(float (&sums)[kM / 2], uint32_t x_first, uint32_t first, uint64_t *x_full, uint64_t *x_empty, uint64_t *w_full, uint64_t *w_empty, int n_units, RingTurn<S::kXRing> &x, RingTurn<S::kWRing> &w, const Opaque &constants, int lane) {
    constexpr int kChunks = S::kChunks;
    auto release = [&](uint64_t *barrier) {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    };
    OrderedPart<kFormat> part;
    part.prepare(lane);
    // Weights of two steps: what a product under way reads stays as it is until the product is done.
    uint32_t operands[2][2][2][4];
    auto keep = [&](int side) {
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
            for (int i = 0; i < 8; ++i) asm volatile("" ::"r"(operands[side][s][i / 4][i % 4]));
    };
    uint32_t at = first + w.stage * S::kWBytes;
    barrier_wait(w_full + w.stage, w.phase);
    part.load(at, 0);
    part.begin(at);
#pragma unroll 1
    for (int u = 0; u < n_units; ++u) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            auto &now_read = operands[c & 1];
            part.scale(c, constants);
#pragma unroll
            for (int s = 0; s < 2; ++s) part.operands(2 * c + s, constants, now_read[s][0], now_read[s][1]);
            if (c + 1 < kChunks) part.load(at, c + 1);
            else release(w_empty + w.stage);
            barrier_wait(x_full + x.stage, x.phase);
            // The low words of descriptors: only they change. The same for all lanes, as the compiler is told.
            const uint32_t x_low = __shfl_sync(~0u, x_first + x.stage * (S::kXBytes / 16), 0);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    Wgmma<kM>::registers(sums, now_read[s][0][2 * h], now_read[s][1][2 * h], now_read[s][0][2 * h + 1], now_read[s][1][2 * h + 1], (uint64_t{0x40000040} << 32) | (x_low + 4 * s + 2 * h));
            wgmma_commit();
            if (c + 1 == kChunks && u + 1 < n_units) {
                w.advance();
                at = first + w.stage * S::kWBytes;
                barrier_wait(w_full + w.stage, w.phase);
                part.load(at, 0);
                part.begin(at);
            }
            wgmma_wait<1>();
            keep((c & 1) ^ 1);
            // The box before.
            if (c > 0 || u > 0) release(x_empty + (x.stage == 0 ? S::kXRing : x.stage) - 1);
            x.advance();
        }
    }
    w.advance();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kM / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
    keep(0);
    keep(1);
    release(x_empty + (x.stage == 0 ? S::kXRing : x.stage) - 1);
}

#endif

template <int kFormat, int kOther, int kM, int kWidth, int kEnd>
__global__ void __launch_bounds__(EvenUnitsShape<kFormat, kOther, kM, kWidth, kEnd>::kThreads, 1) gemm_even_units_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ GemmArguments a, EvenRows rows, int n_squares, int others) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = EvenUnitsShape<kFormat, kOther, kM, kWidth, kEnd>;
    using U = Unit<kFormat>;
    using D = Deal<kM, kWidth, kEnd>;
    constexpr bool kGated = kEnd == kEndGated || kEnd == kEndGatedCut, kWhole = kEnd == kEndGated || kEnd == kEndWhole;
    constexpr int kWarps = S::kThreads / 32, kEnders = kM / 16;
    extern __shared__ __align__(1024) uint8_t ring[];
    uint64_t *x_full = reinterpret_cast<uint64_t *>(ring + S::kRingBytes), *x_empty = x_full + S::kXRing, *w_full = x_empty + S::kXRing, *w_empty = w_full + S::kWRing;
    uint64_t *are_factored = w_empty + S::kWRing, *received = are_factored + 1, *is_taken = received + 1;
    float *factors = reinterpret_cast<float *>(ring + S::kRingBytes + 512);
    HeadBeside &head_beside = *reinterpret_cast<HeadBeside *>(factors + 4 * kM);
    uint8_t *sent = ring + S::kTurned;
    const int lane = threadIdx.x & 31, warp_of_all = threadIdx.x >> 5;
    const int n_parts = kWhole ? 1 : cluster_blocks(), rank = kWhole ? 0 : cluster_rank(), all_units = a.k / U::kU;
    const int u0 = all_units * rank / n_parts, last_u = all_units * (rank + 1) / n_parts, first = blockIdx.x / n_parts, stride = kWhole ? gridDim.x : a.n_tiles;  // clusters have one tile
    if constexpr (kEnd == kEndWhole) {  // which may not be this step's
        wait_dependence();
        const int n = rows_of(a.info, a.rows_symbol);
        if (n < a.min_rows || n > rows.most) return;
    }
    auto rows_here = [&] { return max(0, min(rows_of(a.info, a.rows_symbol) - rows.first, kM)); };
    if (lane == 0) {
        // Barriers one after the other take a thread as long as a trip to memory.
        for (int i = warp_of_all; i < S::kXRing; i += kWarps) {
            barrier_init(x_full + i, 1);
            barrier_init(x_empty + i, 4 * S::kGroups);
        }
        for (int i = warp_of_all; i < S::kWRing; i += kWarps) {
            barrier_init(w_full + i, 1);
            barrier_init(w_empty + i, 4 * S::kGroups);
        }
        if (warp_of_all == kWarps - 1) {
            barrier_init(are_factored, 3);
            barrier_init(received, 1);
            barrier_init(is_taken, kEnders);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release_dependents();
    auto weight_of = [&](int tile) { return kGated ? 0 : a.n_w > 2 && tile >= a.w[2].first_tile ? 2 : a.n_w > 1 && tile >= a.w[1].first_tile ? 1 : 0; };
    auto row_of = [&](int tile, int weight) { return (tile - a.w[weight].first_tile) * (kGated ? kWidth / 2 : kWidth); };
    auto is_other = [&](int weight) { return kOther != kFormat && (others >> weight & 1); };
    if (threadIdx.x < 128) {
        fewer_registers<S::kFewer>();
        if (warp_of_all == 0) {
            if (lane != 0) return;
            RingTurn<S::kWRing> w;
            int n_turns = 0;
#pragma unroll 1
            for (int tile = first; tile < a.n_tiles; tile += stride, ++n_turns) {
                if (kGated && kWhole && n_turns > 0) barrier_wait(is_taken, (n_turns - 1) & 1);
                const int weight = weight_of(tile), row = row_of(tile, weight), unit_bytes = is_other(weight) ? Unit<kOther>::kBytes : U::kBytes;
                const int apart = all_units * unit_bytes;  // from one 16 rows to the next
                constexpr int kSides = kGated ? 2 : 1, kSide = S::kTiles / kSides;
                const uint8_t *from[kSides];
                int left[kSides];  // 16 rows that there are behind the first
#pragma unroll
                for (int side = 0; side < kSides; ++side) {
                    const GemmWeight &of = a.w[kGated ? side : weight];
                    from[side] = static_cast<const uint8_t *>(of.data) + static_cast<int64_t>(row >> 4) * apart + u0 * unit_bytes;
                    left[side] = ((of.rows + 15) >> 4) - 1 - (row >> 4);
                }
#pragma unroll 1
                for (int u = u0; u < last_u; ++u) {
                    barrier_wait(w_empty + w.stage, w.phase ^ 1);
                    barrier_expect(w_full + w.stage, S::kTiles * unit_bytes);
                    uint32_t to = shared_address(ring) + S::kXRing * S::kXBytes + w.stage * S::kWBytes;
#pragma unroll
                    for (int side = 0; side < kSides; ++side) {
                        const uint8_t *unit = from[side];
#pragma unroll 1
                        for (int i = 0; i < kSide; ++i) {
                            copy_bytes_once(to, unit, unit_bytes, w_full + w.stage);
                            to += unit_bytes;
                            if (i < left[side]) unit += apart;
                        }
                        from[side] += unit_bytes;
                    }
                    w.advance();
                }
            }
            return;
        }
        wait_dependence();
        auto copy_x = [&](int chunk, RingTurn<S::kXRing> &x) {
            barrier_wait(x_empty + x.stage, x.phase ^ 1);
            barrier_expect(x_full + x.stage, a.most_rows * 128);
            copy_box(ring + x.stage * S::kXBytes, &x_map, (u0 * S::kChunks + chunk) * 64, 0, x_full + x.stage);
            x.advance();
        };
        // Boxes that fit, then what the end wants, then the others.
        if (threadIdx.x == 32) {
            RingTurn<S::kXRing> x;
#pragma unroll 1
            for (int i = 0; i < min(S::kXRing, (last_u - u0) * S::kChunks); ++i) copy_x(i, x);
        }
        __syncwarp();
        if constexpr (kEnd == kEndHeads) load_head(a.heads, (a.w[weight_of(first)].first_column + row_of(first, weight_of(first))) >> 7, threadIdx.x - 32, 96, rows_here(), head_beside);
        even_factors<kM>(a.norm, n_squares, warp_of_all - 1, lane, factors + kM, factors);
        if (lane == 0) barrier_arrive(are_factored);
        if (threadIdx.x != 32) return;
        const int n_chunks = (last_u - u0) * S::kChunks;
        int begun = min(S::kXRing, n_chunks), n_turns = 0;
        RingTurn<S::kXRing> x = {begun % S::kXRing, begun == S::kXRing};
#pragma unroll 1
        for (int tile = first; tile < a.n_tiles; tile += stride, ++n_turns) {
            if (kGated && kWhole && n_turns > 0) barrier_wait(is_taken, (n_turns - 1) & 1);
#pragma unroll 1
            for (int i = begun; i < n_chunks; ++i) copy_x(i, x);
            begun = 0;
        }
        return;
    }
    more_registers<S::kMore>();
    wait_dependence();
    const int own = warp_of_all - 4;
    if constexpr (!kWhole)
        if (threadIdx.x == 128) barrier_expect(received, D::received(n_parts, rank, rows_here()));
    const uint32_t nothing = gridDim.y - 1;  // zero, which the compiler does not know
    const Opaque constants = {0x43004300u + nothing, 0xc300c300u + nothing, 0x4b000000u + nothing, 0x00800080u + nothing};
    const uint32_t x_first = matrix_descriptor_low(shared_address(ring)), w_first = shared_address(ring) + S::kXRing * S::kXBytes;
    RingTurn<S::kXRing> x;
    RingTurn<S::kWRing> w;
#pragma unroll 1
    for (int tile = first; tile < a.n_tiles; tile += stride) {
        const int weight = weight_of(tile), row = row_of(tile, weight);
        float products[kM / 2];  // 4 j + 2 h + e: row 8 j + 2 q + e of x, 16 warp + r + 8 h of W
#pragma unroll
        for (int i = 0; i < kM / 2; ++i) products[i] = 0.0f;
        if (is_other(weight)) multiply_units<kOther, S, kM>(products, x_first, w_first + own * Unit<kOther>::kBytes, x_full, x_empty, w_full, w_empty, last_u - u0, x, w, constants, lane);
        else multiply_units<kFormat, S, kM>(products, x_first, w_first + own * U::kBytes, x_full, x_empty, w_full, w_empty, last_u - u0, x, w, constants, lane);
        // Who this is, read again: what follows from it would be kept in registers over the products.
        const int thread = fresh_thread(), lane = thread & 31, warp = (thread >> 5) - 4, r = lane >> 2, q = lane & 3, n_rows = rows_here();
        if constexpr (kEnd == kEndWhole) {
            // A warp's eight neighbouring columns of a row are a sector.
            const GemmWeight &of = a.w[weight];
            const float f = of.scale * a.scale;
            float *y = static_cast<float *>(a.y) + of.first_column;
#pragma unroll
            for (int i = 0; i < kM / 2; ++i) {
                const int n = i / 4 * 8 + 2 * q + (i & 1), column = row + 16 * warp + r + 8 * (i >> 1 & 1);
                if (n < n_rows && column < of.rows) y[n * a.y_stride + column] = products[i] * f;
            }
            continue;
        }
        if constexpr (!kWhole) tell_cluster();
        auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory"); };
        meet();  // nobody reads x any more
        float *turned = reinterpret_cast<float *>(ring);
#pragma unroll
        for (int i = 0; i < kM / 2; ++i) turned[(i / 4 * 8 + 2 * q + (i & 1)) * S::kPitch + 16 * warp + r + 8 * (i >> 1 & 1)] = products[i];
        EndBeside beside;
        if (warp < kEnders) load_beside<D, kEnd>(a, a.w[weight], row, warp, lane, n_parts, rank, n_rows, beside);
        meet();
        if (warp >= kEnders) {
            if constexpr (!kWhole) await_cluster();
            continue;
        }
        float sums[kWidth / 2];
#pragma unroll
        for (int j = 0; j < kWidth / 8; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 v = *reinterpret_cast<const float2 *>(turned + (16 * warp + r + 8 * h) * S::kPitch + 8 * j + 2 * q);
                sums[4 * j + 2 * h] = v.x;
                sums[4 * j + 2 * h + 1] = v.y;
            }
        barrier_wait(are_factored, 0);
        if constexpr (kEnd == kEndGated) {
            // The next tile's copies may come.
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) barrier_arrive(is_taken);
            const int at = 16 * warp + r;
            const float f[2] = {factors[at], factors[at + 8]};
            end_gated<kWidth>(a, row, 16 * warp, lane, n_rows, f, sums);
        } else if constexpr (kEnd == kEndHeads) {
            end_head(a, sent, 0, received, a.w[weight], row, rank, warp, lane, n_rows, true, factors, head_beside, sums);
        } else {
            end_rows<D, false, kWidth, kEnd>(a, sent, [](int) { return 0; }, received, tile, a.w[weight], row, n_parts, rank, warp, lane, n_rows, true, factors, [&](EndBeside &mine) { mine = beside; }, sums);
        }
        if constexpr (!kWhole) return;
    }
#endif
}

}  // namespace pk
