// Flat matmul of block formats on Hopper: y[rows, N] = x[rows, K] W^T for 3 to 32 rows, every weight decoded once.
//
// A cluster of two blocks takes neighbouring pairs of tiles of 16 rows of W; each of its blocks half of K, so that it reads that half of x only. Two pairs are a
// quad: a warpgroup's, whose warps decode a tile each for wgmma, with x in its own order behind it (flat_part.cuh). Warpgroups lie along K or along quads. One warp
// copies units of weights into a ring, one x. Memory answers in the order in which it is asked: few weights are asked for before the kernels ahead are done, the others behind the first x. Sums go straight to the block of the cluster, and the warp, that
// ends them. Pairs are neighbours, gate and up, or 64 rows apart in a head. Does not handle: K that is no multiple of a unit's, more than 32 rows.
#pragma once
#include "flat_end.cuh"
#include "flat_part.cuh"
#include "wgmma_skinny.cuh"

namespace pk {

constexpr int kUnitGroups = 3, kUnitWarps = 4 * kUnitGroups, kUnitThreads = kUnitWarps * 32 + 128;
constexpr int kUnitQuads = 2;  // of a warpgroup at once
constexpr int kUnitXSlots = 16;
static_assert(4 * kUnitGroups * kUnitQuads <= 32 && kUnitThreads / 32 >= kUnitXSlots);  // a tile of a pass has a lane of the warp that copies it, a slot the warp that begins it

struct UnitsDeal {
    int32_t pairs_each, pairs_left;  // of a cluster, and of how many clusters one more
    int32_t n_passes, pass_pairs, pass_quads;
    int32_t along_k;           // warpgroups, or one; the others lie along quads
    int32_t x_users;           // warps that multiply a unit of x
    int32_t n_steps, tile_units;  // along K; units of a tile, of which the last step may lack some
    int32_t ahead, x_ahead;    // steps of weights that are asked for before the kernels ahead are done; of x, before more weights
    int32_t x_slots, w_slots;  // steps in rings; multiples of a turn of all groups: a slot is one group's, which so waits for each of its phases
    int32_t step_bytes;        // of a pass' weights
    int32_t first_pair[3];
    float scale;  // of all weights together, where an end is plain
    FlatPackets packets;
};

template <int kFormat, int kNT>
struct UnitsShape {
    using U = Unit<kFormat>;
    // Of K, a step: 256, so that warps wait for each other half as often as with 128, but where x and two units of W would not fit.
    static constexpr int kK = U::kU < 256 && kNT == 32 ? 128 : 256;
    static constexpr int kN8 = kNT / 8, kXBytes = kNT * kK * 2;  // [64 of K][row][128 bytes, swizzled]
    static constexpr int kUnits = kK / U::kU, kTileBytes = kUnits * U::kBytes, kWBytes = 4 * kTileBytes;  // of a tile's step; of a quad's
    static constexpr int kChunks = kK / 64, kUnitChunks = U::kU / 64;
    static constexpr int kTurn = U::kHigh > 0 && kNT == 32 ? 1 : kChunks / 2;  // chunks of 64 of K that are multiplied at once, where registers allow it
    // Copies of 2 kB, and as many as keep one thread busy: it reads all places before it waits, and asks further ahead.
    static constexpr bool kManyCopies = U::kLow == 8;
    static constexpr bool kAsksAhead = kFormat == PK_Q8_0;  // for the next product
    static constexpr int kWSlots = kManyCopies ? 24 : 16;
    static constexpr int kFewer = kNT == 32 && kTurn == 2 ? 32 : 40, kMore = kFewer == 32 ? 160 : 152;  // registers of those who copy and who multiply
    static_assert(kK % U::kU == 0 && kUnits <= 2);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void copy_box3(uint32_t to, const CUtensorMap *map, int x, int y, int z, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Arguments come through a cache of their own, one trip a line: every warp asks for another line before anybody needs one, and lays down what it got, or the
// compiler would not ask.
__device__ __forceinline__ void ask_for_arguments(const SkinnyArguments &a, const UnitsDeal &deal, int warp, uint32_t to) {
    auto ask = [&](const void *v) { asm volatile("st.shared.b64 [%0], %1;" ::"r"(to), "l"(v) : "memory"); };
    auto ask_number = [&](int v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); };
    if (warp == 0) ask(a.w[0].data);
    if (warp == 1) ask_number(a.w[0].first_column);
    if (warp == 2) ask(a.w[1].bias);
    if (warp == 3) ask(a.w[2].bias);
    if (warp == 4) ask(a.norm.out);
    if (warp == 5) ask_number(a.norm.stride);
    if (warp == 6) ask(a.heads.k_norm);
    if (warp == 7) ask(a.heads.page);
    if (warp == 8) ask_number(a.heads.kv_format);
    if (warp == 9) ask(a.info);
    if (warp == 10) ask_number(a.n_w);
    if (warp == 11) ask_number(a.max_rows);
    if (warp == 12) ask(deal.packets.squares);
}
// One lane of the warp, which the compiler knows to be one: copies need no loop over lanes.
__device__ __forceinline__ bool is_elected() {
    uint32_t is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is));
    return is;
}
// Asks for what the next product reads first, into the second-level cache: memory would idle while this launch ends and that one begins. A warp, once all that its block reads has come.
__device__ __forceinline__ void ask_ahead(const FlatAhead &f, int lane) {
#pragma unroll 1
    for (int p = blockIdx.x + lane * gridDim.x; p < f.pieces[2]; p += gridDim.x * 32) {
        const int i = (p >= f.pieces[0]) + (p >= f.pieces[1]), own = p - (i == 0 ? 0 : i == 1 ? f.pieces[0] : f.pieces[1]);
        const uint8_t *from = (i == 0 ? f.from[0] : i == 1 ? f.from[1] : f.from[2]) + (own >> 1) * f.apart + (own & 1) * f.second;
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(f.bytes) : "memory");
    }
}
// A place in a ring whose length the launch knows.
struct UnitsTurn {
    int slot = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance(int by, int slots) {
        for (slot += by; slot >= slots; slot -= slots) phase ^= 1;
    }
    // By no more than the ring has.
    __device__ __forceinline__ void step(int by, int slots) {
        slot += by;
        if (slot >= slots) {
            slot -= slots;
            phase ^= 1;
        }
    }
};

#endif

template <int kFormat, int kNT, int kSplit, bool kPlain>
__global__ void __launch_bounds__(kUnitThreads, 1) flat_units_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ SkinnyArguments a, const __grid_constant__ UnitsDeal deal) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using S = UnitsShape<kFormat, kNT>;
    using U = Unit<kFormat>;
    constexpr bool kGated = kSplit == kTileGated, kHeads = kSplit >= kTileHeads;
    constexpr int kHalves = kSplit == kTileWhole ? 1 : 2;  // tiles whose sums one lane ends together
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t w_full[S::kWSlots], w_empty[S::kWSlots], x_full[kUnitXSlots], x_empty[kUnitXSlots], are_factored, has_received, is_taken, is_x_asked;
    alignas(16) __shared__ float factors[kNT], half_sums[2][kNT];
    __shared__ uint64_t asked[kUnitThreads / 32];
    alignas(16) __shared__ const uint8_t *tiles[32];  // of a pass: the block's first unit
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = blockIdx.x & 1, me = blockIdx.x >> 1;
    if (lane == 0) {
        ask_for_arguments(a, deal, warp, shared_address(asked + warp));
        // Barriers one after the other take a thread as long as a trip to memory.
        if (warp < kUnitXSlots) {
            barrier_init(x_full + warp, 1);
            barrier_init(x_empty + warp, deal.x_users);
        }
#pragma unroll
        for (int i = warp; i < S::kWSlots; i += kUnitThreads / 32) {
            barrier_init(w_full + i, 1);
            barrier_init(w_empty + i, 4);
        }
    }
    const uint32_t x_ring = (shared_address(raw) + 1023) & ~1023u, w_ring = x_ring + deal.x_slots * S::kXBytes, received = w_ring + deal.w_slots * deal.step_bytes;
    const int begin = me * deal.pairs_each + min(me, deal.pairs_left), end = begin + deal.pairs_each + (me < deal.pairs_left);
    const int first_step = deal.n_steps * rank >> 1, n_steps = (deal.n_steps * (rank + 1) >> 1) - first_step;
    const int n_passes = deal.n_passes, n_sums = 2 * deal.along_k;
    auto pairs_in = [&](int pass) { return max(0, min(deal.pass_pairs, end - begin - pass * deal.pass_pairs)); };
    // Sums that this block ends in a pass: of eight rows of x and a tile, or both tiles.
    auto n_own = [&](int pass) { return (pairs_in(pass) * (2 / kHalves) * S::kN8 + 1 - rank) >> 1; };
    if (threadIdx.x == 0) {
        barrier_init(&are_factored, 2);
        barrier_init(&is_taken, 2 * kUnitWarps);
        barrier_init(&is_x_asked, 1);
        barrier_init(&has_received, 1);
        barrier_expect(&has_received, n_own(0) * n_sums * kHalves * 512);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    // Relaxed: the fence tells the other block of the barriers, and a release would wait for memory here.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    release_dependents();
    const bool may_be_idle = a.min_rows > 0;
    auto rows_here = [&] {
        const int n = rows_of(a.info, a.rows_symbol);
        return n < a.min_rows || n > a.max_rows ? 0 : min(n, kNT);
    };
    auto weight_of = [&](int pair) { return kGated ? 0 : a.n_w > 2 && pair >= deal.first_pair[2] ? 2 : a.n_w > 1 && pair >= deal.first_pair[1] ? 1 : 0; };
    // The first row of the pair's tile t in its weight, i.
    auto row_of = [&](int pair, int i, int t) {
        if constexpr (kGated) return pair * 16;
        const int own = pair - deal.first_pair[i];
        return kHeads ? (own >> 2) * 128 + (own & 3) * 16 + t * 64 : own * 32 + t * 16;
    };

    // The last step may lack its second unit, for which x is zero.
    const int n_units = min(n_steps * S::kUnits, deal.tile_units - first_step * S::kUnits);
    auto tile_bytes = [&](int u) { return S::kUnits == 1 || S::kUnits * u + 1 < n_units ? S::kTileBytes : U::kBytes; };
    // Where the block's units begin of tile `at & 1` of pair `at >> 1` of a pass.
    auto tile_at = [&](int pass, int at) {
        const int pair = begin + pass * deal.pass_pairs + (at >> 1), i = weight_of(pair);
        const SkinnyWeight &weight = a.w[kGated ? at & 1 : i];
        return weight.data + (static_cast<int64_t>(min(row_of(pair, i, at & 1) >> 4, weight.n_tiles16 - 1)) * deal.tile_units + first_step * S::kUnits) * U::kBytes;
    };
    // Weights do not depend on the kernels before: all warps that multiply ask for the first ones, a quad each, unless this launch may be idle.
    const int first_quads = (pairs_in(0) + 1) >> 1, n_asked = may_be_idle ? 0 : min(kUnitWarps, first_quads * min(n_steps, deal.ahead));

    // Nobody goes before all of the cluster have come.
    auto leave = [] {
        __syncwarp();
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    };

    if (warp >= kUnitWarps) {
        fewer_registers<S::kFewer>();
        if (warp == kUnitWarps) {
            if (may_be_idle) {
                wait_dependence();
                if (rows_here() <= 0) return leave();
            }
            UnitsTurn w;
            int last = -1;  // what was asked for last: slot and phase
            for (int pass = 0; pass < n_passes; ++pass) {
                const int pairs = pairs_in(pass), quads = (pairs + 1) >> 1, skipped = pass == 0 ? n_asked : 0;
                UnitsTurn w_next = w;
                w_next.advance(n_steps, deal.w_slots);
                if (lane < 2 * pairs) tiles[lane] = tile_at(pass, lane);
                __syncwarp();
                int u = quads > 0 ? skipped / quads : n_steps, quad = quads > 0 ? skipped % quads : 0;
                if (pass == 0 && u < n_steps) barrier_wait(&is_x_asked, 0);
                if (is_elected()) {
                    w.advance(u, deal.w_slots);
#pragma unroll 1
                    for (int64_t at = u * S::kTileBytes; u < n_steps; ++u, at += S::kTileBytes) {
                        const int bytes = tile_bytes(u);
#pragma unroll 1
                        for (; quad < quads; ++quad) {
                            const int slot = w.slot * deal.pass_quads + quad;
                            const uint32_t to = w_ring + w.slot * deal.step_bytes + quad * S::kWBytes;
                            const bool is_whole = 2 * quad + 1 < pairs;
                            uint64_t *full = w_full + slot;
                            const uint8_t *from[4];
                            auto place = [&](int i) { return tiles[4 * quad + i] + at; };
                            if constexpr (S::kManyCopies)
#pragma unroll
                                for (int i = 0; i < 4; ++i) from[i] = place(i);
                            auto copy = [&](int i) { copy_bytes_once(to + i * S::kTileBytes, S::kManyCopies ? from[i] : place(i), bytes, full); };
                            if constexpr (S::kAsksAhead) last = 2 * slot + w.phase;
                            barrier_wait(w_empty + slot, w.phase ^ 1);
                            barrier_expect(full, (is_whole ? 4 : 2) * bytes);
                            copy(0);
                            copy(1);
                            if (is_whole) {
                                copy(2);
                                copy(3);
                            }
                        }
                        w.step(1, deal.w_slots);
                        quad = 0;
                    }
                }
                __syncwarp();
                w = w_next;
            }
            if (S::kAsksAhead && deal.packets.ahead.bytes > 0) {
                if (last >= 0) barrier_wait(w_full + (last >> 1), last & 1);
                __syncwarp();
                ask_ahead(deal.packets.ahead, lane);
            }
            return leave();
        }
        if (warp == kUnitWarps + 1 && lane == 0) prefetch_map(&x_map);
        __syncwarp();
        wait_dependence();
        if (may_be_idle && rows_here() <= 0) return leave();
        if (warp == kUnitWarps + 1) {
            UnitsTurn x;
            const bool copies = is_elected();
            for (int pass = 0; copies && pass < n_passes && pairs_in(pass) > 0; ++pass)
#pragma unroll 1
                for (int i = 0; i < n_steps; ++i) {
                    barrier_wait(x_empty + x.slot, x.phase ^ 1);
                    barrier_expect(x_full + x.slot, S::kXBytes);
                    copy_box3(x_ring + x.slot * S::kXBytes, &x_map, 0, 0, (first_step + i) * S::kChunks, x_full + x.slot);
                    x.step(1, deal.x_slots);
                    if (pass == 0 && i == min(deal.x_ahead, n_steps) - 1) barrier_arrive(&is_x_asked);
                }
        } else {
            row_factors<kNT>(a.norm, warp - kUnitWarps - 2, lane, half_sums, factors);
            if (lane == 0) barrier_arrive(&are_factored);
        }
        return leave();
    }
    if (warp < n_asked) {
        const int quad = warp % first_quads, u = warp / first_quads, here = 2 * min(2, pairs_in(0) - 2 * quad), slot = u * deal.pass_quads + quad;
        if (lane == 0) barrier_expect(w_full + slot, here * tile_bytes(u));
        __syncwarp();
        if (lane < here) copy_bytes_once(w_ring + u * deal.step_bytes + quad * S::kWBytes + lane * S::kTileBytes, tile_at(0, 4 * quad + lane) + u * S::kTileBytes, tile_bytes(u), w_full + slot);
    }
    more_registers<S::kMore>();
    wait_dependence();
    const int n_rows = rows_here();
    if (may_be_idle && n_rows <= 0) return leave();
    const int group = warp >> 2, r = lane >> 2, q = lane & 3;
    // A warp's pair of a quad; groups differ, so that pairs that lack their second leave all schedulers as much.
    const int half = (warp >> 1 & 1) ^ (group & 1), t = warp & 1;
    const bool is_along_k = deal.along_k > 1;
    const uint32_t nothing = a.first_row, now = kHeads ? __ldcg(deal.packets.numbers + blockIdx.x) + 1 : 0;
    const Opaque constants = {0x43004300u + nothing, 0xc300c300u + nothing, 0x4b000000u + nothing, 0x00800080u + nothing};
    // Arguments of the end are read now: they come through a cache of their own, one trip a line.
    asm volatile("" ::"l"(a.y), "l"(a.y_stride), "l"(a.norm.out), "l"(a.norm.squares), "l"(a.norm.out_stride), "r"(a.y_format), "f"(a.scale), "f"(a.w[0].scale), "l"(a.w[0].bias), "f"(a.softcap));
    if constexpr (kHeads) asm volatile("" ::"l"(a.heads.q), "l"(a.heads.frequency), "l"(a.heads.v_offset), "f"(a.heads.eps));
    // What a sum of this block is of: its pair, (whole) which tile of that, rows of x.
    auto place = [&](int first, int g, int &pair, int &t, int &n8) {
        const int f = 2 * g + rank, tile = f / S::kN8;
        n8 = f % S::kN8 * 8;
        pair = first + (kHalves == 2 ? tile : tile >> 1);
        t = kHalves == 2 ? 0 : tile & 1;
    };
    // Heads end eight rows and the eight that are rotated with them at a time, half of a sum of both tiles; they are of one pass.
    auto head_place = [&](int half_sum, int &i, int &row, int &n8, int &head, int &tile) {
        int pair, t;
        place(begin, half_sum >> 1, pair, t, n8);
        i = weight_of(pair);
        row = row_of(pair, i, 0) + 8 * (half_sum & 1);
        head = (a.w[i].first_column + row) >> 7;
        tile = head * 8 + 2 * ((pair - deal.first_pair[i]) & 3) + (half_sum & 1);
    };
    // Of a warp's first one what it wants beside is asked for now.
    HeadRows asked_rows;
    HeadGains asked_gains;
    if constexpr (kHeads) {
        if (warp < 2 * n_own(0)) {
            int i, row, n8, head, tile;
            head_place(warp, i, row, n8, head, tile);
            asked_rows = head_rows(a.heads, n8, lane, n_rows);
            asked_gains = head_gains(a.heads, head, tile, lane);
        }
    }
    float acc[kUnitQuads][kNT / 2];
    auto hold = [&] {
#pragma unroll
        for (int j = 0; j < kUnitQuads; ++j)
#pragma unroll
            for (int e = 0; e < kNT / 2; ++e) asm volatile("" : "+f"(acc[j][e])::"memory");
    };
    auto release = [&](uint64_t *barrier) {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    };
    OrderedPart<kFormat> part;
    part.prepare(lane);
    // Weights of two turns: what a product under way reads stays as it is until the product is done. Where a step lacks weights, their product with zeros is none.
    constexpr int kTurn = S::kTurn, kParts = 2 * kTurn;  // chunks of 64 of K; 32 of K
    uint32_t operands[2][kParts][2][4];
#pragma unroll
    for (int i = 0; i < 2 * kParts * 8; ++i) operands[i / (kParts * 8)][i / 8 % kParts][i / 4 % 2][i % 4] = nothing;
    auto keep = [&](int side) {
#pragma unroll
        for (int s = 0; s < kParts; ++s)
#pragma unroll
            for (int i = 0; i < 8; ++i) asm volatile("" ::"r"(operands[side][s][i / 4][i % 4]));
    };
    UnitsTurn w, x;
    // Where this group's first unit and quad are; how far apart they are.
    const int step = is_along_k ? kUnitGroups : 1, first_quad = is_along_k ? 0 : group, quad_step = is_along_k ? 1 : kUnitGroups;
#pragma unroll 1
    for (int pass = 0; pass < n_passes; ++pass) {
        const int first = begin + pass * deal.pass_pairs, pairs = pairs_in(pass), quads = (pairs + 1) >> 1;
        UnitsTurn w_next = w, x_next = x;
        w_next.advance(n_steps, deal.w_slots);
        if (pairs > 0) x_next.advance(n_steps, deal.x_slots);
#pragma unroll
        for (int j = 0; j < kUnitQuads; ++j)
#pragma unroll
            for (int e = 0; e < kNT / 2; ++e) acc[j][e] = 0.0f;
        const int first_u = is_along_k ? group : 0;
        w.advance(first_u, deal.w_slots);
        x.advance(first_u, deal.x_slots);
        int held = -1;
#pragma unroll 1
        for (int u = first_u; u < n_steps && pairs > 0; u += step) {
            // The low words of descriptors: only they change. The same for all lanes, as the compiler is told.
            const uint32_t x_low = __shfl_sync(~0u, (((x_ring + x.slot * S::kXBytes) & 0x3ffff) >> 4) | 0x10000, 0);
            bool waits_for_x = true;
#pragma unroll
            for (int j = 0; j < kUnitQuads; ++j) {
                const int quad = first_quad + j * quad_step;
                if (quad >= quads) continue;
                const int slot = w.slot * deal.pass_quads + quad;
                barrier_wait(w_full + slot, w.phase);
                const uint32_t at = w_ring + w.slot * deal.step_bytes + quad * S::kWBytes + (2 * half + t) * S::kTileBytes;
                // A warp without a tile multiplies what its registers hold: rows of its own, which nobody reads.
                const bool has = 2 * quad + half < pairs;
                const bool is_short = tile_bytes(u) < S::kTileBytes;
                if (has) part.load(at, 0);
#pragma unroll
                for (int first_c = 0; first_c < S::kChunks; first_c += kTurn) {
                    const int side = first_c / kTurn & 1;
                    auto &now_read = operands[side];
                    if (has && (S::kUnits == 1 || first_c < S::kUnitChunks || !is_short)) {
#pragma unroll
                        for (int i = 0; i < kTurn; ++i) {
                            const int c = first_c + i, in = c % S::kUnitChunks, next = c + 1;
                            if (in == 0) part.begin(at + c / S::kUnitChunks * U::kBytes);
                            part.scale(in, constants);
#pragma unroll
                            for (int s = 0; s < 2; ++s) part.operands(2 * in + s, constants, now_read[2 * i + s][0], now_read[2 * i + s][1]);
                            if (next < S::kChunks) part.load(at + next / S::kUnitChunks * U::kBytes, next % S::kUnitChunks);
                        }
                    }
                    if (first_c == 0 && waits_for_x) barrier_wait(x_full + x.slot, x.phase);
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < kParts; ++s)
#pragma unroll
                        for (int h = 0; h < 2; ++h)
                            Wgmma<kNT>::registers(acc[j], now_read[s][0][2 * h], now_read[s][1][2 * h], now_read[s][0][2 * h + 1], now_read[s][1][2 * h + 1], (uint64_t{0x40000040} << 32) | (x_low + (first_c + s / 2) * (kNT * 8) + 4 * (s % 2) + 2 * h));
                    wgmma_commit();
                    wgmma_wait<1>();
                    keep(side ^ 1);
                    if (first_c == 0 && waits_for_x && held >= 0) release(x_empty + held);
                }
                release(w_empty + slot);
                waits_for_x = false;
            }
            held = x.slot;
            if (waits_for_x) {  // no quad is this group's
                barrier_wait(x_full + x.slot, x.phase);
                release(x_empty + x.slot);
                held = -1;
            }
            w.step(step, deal.w_slots);
            x.step(step, deal.x_slots);
        }
        wgmma_wait<0>();
        hold();
        keep(0);
        keep(1);
        if (held >= 0) release(x_empty + held);
        w = w_next;
        x = x_next;
        if (pass == 0) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        else barrier_wait(&is_taken, (pass - 1) & 1);
#pragma unroll
        for (int j = 0; j < kUnitQuads; ++j) {
            const int quad = first_quad + j * quad_step, pair = 2 * quad + half;
            if (quad >= quads || pair >= pairs) continue;
#pragma unroll
            for (int n = 0; n < S::kN8; ++n) {
                const int f = (kHalves == 2 ? pair : 2 * pair + t) * S::kN8 + n;
                const uint32_t to = received + ((((f >> 1) * 2 + rank) * deal.along_k + (is_along_k ? group : 0)) * kHalves + (kHalves - 1) * t) * 512 + lane * 16;
                send_sums(to, make_float4(acc[j][4 * n], acc[j][4 * n + 1], acc[j][4 * n + 2], acc[j][4 * n + 3]), &has_received, f & 1);
            }
        }
        const int own = n_own(pass);
        if (pass == 0) barrier_wait(&are_factored, 0);
        if constexpr (kHeads) {
            barrier_wait(&has_received, 0);
            // x is done with: its ring takes what waits for a head's other tiles.
            const uint32_t waiting = x_ring + lane * 16;
#pragma unroll 1
            for (int at = warp; at < 2 * own; at += kUnitWarps) {
                int i, row, n8, head, tile;
                head_place(at, i, row, n8, head, tile);
                float v[4] = {};
                const uint32_t from = received + (at >> 1) * n_sums * 1024 + lane * 16 + (at & 1) * 8;
#pragma unroll 2
                for (int k = 0; k < n_sums; ++k)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const uint2 u = shared_load2(from + (2 * k + h) * 512);
                        v[2 * h] += __uint_as_float(u.x);
                        v[2 * h + 1] += __uint_as_float(u.y);
                    }
                begin_head(a, a.w[i], deal.packets, head, tile, row + r, n8 + 2 * q, lane, factors, now, true, v);
                shared_store4(waiting + at * 512, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
            }
#pragma unroll 1
            for (int at = warp; at < 2 * own; at += kUnitWarps) {
                int i, row, n8, head, tile;
                head_place(at, i, row, n8, head, tile);
                if (at != warp) {
                    asked_rows = head_rows(a.heads, n8, lane, n_rows);
                    asked_gains = head_gains(a.heads, head, tile, lane);
                }
                const uint4 u = shared_load4(waiting + at * 512);
                float v[4] = {__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z), __uint_as_float(u.w)};
                end_head<kSplit == kTileHalfHeads>(a, deal.packets, asked_rows, head_turn(a.heads, asked_rows, asked_gains), head, tile, n8, lane, n_rows, now, true, v);
            }
        } else {
#pragma unroll 1
            for (int g = warp; g < own; g += kUnitWarps) {
                int pair, t, n8;
                place(first, g, pair, t, n8);
                const int i = weight_of(pair), row = row_of(pair, i, t) + r, n0 = n8 + 2 * q;
                const SkinnyWeight &w = a.w[i];
                float old[4], gain[2];
                if constexpr (!kGated) load_beside(a, w, row, [&](int e) { return n0 + e; }, n_rows, old, gain);
                if (g == warp) barrier_wait(&has_received, pass & 1);
                float v[kHalves][4] = {};
                const uint32_t from = received + g * n_sums * kHalves * 512 + lane * 16;
#pragma unroll 2
                for (int s = 0; s < n_sums; ++s)
#pragma unroll
                    for (int h = 0; h < kHalves; ++h) {
                        const uint4 u = shared_load4(from + (s * kHalves + h) * 512);
                        v[h][0] += __uint_as_float(u.x); v[h][1] += __uint_as_float(u.y); v[h][2] += __uint_as_float(u.z); v[h][3] += __uint_as_float(u.w);
                    }
                const float by[2] = {deal.scale * factors[n0], deal.scale * factors[n0 + 1]};
                const bool is_row[2] = {n0 < n_rows, n0 + 1 < n_rows};
                if constexpr (kGated) {
#pragma unroll 1
                    for (int h = 0; h < 2; ++h) {
                        const float both[4] = {h ? v[0][2] : v[0][0], h ? v[0][3] : v[0][1], h ? v[1][2] : v[1][0], h ? v[1][3] : v[1][1]};
                        if constexpr (kPlain) end_plain_gated(a, by, is_row, w.first_column + row + 8 * h, n0, both);
                        else end_gated(a, row + 8 * h, [&](int e) { return n0 + e; }, n_rows, factors, both);
                    }
                } else if (row - r < w.rows) {
                    const int tile = (w.first_column + row - r) >> 4;
                    if constexpr (kPlain) end_plain(a, by, is_row, w.first_column + row, tile, n0, r == 0 && n_rows > 0, v[0], old, gain);
                    else end_tile(a, w, tile, row, n0, n_rows, lane, factors, v[0], old, gain);
                }
            }
        }
        if (pass + 1 < n_passes) {
            if (own <= warp) barrier_wait(&has_received, pass & 1);
            if (threadIdx.x == 0) barrier_expect(&has_received, n_own(pass + 1) * n_sums * kHalves * 512);
            __syncwarp();
            if (lane < 2) barrier_arrive_at(&is_taken, lane);
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
