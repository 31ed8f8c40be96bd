// Flat matmul of block formats on Hopper: y[rows, N] = x[rows, K] W^T for 3 to 16 rows, every weight decoded once.
//
// A cluster of blocks takes neighbouring pairs of tiles of 16 rows of W; each of its blocks a part of K, so that it reads that part of x only. A block's
// warps lie kWM along the pairs and kWK along K. A warp copies its own units into its own ring, the first of them before the kernels ahead are done, and
// needs nobody's leave for it; rows of x come in chunks of a unit's K that all warps share. Sums go straight to the block of the cluster, and the warp,
// that ends them. Pairs are neighbours, gate and up, or 64 rows apart in a head. Does not handle: K that is no multiple of a unit's, more than 16 rows.
#pragma once
#include "flat_end.cuh"

namespace pk {

struct UnitsDeal {
    int32_t cluster_log, n_clusters;         // of one block or two
    int32_t n_pairs, n_passes;
    int32_t along_pairs, along_k;            // warps; as many pairs are a pass of a cluster
    int32_t n_units;                         // along K, of a tile
    int32_t x_slots, w_slots;                // of a block; of a warp
    int32_t first_pair[3];
    FlatPackets packets;
};

constexpr int kUnitWarps = 12, kUnitThreads = kUnitWarps * 32 + 128, kUnitXSlots = 32, kUnitWSlots = 8;

template <int kFormat, int kNT>
struct UnitsShape {
    using U = Unit<kFormat>;
    static constexpr int kN8 = kNT / 8, kXBytes = kNT * U::kU * 2;  // [64 of K][row][128 bytes, swizzled]
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Column r of a product is row seen_row(r) of eight rows of x: what a half of a warp reads of them at once lies in different banks. Columns 2q and 2q + 1
// are rows two apart.
__device__ __forceinline__ int seen_row(int r) { return (r << 1 & 7) | r >> 2; }
__device__ __forceinline__ void copy_box3(uint32_t to, const CUtensorMap *map, int x, int y, int z, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z) : "memory");
}
// To the same place of block `rank` of a cluster of several, whose barrier counts the bytes.
__device__ __forceinline__ void send_pair(uint32_t to, float v, float u, uint64_t *barrier, int rank) {
    asm volatile(
        "{\n.reg .b32 t, b;\nmapa.shared::cluster.u32 t, %0, %4;\nmapa.shared::cluster.u32 b, %3, %4;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [t], {%1,%2}, [b];\n}" ::"r"(to), "f"(v), "f"(u), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
}

__device__ __forceinline__ void shared_store2(uint32_t at, float v, float u) { asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(v), "f"(u) : "memory"); }

// Puts what belongs to the 64 elements behind these where that of the first 64 was.
template <int kFormat>
__device__ __forceinline__ void next_64(Part<kFormat, true> &part) {
    using U = Unit<kFormat>;
    constexpr int kRowWords = U::kScaleWords / 2;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        uint32_t *w = part.u.scale + row * kRowWords;
        if constexpr (U::kScale == Scale::kBytesMin) {
            w[0] = __funnelshift_r(w[0], w[1], 16);
            w[1] >>= 16;
            w[2] = __funnelshift_r(w[2], w[3], 16);
            w[3] >>= 16;
        } else {
            static_assert(64 / U::kGroup * (U::kScale == Scale::kHalf ? 2 : 1) == 4);  // bytes of a row's scales: a word
#pragma unroll
            for (int i = 0; i + 1 < kRowWords; ++i) w[i] = w[i + 1];
        }
#pragma unroll
        for (int i = 0; i + 1 < U::kHighWords / 2; ++i) part.u.high[row * (U::kHighWords / 2) + i] = part.u.high[row * (U::kHighWords / 2) + i + 1];
    }
}
// A unit of each of two tiles by the chunk of x. at: where a lane's elements lie, by 16 of 64 of K. Returns what was read last.
template <int kFormat, int kNT>
__device__ __forceinline__ uint32_t multiply_units(float (&acc)[2][kNT / 8][4], uint32_t w0, uint32_t w1, uint32_t x, const uint32_t (&at)[4], const Opaque &constants, int lane) {
    using S = UnitsShape<kFormat, kNT>;
    using U = Unit<kFormat>;
    Part<kFormat, true> part[2];
    part[0].begin(w0, 0, lane);
    part[1].begin(w1, 0, lane);
    uint32_t used = 0;
    // A rolled loop: 3 kB of code instead of 12.
#pragma unroll 1
    for (int c = 0; c < U::kU / 64; ++c) {
        part[0].chunk(w0, 0, lane, 0);
        part[1].chunk(w1, 0, lane, 0);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            uint2 v[S::kN8][2];
#pragma unroll
            for (int n = 0; n < S::kN8; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) v[n][h] = shared_load2(x + at[b * 2 + h] + n * 1024);
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                uint32_t lo[4], hi[4];
                part[t].operands(b, constants, lo, hi);
#pragma unroll
                for (int n = 0; n < S::kN8; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) mma_bf16(acc[t][n], lo[2 * h], hi[2 * h], lo[2 * h + 1], hi[2 * h + 1], v[n][h].x, v[n][h].y);
                used = lo[3] ^ hi[3] ^ v[S::kN8 - 1][1].y;
            }
        }
        next_64(part[0]);
        next_64(part[1]);
        w0 += 64 * U::kLow * 2;
        w1 += 64 * U::kLow * 2;
        x += kNT * 128;
    }
    return used;
}

#endif

template <int kFormat, int kNT, int kSplit>
__global__ void __launch_bounds__(kUnitThreads, 1) flat_units_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ SkinnyArguments a, const __grid_constant__ UnitsDeal deal) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = UnitsShape<kFormat, kNT>;
    using U = Unit<kFormat>;
    constexpr bool kGated = kSplit == kTileGated, kHeads = kSplit >= kTileHeads;
    constexpr int kHalves = kSplit == kTileWhole ? 1 : 2;  // tiles whose sums one lane ends together
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t w_full[kUnitWarps][kUnitWSlots], x_full[kUnitXSlots], x_empty[kUnitXSlots], are_factored, has_received;
    alignas(16) __shared__ float factors[kNT], half_sums[2][kNT];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, cluster = 1 << deal.cluster_log, rank = blockIdx.x & (cluster - 1), me = blockIdx.x >> deal.cluster_log;
    const uint32_t x_ring = (shared_address(raw) + 1023) & ~1023u, w_ring = x_ring + deal.x_slots * S::kXBytes;
    // In one pass sums come where x was, once all blocks of the cluster have multiplied.
    const uint32_t received = deal.n_passes == 1 ? x_ring : w_ring + deal.along_pairs * deal.along_k * deal.w_slots * U::kBytes;
    const int begin = static_cast<uint32_t>(deal.n_pairs) * me / deal.n_clusters, end = static_cast<uint32_t>(deal.n_pairs) * (me + 1) / deal.n_clusters;
    const int first_unit = deal.n_units * rank >> deal.cluster_log, n_units = (deal.n_units * (rank + 1) >> deal.cluster_log) - first_unit;
    const int n_passes = deal.n_passes;
    auto pairs_in = [&](int pass) { return max(0, min(deal.along_pairs, end - begin - pass * deal.along_pairs)); };
    // Sums that this block ends in a pass: of eight rows of x and a tile, or both tiles.
    auto n_own = [&](int pass) { return (pairs_in(pass) * (2 / kHalves) * S::kN8 + cluster - 1 - rank) >> deal.cluster_log; };
    if (threadIdx.x < kUnitWarps * kUnitWSlots) barrier_init(&w_full[0][0] + threadIdx.x, 1);
    if (threadIdx.x < deal.x_slots) {
        barrier_init(x_full + threadIdx.x, 1);
        barrier_init(x_empty + threadIdx.x, deal.along_pairs);
    }
    if (threadIdx.x == 0) {
        barrier_init(&are_factored, 2);
        barrier_init(&has_received, 1);
        if (cluster > 1) barrier_expect(&has_received, n_own(0) * cluster * deal.along_k * kHalves * 512);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    if (n_passes > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    release_dependents();
    const bool may_be_idle = a.min_rows > 0;
    auto rows_here = [&] {
        const int n = rows_of(a.info, a.rows_symbol);
        return n < a.min_rows || n > a.max_rows ? 0 : min(n, kNT);
    };

    if (warp >= kUnitWarps) {
        fewer_registers<56>();
        wait_dependence();
        if (may_be_idle && rows_here() <= 0) return;
        if (warp == kUnitWarps) {
            int slot = 0;
            uint32_t phase = 0;
            for (int pass = 0; pass < n_passes; ++pass) {
                if (pass > 0) asm volatile("barrier.cluster.wait.acquire.aligned;\nbarrier.cluster.arrive.release.aligned;" ::: "memory");
#pragma unroll 1
                for (int i = 0; i < n_units; ++i) {
                    barrier_wait(x_empty + slot, phase ^ 1);
                    if (lane == 0) {
                        barrier_expect(x_full + slot, S::kXBytes);
                        copy_box3(x_ring + slot * S::kXBytes, &x_map, 0, 0, (first_unit + i) * (U::kU / 64), x_full + slot);
                    }
                    __syncwarp();
                    if (++slot == deal.x_slots) {
                        slot = 0;
                        phase ^= 1;
                    }
                }
            }
        } else if (warp <= kUnitWarps + 2) {
            row_factors<kNT>(a.norm, warp - kUnitWarps - 1, lane, half_sums, factors);
            if (lane == 0) barrier_arrive(&are_factored);
        }
        return;
    }
    more_registers<152>();
    const int wm = warp % deal.along_pairs, wk = warp / deal.along_pairs, r = lane >> 2, q = lane & 3;
    const bool works = wk < deal.along_k;
    const uint32_t own_ring = w_ring + warp * deal.w_slots * U::kBytes;
    auto weight_of = [&](int pair) { return kGated ? 0 : a.n_w > 2 && pair >= deal.first_pair[2] ? 2 : a.n_w > 1 && pair >= deal.first_pair[1] ? 1 : 0; };
    // The first row of the pair's tile t in its weight, i.
    auto row_of = [&](int pair, int i, int t) {
        if constexpr (kGated) return pair * 16;
        const int own = pair - deal.first_pair[i];
        return kHeads ? (own >> 2) * 128 + (own & 3) * 16 + t * 64 : own * 32 + t * 16;
    };
    auto pair_of = [&](int pass) {
        return works && wm < pairs_in(pass) ? begin + pass * deal.along_pairs + wm : -1;
    };
    // What lane 0 asks for next: of two tiles in turn.
    const int64_t ask_step = static_cast<int64_t>(deal.along_k) * U::kBytes;
    const uint8_t *ask_from = nullptr, *ask_then = nullptr;
    int ask_pass = -1, ask_left = 0, ask_slot = 0;
    auto next_pass = [&] {
        if (wk >= n_units) return;
        int pair = -1;
        while (++ask_pass < n_passes && (pair = pair_of(ask_pass)) < 0) {
        }
        if (pair < 0) return;
        auto tile_at = [&](int t) {
            const SkinnyWeight &w = a.w[kGated ? t : weight_of(pair)];
            const int tile = min(row_of(pair, weight_of(pair), t) >> 4, w.n_tiles16 - 1);
            return w.data + (static_cast<int64_t>(tile) * deal.n_units + first_unit + wk) * U::kBytes;
        };
        ask_from = tile_at(0);
        ask_then = tile_at(1);
        ask_left = 2 * ((n_units - wk + deal.along_k - 1) / deal.along_k);
    };
    auto ask = [&](uint32_t nothing) {
        if (ask_left == 0) return;
        barrier_expect(&w_full[warp][ask_slot], U::kBytes);
        copy_bytes_once(own_ring + ask_slot * U::kBytes + nothing, ask_from, U::kBytes, &w_full[warp][ask_slot]);
        const uint8_t *next = ask_from + ask_step;
        ask_from = ask_then;
        ask_then = next;
        if (++ask_slot == deal.w_slots) ask_slot = 0;
        if (--ask_left == 0) next_pass();
    };
    next_pass();
    if (may_be_idle) {
        wait_dependence();
        if (rows_here() <= 0) return;
    }
    if (lane == 0)
        for (int i = 0; i < deal.w_slots; ++i) ask(0);
    __syncwarp();
    wait_dependence();
    const int n_rows = rows_here();
    const uint32_t nothing = a.first_row, now = kHeads ? __ldcg(deal.packets.numbers + blockIdx.x) + 1 : 0;
    const Opaque constants = {0x43004300u + nothing, 0xc300c300u + nothing, 0x4b000000u + nothing, 0x00800080u + nothing};
    // Arguments of the end are read now: they come through a cache of their own, one trip a line.
    asm volatile("" ::"l"(a.y), "l"(a.y_stride), "l"(a.norm.out), "l"(a.norm.squares), "l"(a.norm.out_stride), "r"(a.y_format), "f"(a.scale), "f"(a.w[0].scale), "l"(a.w[0].bias), "f"(a.softcap));
    if constexpr (kHeads) asm volatile("" ::"l"(a.heads.q), "l"(a.heads.frequency), "l"(a.heads.v_offset), "f"(a.heads.eps));
    uint32_t x_at[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x_at[k] = seen_row(r) * 128 + ((q >> 1 ^ 2 * k ^ seen_row(r)) << 4) + (q & 1) * 8;
    float acc[2][S::kN8][4];
    int w_slot = 0;
    uint32_t w_phase = 0;
#pragma unroll 1
    for (int pass = 0; pass < n_passes; ++pass) {
        const int first = begin + pass * deal.along_pairs, pair = pair_of(pass);
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int n = 0; n < S::kN8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[t][n][e] = 0.0f;
        if (works) {
            int x_slot = pass * n_units + wk;
            uint32_t x_phase = 0;
            for (; x_slot >= deal.x_slots; x_slot -= deal.x_slots) x_phase ^= 1;
#pragma unroll 1
            for (int i = wk; i < n_units; i += deal.along_k) {
                barrier_wait(x_full + x_slot, x_phase);
                uint32_t used = 0;
                if (pair >= 0) {
                    uint32_t at[2];
#pragma unroll
                    for (int t = 0; t < 2; ++t) {
                        barrier_wait(&w_full[warp][w_slot], w_phase);
                        at[t] = own_ring + w_slot * U::kBytes;
                        if (++w_slot == deal.w_slots) {
                            w_slot = 0;
                            w_phase ^= 1;
                        }
                    }
                    used = multiply_units<kFormat, kNT>(acc, at[0], at[1], x_ring + x_slot * S::kXBytes, x_at, constants, lane);
                    __syncwarp();
                }
                if (lane == 0) {
                    arrive_after(x_empty + x_slot, used);
#pragma unroll 1
                    for (int t = 0; t < 2 && pair >= 0; ++t) ask(used & nothing);
                }
                __syncwarp();
                for (x_slot += deal.along_k; x_slot >= deal.x_slots; x_slot -= deal.x_slots) x_phase ^= 1;
            }
        }
        if (n_passes == 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        if (pair >= 0) {
#pragma unroll
            for (int n = 0; n < S::kN8; ++n)
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    const int f = (kHalves == 2 ? wm : 2 * wm + t) * S::kN8 + n, g = f >> deal.cluster_log;
                    const uint32_t to = received + (((g * cluster + rank) * deal.along_k + wk) * kHalves + (kHalves - 1) * t) * 512 + r * 64 + seen_row(2 * q) * 8;
                    if (cluster > 1) {
                        send_pair(to, acc[t][n][0], acc[t][n][2], &has_received, f & (cluster - 1));
                        send_pair(to + 16, acc[t][n][1], acc[t][n][3], &has_received, f & (cluster - 1));
                    } else {
                        shared_store2(to, acc[t][n][0], acc[t][n][2]);
                        shared_store2(to + 16, acc[t][n][1], acc[t][n][3]);
                    }
                }
        }
        // One block needs no counting of bytes, and tools refuse its st.async.
        auto wait_received = [&] {
            if (cluster > 1) barrier_wait(&has_received, pass & 1);
        };
        if (cluster == 1) asm volatile("bar.sync 1, %0;" ::"n"(kUnitWarps * 32) : "memory");
        const int own = n_own(pass), n_sums = cluster * deal.along_k;
        auto place = [&](int g, int &at_pair, int &t, int &n8) {
            const int f = g * cluster + rank, tile = f / S::kN8;
            n8 = f % S::kN8 * 8;
            at_pair = first + (kHalves == 2 ? tile : tile >> 1);
            t = kHalves == 2 ? 0 : tile & 1;
        };
        if (pass == 0) barrier_wait(&are_factored, 0);
#pragma unroll 1
        for (int g = warp; g < own; g += kUnitWarps) {
            int p, t, n8;
            place(g, p, t, n8);
            const int i = weight_of(p), row = row_of(p, i, t) + r, n0 = n8 + 2 * q;
            const SkinnyWeight &w = a.w[i];
            float old[4], gain[2];
            if constexpr (kHalves == 1) load_beside(a, w, row, n0, n_rows, old, gain);
            if (g == warp) wait_received();
            float v[kHalves][4] = {};
            const uint32_t from = received + g * n_sums * kHalves * 512 + lane * 16;
#pragma unroll 2
            for (int s = 0; s < n_sums; ++s)
#pragma unroll
                for (int h = 0; h < kHalves; ++h) {
                    const uint4 u = shared_load4(from + (s * kHalves + h) * 512);
                    v[h][0] += __uint_as_float(u.x); v[h][2] += __uint_as_float(u.y); v[h][1] += __uint_as_float(u.z); v[h][3] += __uint_as_float(u.w);
                }
            if constexpr (kHalves == 1) {
                if (row - r < w.rows) end_tile(a, w, (w.first_column + row - r) >> 4, row, n0, n_rows, lane, factors, v[0], old, gain);
            } else {
#pragma unroll 1
                for (int h = 0; h < 2; ++h) {
                    float both[4] = {h ? v[0][2] : v[0][0], h ? v[0][3] : v[0][1], h ? v[1][2] : v[1][0], h ? v[1][3] : v[1][1]};
                    if constexpr (kGated) {
                        end_gated(a, row + 8 * h, n0, n_rows, factors, both);
                    } else {
                        const int head = (w.first_column + row - r) >> 7, tile = head * 8 + 2 * ((p - deal.first_pair[i]) & 3) + h;
                        begin_head(a, w, deal.packets, head, tile, row + 8 * h, n0, lane, factors, now, true, both);
                        shared_store4(from + h * 512, make_uint4(__float_as_uint(both[0]), __float_as_uint(both[1]), __float_as_uint(both[2]), __float_as_uint(both[3])));
                    }
                }
            }
        }
        if constexpr (kHeads) {
#pragma unroll 1
            for (int g = warp; g < own; g += kUnitWarps) {
                int p, t, n8;
                place(g, p, t, n8);
                const int i = weight_of(p), head = (a.w[i].first_column + row_of(p, i, 0)) >> 7;
#pragma unroll 1
                for (int h = 0; h < 2; ++h) {
                    const uint4 u = shared_load4(received + (g * n_sums * 2 + h) * 512 + lane * 16);
                    float both[4] = {__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z), __uint_as_float(u.w)};
                    end_head<kSplit == kTileHalfHeads>(a, deal.packets, head, head * 8 + 2 * ((p - deal.first_pair[i]) & 3) + h, n8, lane, n_rows, now, true, both);
                }
            }
        }
        if (pass + 1 < n_passes) {
            if (own <= warp) wait_received();
            if (threadIdx.x == 0 && cluster > 1) barrier_expect(&has_received, n_own(pass + 1) * n_sums * kHalves * 512);
            __syncwarp();
            asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        }
    }
    if constexpr (kHeads) {
        // Kernels of other widths count on.
        if (threadIdx.x == 0) deal.packets.numbers[blockIdx.x] = now;
        if (blockIdx.x == 0)
            for (int i = gridDim.x + threadIdx.x; i < kMaxBlocks; i += kUnitWarps * 32) deal.packets.numbers[i] = now;
    }
#endif
}

}  // namespace pk
