// Cuts tiles of few tokens behind long contexts along the positions, so that the device is filled evenly (prefill_wgmma.cu).
//
// Work is counted in steps (tiles of positions). A unit is what a block does in a round. Every tile of a row is cut into pieces of one unit,
// the same positions for all tiles, and a rest that ends where the tile ends; as many rests as fit are a unit as well. Blocks take units in
// turn, so that neighbours read the same positions at the same time. Every thread weighs one pair of rounds and unit; the cheapest is
// taken, unless whole tiles are about as cheap. Pieces leave partial sums; when those of all blocks are there, all warps add them up, pieces in the
// order of the positions. So blocks wait for each other: there must be no more of them than fit onto the device at once.
// Does not handle: windows, more than kPieceRows rows of many tokens (their tiles stay whole).
#pragma once
#include "attention_beside.cuh"
#include "attention_tiles.cuh"

namespace pk {
namespace hopper {

constexpr int kPieceRows = 32, kPieceRounds = 4, kPieceRests = 8;
constexpr int kPieceCost = 5, kPieceLeast = 8;  // steps that an item costs beside its own; that were there before the row, for less nothing is cut

struct PieceRow {
    int row, tiles, steps, seen;  // tiles of pairs of a KV head; steps of its last token, those that all its tokens see whole
    int n_pieces, n_rests;        // of a tile, without its rest; units that hold the rests of all tiles
    int end;                      // running sum of units
    int part;                     // first row of partial sums
};

// An item: the row, and what of it.
struct PiecePlace {
    int at, head, tile, piece;
};

struct Pieces {
    int n_rows, work, most, seen, best, unit, n_units, n_parts;
    BesideLoad load;
    PieceRow rows[kPieceRows];
    PiecePlace places[kPieceRounds * kPieceRests];  // this block's items
};

// What a row comes to in pieces of so many steps.
struct PieceCut {
    int n_pieces, rest, n_rests;
    __device__ __forceinline__ PieceCut(const PieceRow &x, int unit, int n_heads) {
        n_pieces = x.seen / unit;
        rest = x.steps - n_pieces * unit;
        const int n = x.tiles * n_heads, abreast = min(kPieceRests, max(1, (unit + kPieceCost) / (rest + kPieceCost)));
        n_rests = (n + abreast - 1) / abreast;
    }
};

// Running sums of tiles per row into `ends`, and what rows there are into `p`; the tiles' number. All threads. kT: positions of a step.
template <int kThreads, int kPairs, int kT>
__device__ __forceinline__ int schedule_rows(const AttentionArguments &a, int *ends, int *warps, int *total, Pieces &p) {
    const int n_rows = a.info->n_rows, group = a.n_heads / a.n_kv_heads;
    uint32_t before = 0;  // tiles, and from bit 20 on rows that have some
    if (threadIdx.x == 0) {
        p.work = p.most = p.seen = 0;
        p.load = {};
        p.best = INT_MAX;
    }
    for (int base = 0; base == 0 || base < n_rows; base += kThreads) {
        const int r = base + threadIdx.x;
        int tiles = 0, n = 0, position = 0, flags = 0, shared = 0;
        BesideLoad load;
        if (r < a.max_rows) {  // loaded before the number of rows is known
            n = a.row_start[r + 1] - a.row_start[r];
            position = a.row_position[r];
            flags = a.row_flags[r];
            if (a.share_rows != nullptr) shared = a.share_rows[r].tokens;
        }
        const int end_position = position + n;
        if (r < n_rows) {
            tiles = is_decode_row(n, group) || (flags & PK_ROW_DEAD) ? 0 : (n * group + kPairs - 1) / kPairs;
            load.template add<kT>(a, n, position, flags, shared);
        }
        const uint32_t end = block_scan(tiles | (tiles > 0) << 20, warps) + before;
        load.sum_warp();
        if ((threadIdx.x & 31) == 0) {
            if (load.seen) atomicAdd(&p.load.seen, load.seen);
            if (load.tiles) atomicAdd(&p.load.tiles, load.tiles);
            if (load.steps) atomicAdd(&p.load.steps, load.steps);
        }
        const int at = static_cast<int>(end >> 20) - 1;
        if (r < n_rows) ends[r] = end & 0xfffff;
        if (tiles > 0 && at < kPieceRows) {
            PieceRow x = {};
            x.row = r;
            x.tiles = tiles;
            x.steps = (end_position + kT - 1) / kT;
            x.seen = position / kT;
            p.rows[at] = x;
            atomicMax(&p.most, x.steps);
            atomicMax(&p.seen, x.seen);
            atomicAdd(&p.work, tiles * a.n_kv_heads * x.steps);
        }
        if (threadIdx.x == kThreads - 1) *total = end;
        __syncthreads();
        before = *total;
        __syncthreads();
    }
    if (threadIdx.x == 0) p.n_rows = before >> 20;
    __syncthreads();
    return before & 0xfffff;
}

// Says how; false when tiles stay whole. max_parts: rows of partial sums that have a place. All threads, of n_blocks.
template <int kThreads, int kPairs>
__device__ __forceinline__ bool cut_tiles(const AttentionArguments &a, int n_tiles, int n_blocks, int max_parts, Pieces &p) {
    const int lane = threadIdx.x & 31, n_heads = a.n_kv_heads, n_items = n_tiles * n_heads, n = p.n_rows;
    if (a.window > 0 || n == 0 || n > kPieceRows || n_items > kPieceRounds * n_blocks || p.seen < kPieceLeast) return false;
    auto unit_of = [&](int candidate) {
        const int room = n_blocks * (1 + candidate % kPieceRounds), least = (p.work + room - 1) / room;
        return least + candidate / kPieceRounds * max(1, least / 64);
    };
    {
        const int unit = unit_of(threadIdx.x), rounds = 1 + threadIdx.x % kPieceRounds;
        int units = 0, parts = 0, longest = unit;
        for (int i = 0; i < n; ++i) {
            const PieceRow &x = p.rows[i];
            const PieceCut cut(x, unit, n_heads);
            units += x.tiles * n_heads * cut.n_pieces + cut.n_rests;
            parts += cut.n_pieces ? x.tiles * n_heads * (cut.n_pieces + 1) : 0;
            longest = max(longest, cut.rest);
        }
        if (units <= n_blocks * rounds && parts <= max_parts / kPairs) atomicMin(&p.best, rounds * (longest + kPieceCost) * kThreads + static_cast<int>(threadIdx.x));
    }
    __syncthreads();
    const int best = p.best, rounds = (n_items + n_blocks - 1) / n_blocks, whole = max(p.most, rounds * (p.work / n_items)) + rounds * kPieceCost;
    if (best == INT_MAX || best / kThreads >= whole - whole / 32) return false;
    if (threadIdx.x < 32) {
        const int unit = unit_of(best % kThreads);
        PieceRow x = lane < n ? p.rows[lane] : PieceRow{};
        const PieceCut cut(x, unit, n_heads);
        const int tiles = x.tiles * n_heads, units = tiles * cut.n_pieces + cut.n_rests, parts = cut.n_pieces ? tiles * (cut.n_pieces + 1) * kPairs : 0;
        x.n_pieces = cut.n_pieces;
        x.n_rests = cut.n_rests;
        x.end = units;
        x.part = parts;
        for (int o = 1; o < 32; o <<= 1) {
            const int end = __shfl_up_sync(~0u, x.end, o), part = __shfl_up_sync(~0u, x.part, o);
            if (lane < o) continue;
            x.end += end;
            x.part += part;
        }
        x.part -= parts;
        if (lane < n) p.rows[lane] = x;
        if (lane == n - 1) {
            p.n_units = x.end;
            p.n_parts = x.part + parts;
        }
        if (lane == 0) p.unit = unit;
    }
    return true;
}

// The n-th item of this block, of n_blocks; false behind the last one.
__device__ __forceinline__ bool find_place(const Pieces &p, int n_heads, int n_blocks, int n, PiecePlace &place) {
    for (int unit = blockIdx.x; unit < p.n_units; unit += n_blocks) {
        int at = 0;
        while (p.rows[at].end <= unit) ++at;
        const PieceRow &x = p.rows[at];
        const int local = unit - (at ? p.rows[at - 1].end : 0), n_tiles = x.tiles * n_heads, rest = local - n_tiles * x.n_pieces;
        if (rest < 0) {
            if (n-- > 0) continue;
            const int bundle = local / x.tiles;
            place = {at, bundle / x.n_pieces, local - bundle * x.tiles, bundle % x.n_pieces};
            return true;
        }
        const int count = (n_tiles - rest + x.n_rests - 1) / x.n_rests;
        if (n >= count) {
            n -= count;
            continue;
        }
        const int index = rest + n * x.n_rests;
        place = {at, index / x.tiles, index % x.tiles, x.n_pieces};
        return true;
    }
    return false;
}

// Lists this block's items; their number. All threads, behind a barrier.
__device__ __forceinline__ int list_places(Pieces &p, int n_heads, int n_blocks) {
    PiecePlace place;
    const bool is_one = threadIdx.x < kPieceRounds * kPieceRests && find_place(p, n_heads, n_blocks, threadIdx.x, place);
    if (is_one) p.places[threadIdx.x] = place;
    return __syncthreads_count(is_one);
}

template <int kPairs, int kT>
__device__ __forceinline__ TileItem piece_at(const AttentionArguments &a, const Pieces &p, int n) {
    const PiecePlace &place = p.places[n];
    const PieceRow &x = p.rows[place.at];
    TileItem item = tile_of_row<kPairs>(a, x.row, place.head, place.tile);
    if (x.n_pieces == 0) return item;
    const int n_tiles = x.tiles * a.n_kv_heads, tile = place.head * x.tiles + place.tile, length = p.unit * kT;
    item.kv_first = place.piece * length;
    if (place.piece < x.n_pieces) item.kv_end = item.kv_first + length;
    item.is_piece = true;
    item.part = x.part + place.piece * n_tiles * kPairs + tile * kPairs - item.first_pair;
    return item;
}

// All warps of the blocks at work, each when it has left its own partial sums: waits for the others', and adds up. words: two, zero between launches.
template <int kPairs, int kD, int kWarps>
__device__ __forceinline__ void join_pieces(const AttentionArguments &a, const Pieces &p, int32_t *words, int n_blocks, int warp) {
    const int lane = threadIdx.x & 31, group = a.n_heads / a.n_kv_heads, n_warps = n_blocks * kWarps;
    __threadfence();
    __syncwarp();
    if (lane == 0) {
        atomicAdd(words, 1);
        while (*static_cast<volatile int32_t *>(words) < n_warps) __nanosleep(50);
        __threadfence();
    }
    __syncwarp();
    for (int at = 0; at < p.n_rows; ++at) {
        const PieceRow &x = p.rows[at];
        if (x.n_pieces == 0) continue;
        const int n_tiles = x.tiles * a.n_kv_heads, start = a.row_start[x.row], n_pairs = (a.row_start[x.row + 1] - start) * group;
#pragma unroll 1
        for (int i = warp * n_blocks + blockIdx.x; i < n_tiles * kPairs; i += n_warps) {
            const int tile = i / kPairs, head = tile / x.tiles, pair = i - head * x.tiles * kPairs;
            if (pair >= n_pairs) continue;
            const int q_head = head * group + pair % group;
            const int64_t to = static_cast<int64_t>(start + pair / group) * a.out_stride + static_cast<int64_t>(q_head) * a.v_width;
#pragma unroll 1
            for (int column = lane * 4; column < kD; column += 128) {
                const float2 *ml = a.share_ml + x.part + i;
                const float *part = a.share_part + static_cast<int64_t>(x.part + i) * kD + column;
                float top = -INFINITY, sum = 0.0f;
                float4 v = make_float4(0, 0, 0, 0);
#pragma unroll 4
                for (int piece = 0; piece <= x.n_pieces; ++piece, ml += n_tiles * kPairs, part += n_tiles * kPairs * kD) {
                    const float2 b = __ldcg(ml);
                    const float4 y = __ldcg(reinterpret_cast<const float4 *>(part));
                    const float most = fmaxf(top, b.x), f = power2(top - most), g = power2(b.x - most);
                    top = most;
                    sum = sum * f + b.y * g;
                    v = make_float4(v.x * f + y.x * g, v.y * f + y.y * g, v.z * f + y.z * g, v.w * f + y.w * g);
                }
                const float f = last_factor(a, q_head, top, sum);
                if (column < a.v_width) store_out_pair(a, to + column, v.x * f, v.y * f);
                if (column + 2 < a.v_width) store_out_pair(a, to + column + 2, v.z * f, v.w * f);
            }
        }
    }
    __syncwarp();
    if (lane == 0 && atomicAdd(words + 1, 1) == n_warps - 1) words[0] = words[1] = 0;
}

}  // namespace hopper
}  // namespace pk
