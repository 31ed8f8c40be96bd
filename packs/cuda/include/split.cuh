// FP8 products of 3 to 16 rows on Hopper: x is split into two e4m3 numbers, and W is multiplied straight from shared memory.
//
// A bf16 number has eight bits: e4m3 of its upper four and e4m3 of the others, over a power of two of a row and 256 of K, are all of it (down to 2^-17 of the
// row's largest). So nobody decodes weights: wgmma has them as a, x's upper halves and lower halves as columns of b. A block (or a pair of
// blocks that halve K and send each other sums) takes neighbouring tiles of W and all of their K. One warp copies W into a ring ahead of the kernels in front,
// one x behind them; eight warps split x in place; one or two warpgroups multiply. Does not handle: ends that are not plain (flat_end.cuh), K that is no
// multiple of 128, more than one pass; those are flat.cuh's.
#pragma once
#include "boxes.cuh"
#include "dealt_tiles.cuh"
#include "flat_end.cuh"

namespace pk {

constexpr int kSplitStages = 24, kSplitWarps = 8;

// Of each weight, boxes of what all blocks have and of one tile.
struct SplitMaps {
    CUtensorMap every[3], one[3], x;
};
// As FlatDeal, in one line of the constants' cache. steps: stages of K of a block; ahead: of those, how many ask for weights before the kernels in front are done.
struct alignas(64) SplitDeal {
    int32_t each, more, pass_tiles, base_tiles, n_stages, under_way, steps, chunks_k;
    int32_t first_tile[2], may_be_idle;
    float scale;
    int32_t ahead;
};

template <int kNT, int kGroups, int kM, int kSplit, int kPair, int kC>
struct SplitShape {
    static constexpr bool kGated = kSplit == kTileGated, kHeads = kSplit >= kTileHeads;
    static constexpr int kThreads = (kGroups * 4 + kSplitWarps + 4) * 32, kN8 = kNT / 8, kXBytes = kC * kNT * 256;
    static constexpr int kMostTiles = kGated ? kGroups * 8 : kGroups * kM * 4;  // of eight rows of gate and of up, or of 16 rows
    static constexpr int kFewer = 40, kSplitting = 64, kMore = kGroups == 1 ? 168 : 144;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kN> struct WgmmaE4m3;
template <> struct WgmmaE4m3<16> {
    __device__ __forceinline__ static void shared(float (&d)[8], uint64_t a, uint64_t b, int accumulate) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\nwgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1;\n}\n" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) : "l"(a), "l"(b), "r"(accumulate));
    }
};
template <> struct WgmmaE4m3<32> {
    __device__ __forceinline__ static void shared(float (&d)[16], uint64_t a, uint64_t b, int accumulate) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1;\n}\n"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) : "l"(a), "l"(b), "r"(accumulate));
    }
};
__device__ __forceinline__ void shared_store2(uint32_t at, uint32_t x, uint32_t y) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(x), "r"(y) : "memory"); }
// Four e4m3 of two pairs of bf16.
__device__ __forceinline__ uint32_t narrowed_pairs(uint32_t a, uint32_t b) {
    uint32_t codes;
    asm("{\n.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\nmov.b32 %0, {l, h};\n}" : "=r"(codes) : "f"(low_f32(a)), "f"(high_f32(a)), "f"(low_f32(b)), "f"(high_f32(b)));
    return codes;
}
// kRows rows of x from `first` on, 256 of K, in place: four boxes of kNT rows and 64 bf16 become, for each half of K, kNT rows of upper halves and kNT rows of lower ones. A warp.
template <int kNT, int kRows>
__device__ __forceinline__ void split_rows(uint32_t x, uint32_t powers, int first, int lane) {
    uint4 v[kRows];
    uint32_t exponent[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) v[j] = shared_load4(x + (lane >> 3) * kNT * 128 + (first + j) * 128 + (((lane & 7) ^ ((first + j) & 7)) << 4));
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
        const bf162 most = __hmax2(__hmax2(__habs2(as_bf162(v[j].x)), __habs2(as_bf162(v[j].y))), __hmax2(__habs2(as_bf162(v[j].z)), __habs2(as_bf162(v[j].w))));
        exponent[j] = max(bits(most) & 0xffffu, bits(most) >> 16);
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) exponent[j] = max(__reduce_max_sync(~0u, exponent[j]) >> 7, 7u);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
        // Brings the row's largest to 2^7 at least and below 2^8.
        const uint32_t power = (261 - exponent[j]) * 0x00800080u;
        const bf162 by = as_bf162(power);
        const uint32_t pairs[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
        uint32_t upper[4], lower[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const bf162 s = __hmul2(as_bf162(pairs[p]), by);
            upper[p] = bits(s) & 0xfff0fff0u;
            lower[p] = bits(__hsub2(s, as_bf162(upper[p])));
        }
        const uint32_t at = x + (lane >> 4) * kNT * 256 + (first + j) * 128 + (((lane >> 1 & 7) ^ ((first + j) & 7)) << 4) + 8 * (lane & 1);
        shared_store2(at, narrowed_pairs(upper[0], upper[1]), narrowed_pairs(upper[2], upper[3]));
        shared_store2(at + kNT * 128, narrowed_pairs(lower[0], lower[1]), narrowed_pairs(lower[2], lower[3]));
        if (lane == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(powers + (first + j) * 4), "r"((exponent[j] - 7) << 23) : "memory");
    }
}

#endif

template <int kNT, int kGroups, int kM, int kSplit, int kPair, int kC>
__global__ void __launch_bounds__(SplitShape<kNT, kGroups, kM, kSplit, kPair, kC>::kThreads, 1) split_kernel(const __grid_constant__ SplitDeal deal, const __grid_constant__ SplitMaps maps, const __grid_constant__ SkinnyArguments a, const __grid_constant__ FlatPackets packets) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = SplitShape<kNT, kGroups, kM, kSplit, kPair, kC>;
    constexpr bool kGated = S::kGated, kHeads = S::kHeads;
    constexpr int kN8 = S::kN8, kMultiplying = kGroups * 4, kBlocks = kC / 2;  // of 256 of K in a stage
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t w_full[kSplitStages], x_full[kSplitStages], x_raw[kSplitStages], empty[kSplitStages], are_factored, are_scaled, has_received;
    alignas(16) __shared__ float factors[kNT], half_sums[2][kNT];
    const uint32_t ring = (shared_address(raw) + 1023) & ~1023u;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = kPair == 2 ? blockIdx.x & 1 : 0, me = blockIdx.x / kPair;
    const int w_pitch = deal.pass_tiles * 2048 * kC, n_stages = deal.n_stages, n_steps = deal.steps, first_chunk = rank * n_steps * kC, n_entries = deal.pass_tiles * (kGated ? 2 : 1), n_chunks = n_steps * kC;
    // Behind the rings: a power of two of each row and 256 of K, sums from the other block of a pair, scales of all chunks [chunk][tile; gated: of gate, then of up].
    const uint32_t x_ring = ring + n_stages * w_pitch, powers = x_ring + n_stages * S::kXBytes, received = powers + n_stages * kBlocks * kNT * 4, scales = received + (kPair == 2 ? (deal.pass_tiles * kN8 + 1) / 2 * 512 : 0);
    const int begin = me * deal.each + min(me, deal.more), end = begin + deal.each + (me < deal.more), n_here = end - begin;
    auto weight_of = [&](int tile) { return weight_of_tile<kGated>(deal.first_tile, tile); };
    auto row_of = [&](int tile, int i) { return row_of_tile<kGated, kHeads>(deal.first_tile, tile, i); };
    // Whose lanes copy W: a lane has what all blocks have or one tile more (of gate and of up), or a tile where not all are of one weight, or (heads) a tile.
    bool copies = false;
    int row = 0;
    uint32_t to = ring;
    const CUtensorMap *map = nullptr;
    auto ask = [&](int s, int stage) {
        if (lane == 0) barrier_expect(w_full + stage, n_here * 2048 * kC);
        __syncwarp();
        if (copies) copy_groups_once(to + stage * w_pitch, map, row, first_chunk + s * kC, w_full + stage);
    };
    // Weights do not depend on the kernels before: the ring is filled while those still run, before the block's other warps are there, unless this launch may be idle.
    const int n_early = deal.may_be_idle ? 0 : min(min(deal.under_way, deal.ahead), n_steps);
    if (warp == kMultiplying + kSplitWarps) {
        if (lane < n_stages) barrier_init(w_full + lane, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        __syncwarp();
        const int base = deal.base_tiles;
        if constexpr (kGated) {
            const int side = lane & 1, more = lane >> 1;
            copies = more < (n_here > base ? 2 : 1);
            row = (begin + more * base) * 8;
            to += (side * deal.pass_tiles + more * base) * kC * 1024;
            map = (more ? maps.one : maps.every) + side;
        } else if (!kHeads && weight_of(begin) == weight_of(end - 1)) {
            const int i = weight_of(begin);
            copies = lane < (n_here > base ? 2 : 1);
            row = row_of(begin + lane * base, i);
            to += lane * base * kC * 2048;
            map = (lane ? maps.one : maps.every) + i;
        } else {
            const int tile = begin + min(lane, n_here - 1), i = weight_of(tile);
            copies = lane < n_here;
            row = row_of(tile, i);
            to += lane * kC * 2048;
            map = maps.one + i;
        }
#pragma unroll 1
        for (int s = 0; s < n_early; ++s) ask(s, s);
    } else if (lane == 0) {
#pragma unroll 1
        for (int i = warp; i < n_stages; i += kMultiplying + kSplitWarps) {
            barrier_init(x_full + i, kSplitWarps);
            barrier_init(x_raw + i, 1);
            barrier_init(empty + i, kMultiplying);
        }
        if (warp == 0) {
            barrier_init(&are_factored, 2);
            barrier_init(&are_scaled, kSplitWarps);
            barrier_init(&has_received, 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if constexpr (kPair == 2) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    release_dependents();
    const bool may_be_idle = deal.may_be_idle;
    // Nobody goes before all of a pair have come.
    auto leave = [] {
        if constexpr (kPair == 2) {
            __syncwarp();
            asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        }
    };
    if (warp >= kMultiplying + kSplitWarps) {
        fewer_registers<S::kFewer>();
        const int role = warp - kMultiplying - kSplitWarps;
        if (role == 0) {
            int stage = n_early == n_stages ? 0 : n_early, landing = 0;
            uint32_t phase = n_early == n_stages, landing_phase = 0;
            if (may_be_idle) {
                wait_dependence();
                if (rows_here<kNT>(a) <= 0) return leave();
            }
#pragma unroll 1
            for (int s = n_early; s < n_steps; ++s) {
                if (s == deal.ahead) wait_dependence();
                if (s >= deal.under_way) {
                    barrier_wait(w_full + landing, landing_phase);
                    if (++landing == n_stages) {
                        landing = 0;
                        landing_phase ^= 1;
                    }
                }
                barrier_wait(empty + stage, phase ^ 1);
                ask(s, stage);
                if (++stage == n_stages) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            return leave();
        }
        wait_dependence();
        if (may_be_idle && rows_here<kNT>(a) <= 0) return leave();
        if (role == 1) {
            int stage = 0;
            uint32_t phase = 0;
#pragma unroll 1
            for (int s = 0; s < n_steps; ++s) {
                barrier_wait(empty + stage, phase ^ 1);
                if (lane == 0) {
                    barrier_expect(x_raw + stage, S::kXBytes);
                    copy_columns(x_ring + stage * S::kXBytes, &maps.x, (first_chunk + s * kC) * 2, x_raw + stage);
                }
                __syncwarp();
                if (++stage == n_stages) {
                    stage = 0;
                    phase ^= 1;
                }
            }
            return leave();
        }
        row_factors<kNT>(a.norm, role - 2, lane, half_sums, factors);
        if (lane == 0) barrier_arrive(&are_factored);
        return leave();
    }
    if (warp >= kMultiplying) {
        fewer_registers<S::kSplitting>();
        const int mine = warp - kMultiplying;
        // Scales are weights, too.
        for (int at = mine * 32 + lane; at < n_chunks * n_entries; at += kSplitWarps * 32) {
            const int chunk = min(first_chunk + at / n_entries, deal.chunks_k - 1), entry = at % n_entries;
            const int tile = begin + max(min(kGated ? entry % deal.pass_tiles : entry, n_here - 1), 0), i = kGated ? entry / deal.pass_tiles : weight_of(tile);
            const SkinnyWeight &w = a.w[i];
            const float scale = w.block_scale ? __ldg(w.block_scale + (min(row_of(tile, i), w.rows - 1) >> 7) * w.block_stride + chunk) : 1.0f;
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(scales + at * 4), "f"(scale) : "memory");
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&are_scaled);
        if (may_be_idle) {
            wait_dependence();
            if (rows_here<kNT>(a) <= 0) return leave();
        }
        constexpr int kWarpsOfBlock = kSplitWarps / kBlocks, kRows = kNT / kWarpsOfBlock;
        const int block = mine / kWarpsOfBlock, first = mine % kWarpsOfBlock * kRows;
        int stage = 0;
        uint32_t phase = 0;
#pragma unroll 1
        for (int s = 0; s < n_steps; ++s) {
            barrier_wait(x_raw + stage, phase);
            split_rows<kNT, kRows>(x_ring + stage * S::kXBytes + block * kNT * 512, powers + (stage * kBlocks + block) * kNT * 4, first, lane);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) barrier_arrive(x_full + stage);
            if (++stage == n_stages) {
                stage = 0;
                phase ^= 1;
            }
        }
        return leave();
    }
    more_registers<S::kMore>();
    // Nobody rehearses the end (LOG.md, M31): blocks that start last would begin a microsecond later (M71).
    const int r = lane >> 2, q = lane & 3, group = warp >> 2, in_group = warp & 3;
    if constexpr (kPair == 2) {
        if (threadIdx.x == 0) barrier_expect(&has_received, ((n_here * kN8 + 1 - rank) / 2) * 512);
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }
    // A warp's tiles of 16 rows: of W, or (gated) the same rows of gate and of up.
    auto tile_of = [&](int m) { return kGated ? 8 * group + 2 * in_group : (group * kM + m) * 4 + in_group; };
    auto head_of = [&](int tile) {
        const int i = weight_of(tile);
        return (a.w[i].first_column + row_of(tile, i)) >> 7;
    };
    constexpr int kOwn = kPair == 2 && kN8 == 2 ? 1 : kN8;  // columns of eight that a block ends of a tile, if any
    auto n8_of = [&](int n) { return 8 * (kPair == 2 && kN8 == 2 ? rank : n); };
    auto is_own = [&](int j) { return j < n_here && (kPair == 1 || kN8 == 2 || (j & 1) == rank); };
    int n_rows = 0;
    uint32_t now = 0;
    float acc[kM][kN8][4];
    float old[kM][kOwn][4] = {}, gain[kM][kOwn][2] = {};
    HeadRows rows;
    HeadTurn turned[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.0f;
    wait_dependence();
    n_rows = rows_here<kNT>(a);
    if (may_be_idle && n_rows <= 0) return;
    if constexpr (kHeads) {
        now = __ldcg(packets.numbers + blockIdx.x) + 1;
        rows = head_rows(a.heads, n8_of(0), lane, n_rows);
#pragma unroll
        for (int m = 0; m < kM; ++m)
            if (is_own(tile_of(m))) turned[m] = head_turn(a.heads, rows, head_gains(a.heads, head_of(begin + tile_of(m)), begin + tile_of(m), lane));
    } else if constexpr (!kGated) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < kOwn; ++n)
                if (is_own(tile_of(m))) {
                    const int tile = begin + tile_of(m), i = weight_of(tile);
                    load_beside(a, a.w[i], row_of(tile, i) + r, [&](int e) { return n8_of(n) + 2 * q + e; }, n_rows, old[m][n], gain[m][n]);
                }
    }
    // Groups of eight rows of W are kC chunks apart.
    constexpr uint64_t kHigh = uint64_t{0x40000000 + kC * 64} << 32, kHighX = uint64_t{0x40000040} << 32;
    const int apart = kGated ? deal.pass_tiles * kC * 64 : 512 * kC;  // of a warpgroup's products, in 16 bytes
    const uint32_t x_first = __shfl_sync(~0u, matrix_descriptor_low(x_ring), 0), w_first = __shfl_sync(~0u, matrix_descriptor_low(ring) + group * (kGated ? 1 : kM) * 512 * kC, 0);
    barrier_wait(&are_scaled, 0);
    int stage = 0;
    uint32_t phase = 0;
    constexpr int kOnce = kM == 1 && kC == 4 ? 2 : 1;  // blocks of 256 of K whose products are under way at once
#pragma unroll 1
    for (int s = 0; s < n_steps; ++s) {
        barrier_wait(w_full + stage, phase);
        barrier_wait(x_full + stage, phase);
        const uint32_t w_at = __shfl_sync(~0u, w_first + stage * (w_pitch >> 4), 0), x_at = __shfl_sync(~0u, x_first + stage * (S::kXBytes >> 4), 0);
#pragma unroll
        for (int b = 0; b < kBlocks; b += kOnce) {
            float part[kOnce][2][kM][kNT], by[kOnce][kN8][2], scale[kOnce][2][kM][2];
            wgmma_fence();
#pragma unroll
            for (int o = 0; o < kOnce; ++o) {
#pragma unroll
                for (int c = 0; c < 2; ++c)
#pragma unroll
                    for (int m = 0; m < kM; ++m)
#pragma unroll
                        for (int k = 0; k < 4; ++k)
                            WgmmaE4m3<2 * kNT>::shared(part[o][c][m], kHigh | (w_at + (2 * (b + o) + c) * 64 + m * apart + 2 * k), kHighX | (x_at + (2 * (b + o) + c) * kNT * 16 + 2 * k), k > 0);
                wgmma_commit();
            }
#pragma unroll
            for (int o = 0; o < kOnce; ++o) {
#pragma unroll
                for (int n = 0; n < kN8; ++n) {
                    const uint2 u = shared_load2(powers + ((stage * kBlocks + b + o) * kNT + 8 * n + 2 * q) * 4);
                    by[o][n][0] = __uint_as_float(u.x); by[o][n][1] = __uint_as_float(u.y);
                }
#pragma unroll
                for (int c = 0; c < 2; ++c)
#pragma unroll
                    for (int m = 0; m < kM; ++m)
#pragma unroll
                        for (int h = 0; h < (kGated ? 2 : 1); ++h) {
                            const int entry = kGated ? m * deal.pass_tiles + min(tile_of(m) + h, n_here - 1) : min(tile_of(m), n_here - 1);
                            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale[o][c][m][h]) : "r"(scales + ((s * kC + 2 * (b + o) + c) * n_entries + entry) * 4));
                        }
            }
#pragma unroll
            for (int o = 0; o < kOnce; ++o) {
                if (o + 1 < kOnce) wgmma_wait<1>();
                else wgmma_wait<0>();
#pragma unroll
                for (int c = 0; c < 2; ++c)
#pragma unroll
                    for (int m = 0; m < kM; ++m)
#pragma unroll
                        for (int i = 0; i < kNT; ++i) asm volatile("" : "+f"(part[o][c][m][i])::"memory");
                if (b + o + 1 == kBlocks && lane == 0) barrier_arrive(empty + stage);
#pragma unroll
                for (int c = 0; c < 2; ++c)
#pragma unroll
                    for (int m = 0; m < kM; ++m)
#pragma unroll
                        for (int n = 0; n < kN8; ++n)
#pragma unroll
                            for (int e = 0; e < 4; ++e) acc[m][n][e] = fmaf(part[o][c][m][4 * n + e] + part[o][c][m][kNT / 2 + 4 * n + e], scale[o][c][m][kGated ? e >> 1 : 0] * by[o][n][e & 1], acc[m][n][e]);
            }
        }
        if (++stage == n_stages) {
            stage = 0;
            phase ^= 1;
        }
    }
    if constexpr (kPair == 2) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            const int j = tile_of(m);
            const uint32_t to = received + ((j * kN8 >> 1) * 32 + lane) * 16;
            if constexpr (kN8 == 2) {
                const float v[4] = {rank ? acc[m][0][0] : acc[m][1][0], rank ? acc[m][0][1] : acc[m][1][1], rank ? acc[m][0][2] : acc[m][1][2], rank ? acc[m][0][3] : acc[m][1][3]};
                if (j < n_here) send_sums(to, make_float4(v[0], v[1], v[2], v[3]), &has_received, rank ^ 1);
            } else if (j < n_here && (j & 1) != rank) {
                send_sums(to, make_float4(acc[m][0][0], acc[m][0][1], acc[m][0][2], acc[m][0][3]), &has_received, rank ^ 1);
            }
        }
    }
    barrier_wait(&are_factored, 0);
    if constexpr (kPair == 2) barrier_wait(&has_received, 0);
    // Sums of a tile's own eight rows of x, of both blocks.
    auto sum_of = [&](int m, int n, float (&v)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = kPair == 2 && kN8 == 2 ? (rank ? acc[m][kN8 - 1][e] : acc[m][0][e]) : acc[m][n][e];
        if constexpr (kPair == 2) {
            const uint4 u = shared_load4(received + ((tile_of(m) * kN8 >> 1) * 32 + lane) * 16);
            v[0] += __uint_as_float(u.x); v[1] += __uint_as_float(u.y); v[2] += __uint_as_float(u.z); v[3] += __uint_as_float(u.w);
        }
    };
    if constexpr (kGated) {
#pragma unroll
        for (int n = 0; n < kN8; ++n) {
            const int n0 = 8 * n + 2 * q;
            const float by[2] = {deal.scale * factors[n0], deal.scale * factors[n0 + 1]};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int j = tile_of(0) + h;
                const bool is_row[2] = {j < n_here && n0 < n_rows, j < n_here && n0 + 1 < n_rows};
                const float v[4] = {acc[0][n][2 * h], acc[0][n][2 * h + 1], acc[kM - 1][n][2 * h], acc[kM - 1][n][2 * h + 1]};
                end_plain_gated(a, by, is_row, a.w[0].first_column + (begin + j) * 8 + r, n0, v);
            }
        }
    } else if constexpr (kHeads) {
        float v[kM][4];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            if (!is_own(tile_of(m))) continue;
            const int tile = begin + tile_of(m), i = weight_of(tile);
            sum_of(m, 0, v[m]);
            begin_head(a, a.w[i], packets, head_of(tile), tile, row_of(tile, i) + r, n8_of(0) + 2 * q, lane, factors, now, true, v[m]);
        }
#pragma unroll
        for (int m = 0; m < kM; ++m)
            if (is_own(tile_of(m))) end_head<kSplit == kTileHalfHeads>(a, packets, rows, turned[m], head_of(begin + tile_of(m)), begin + tile_of(m), n8_of(0), lane, n_rows, now, true, v[m]);
    } else {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int n = 0; n < kOwn; ++n) {
                if (!is_own(tile_of(m))) continue;
                const int n0 = n8_of(n) + 2 * q, tile = begin + tile_of(m);
                const float by[2] = {deal.scale * factors[n0], deal.scale * factors[n0 + 1]};
                const bool is_row[2] = {n0 < n_rows, n0 + 1 < n_rows};
                float v[4];
                sum_of(m, n, v);
                end_plain(a, by, is_row, a.w[0].first_column + tile * 16 + r, tile, n0, r == 0 && n_rows > 0, v, old[m][n], gain[m][n]);
            }
    }
    if (kHeads && threadIdx.x == 0) packets.numbers[blockIdx.x] = now;
#endif
}

}  // namespace pk
