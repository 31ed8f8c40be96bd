// The producer side of Hopper's prefill attention (prefill_wgmma.cu): the warps that bring Q, K and V of its items (attention_items.cuh).
//
// K and V come as boxes of pages by tensor copies where the pages allow it, else by 128 threads that convert. Blocks of 8 rows x
// 64 columns, swizzled by 128 bytes, those of a group of eight rows one after the other.
#pragma once
#include "attention_items.cuh"

namespace pk {
namespace hopper {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Q of an item into a buffer, by kWarps warps of which this is warp `w`: 32 rows at a time, whose places the lanes find
// together. Loads must be in flight together (one after the other they take longer than a short item): none is behind a branch. kIsF16: beside keys in F16,
// where q is usually F16, too, and else BF16.
template <int kD, bool kHalf, int kWarps, bool kIsF16>
__device__ __forceinline__ void load_q(const AttentionArguments &a, const TileItem &item, uint8_t *to, int w) {
    constexpr int kPieces = kD / 8, kBatch = 4;
    const int lane = threadIdx.x & 31;
    const bool wide = a.q_format == (kIsF16 ? PK_F16 : PK_BF16) && a.q_stride % 8 == 0 && a.head_width % 8 == 0 && reinterpret_cast<uintptr_t>(a.q) % 16 == 0;
    const bf16 *q = static_cast<const bf16 *>(a.q);  // or as many F16
#pragma unroll 1
    for (int first = w * 32; first < kPairs; first += kWarps * 32) {
        const int64_t mine = row_of_pair(a, item, item.first_pair + first + lane, a.q_stride, a.head_width);
        auto place = [&](int j, int *row, int *piece) -> int64_t {  // of the j-th piece of this lane: where it is, or -1
            const int i = j * 32 + lane;
            *row = i / kPieces;
            *piece = i % kPieces;
            const int64_t begin = __shfl_sync(~0u, mine, *row);
            return begin >= 0 && *piece * 8 < a.head_width ? begin + *piece * 8 : -1;
        };
        int row, piece;
        if (!wide) {
#pragma unroll 1
            for (int j = 0; j < kPieces; ++j) {
                const int64_t from = place(j, &row, &piece);
                uint32_t *words = reinterpret_cast<uint32_t *>(to + block_offset<kD>(first + row, piece));
#pragma unroll 1
                for (int e = 0; e < 4; ++e) {
                    if constexpr (kIsF16) {
                        words[e] = from >= 0 ? pack2<true>(load_as_f32(a.q, from + 2 * e, a.q_format), load_as_f32(a.q, from + 2 * e + 1, a.q_format)) : 0;
                    } else {
                        const uint32_t v = from >= 0 ? load_q_pair(a, from + 2 * e) : 0;
                        words[e] = kHalf ? pack2<true>(low_f32(v), high_f32(v)) : v;
                    }
                }
            }
        } else if constexpr (kHalf && !kIsF16) {
#pragma unroll 1
            for (int j = 0; j < kPieces; j += kBatch) {
                uint4 v[kBatch];
#pragma unroll
                for (int b = 0; b < kBatch; ++b) {
                    const int64_t from = place(j + b, &row, &piece);
                    v[b] = *reinterpret_cast<const uint4 *>(q + (from >= 0 ? from : 0));
                    if (from < 0) v[b] = make_uint4(0, 0, 0, 0);
                }
#pragma unroll
                for (int b = 0; b < kBatch; ++b) *reinterpret_cast<uint4 *>(to + block_offset<kD>(first + ((j + b) * 32 + lane) / kPieces, ((j + b) * 32 + lane) % kPieces)) = to_math<true>(v[b]);
            }
        } else {
#pragma unroll 4
            for (int j = 0; j < kPieces; ++j) {
                const int64_t from = place(j, &row, &piece);
                copy16_async(shared_address(to) + block_offset<kD>(first + row, piece), q + (from >= 0 ? from : 0), from >= 0);
            }
        }
    }
    commit_async();
    wait_async<0>();
}

// Sixteen e4m3 as f16.
__device__ __forceinline__ void widen(uint4 w, uint4 (&out)[2]) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    uint32_t h[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const __half2_raw v = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(words[i >> 1] >> (16 * (i & 1)) & 0xffff), __NV_E4M3);
        h[i] = *reinterpret_cast<const uint32_t *>(&v);
    }
    out[0] = make_uint4(h[0], h[1], h[2], h[3]);
    out[1] = make_uint4(h[4], h[5], h[6], h[7]);
}

// One tile of K or V by 128 threads that convert (F32, FP8) or copy (the others). Positions outside [row_first, kv_end) become
// zeros; their loads go to a position inside. Batches of loads are in flight together.
template <int kD, bool kHalf>
__device__ void load_tile(const AttentionArguments &a, const TileItem &item, int first, bool is_v, uint8_t *to, int i) {
    constexpr int kPieces = kD / 8, kPer = kTile<kD> * kPieces / 128;
    const int width = is_v ? a.v_width : a.head_width;
    const uint8_t *base = a.kv + (is_v ? a.v_offset : a.k_offset);
    auto find = [&](int row, int64_t *element) -> const uint8_t * {  // the page of a row, and the first element of the row in it
        const int p = min(max(first + row, item.row_first), item.kv_end - 1), page = page_of(a, p);
        *element = (static_cast<int64_t>(item.head) * a.page_tokens + p - page * a.page_tokens) * width;
        return base + static_cast<int64_t>(item.pages[page]) * a.page_stride;
    };
    auto inside = [&](int row) { return first + row >= item.row_first && first + row < item.kv_end; };
    int64_t element;
    if (a.kv_format == PK_FP8_E4M3) {
        constexpr int kWide = kD / 16, kLoads = kTile<kD> * kWide / 128, kBatch = kLoads % 4 ? 3 : 4;
#pragma unroll 1
        for (int j = 0; j < kLoads; j += kBatch) {
            uint4 v[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int k = (j + b) * 128 + i, row = k / kWide, piece = k % kWide;
                const uint8_t *page = find(row, &element);
                v[b] = *reinterpret_cast<const uint4 *>(page + element + (piece * 16 < width ? piece * 16 : 0));
                if (!inside(row) || piece * 16 >= width) v[b] = make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int k = (j + b) * 128 + i, row = k / kWide, piece = k % kWide;
                uint4 w[2];
                widen(v[b], w);
                if constexpr (kHalf) {
                    *reinterpret_cast<uint4 *>(to + block_offset<kD>(row, 2 * piece)) = w[0];
                    *reinterpret_cast<uint4 *>(to + block_offset<kD>(row, 2 * piece + 1)) = w[1];
                }
            }
        }
    } else if (a.kv_format == PK_F32) {
        constexpr int kBatch = kPer % 4 ? 2 : 4;
#pragma unroll 1
        for (int j = 0; j < kPer; j += kBatch) {
            float4 v[kBatch][2];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int k = (j + b) * 128 + i, row = k / kPieces, piece = k % kPieces;
                const float4 *from = reinterpret_cast<const float4 *>(find(row, &element));
                from += (element + (piece * 8 < width ? piece * 8 : 0)) / 4;
                v[b][0] = from[0];
                v[b][1] = from[1];
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int k = (j + b) * 128 + i, row = k / kPieces, piece = k % kPieces;
                uint4 w = make_uint4(pack_bf16(v[b][0].x, v[b][0].y), pack_bf16(v[b][0].z, v[b][0].w), pack_bf16(v[b][1].x, v[b][1].y), pack_bf16(v[b][1].z, v[b][1].w));
                if (!inside(row) || piece * 8 >= width) w = make_uint4(0, 0, 0, 0);
                *reinterpret_cast<uint4 *>(to + block_offset<kD>(row, piece)) = w;
            }
        }
    } else {
#pragma unroll 4
        for (int j = 0; j < kPer; ++j) {
            const int k = j * 128 + i, row = k / kPieces, piece = k % kPieces;
            const bool ok = inside(row) && piece * 8 < width;
            const uint8_t *page = find(row, &element);
            copy16_async(shared_address(to) + block_offset<kD>(row, piece), page + (element + (ok ? piece * 8 : 0)) * 2, ok);
        }
        commit_async();
        wait_async<0>();
    }
}

template <int kD, bool kHalf>
__device__ void produce_converted(const AttentionArguments &a, uint8_t *shared, const Work &work, Barriers &b, TileItem *items) {
    RingTurn<kQBuffers<kD>> q;
    RingTurn<kStages> k, v;
    const int tid = threadIdx.x;
    for (int n = 0; n < work.counts->n_items; ++n) {
        const TileItem &item = next_item<kD>(a, work, b, items, n);
        const int first = first_of_tiles<kD>(a, item), n_steps = (item.kv_end - first + kTile<kD> - 1) / kTile<kD>;
        barrier_wait(&b.q_empty[q.stage], q.phase ^ 1);
        if (kHalf && a.kv_format == PK_F16) load_q<kD, kHalf, 4, true>(a, item, shared + q.stage * kQBytes<kD>, tid >> 5);
        else load_q<kD, kHalf, 4, false>(a, item, shared + q.stage * kQBytes<kD>, tid >> 5);
        fence_async_proxy();
        barrier_arrive(&b.q_full[q.stage]);
        q.advance();
        for (int step = 0; step <= n_steps; ++step) {
            if (step < n_steps) {
                barrier_wait(&b.k_empty[k.stage], k.phase ^ 1);
                load_tile<kD, kHalf>(a, item, first + (n_steps - 1 - step) * kTile<kD>, false, shared + kRingAt<kD> + k.stage * kPartBytes<kD>, tid);
                fence_async_proxy();
                barrier_arrive(&b.k_full[k.stage]);
                k.advance();
            }
            if (step > 0) {
                barrier_wait(&b.v_empty[v.stage], v.phase ^ 1);
                load_tile<kD, kHalf>(a, item, first + (n_steps - step) * kTile<kD>, true, shared + kRingAt<kD> + (kStages + v.stage) * kPartBytes<kD>, tid);
                fence_async_proxy();
                barrier_arrive(&b.v_full[v.stage]);
                v.advance();
            }
        }
    }
}

// FP8: warp 0 has the bytes of the next operand copied into a stage, a box a page, while all warps widen the one before it.
// An item's operands are K of its first tile, then K of the next one and V of the one before in turn, and V of the last.
template <int kD>
__device__ void produce_widened(const AttentionArguments &a, const Maps &maps, uint8_t *shared, const Work &work, Barriers &b, TileItem *items) {
    constexpr int kT = kTile<kD>, kWide = kD / 16, kLoads = kT * kWide / 128;
    const int tid = threadIdx.x, rows = min(a.page_tokens, kT), n_boxes = kT / rows, n_items = work.counts->n_items;
    uint8_t *stage = shared + kQBytes<kD>;
    auto operand = [](int index, int n_steps, int *step) {  // whether it is V, and of which tile
        const bool is_last = index == 2 * n_steps - 1;
        *step = is_last ? n_steps - 1 : (index + 1) / 2 - (index > 0 && !(index & 1));
        return is_last || (index > 0 && !(index & 1));
    };
    auto steps_of = [&](const TileItem &item) { return (item.kv_end - first_of_tiles<kD>(a, item) + kT - 1) / kT; };
    auto publish = [&](int n) {
        items[n % kItems] = find_item<kD>(a, work, n);
        barrier_arrive(&b.item_full[n % kItems]);
    };
    // Of warp 0: the operand that is asked for next, and the page of this lane's box in it.
    int ask_n = 0, ask_index = 0, tile = 0, page = 0;
    bool ask_v = false;
    auto look = [&] {
        if (ask_n >= n_items) return;
        if (ask_index == 0) barrier_wait(&b.item_full[ask_n % kItems], (ask_n / kItems) & 1);
        const TileItem &item = items[ask_n % kItems];
        const int n_steps = steps_of(item), low = item.row_first >> a.page_shift, high = (item.row_end - 1) >> a.page_shift;
        int step;
        ask_v = operand(ask_index, n_steps, &step);
        tile = first_of_tiles<kD>(a, item) + (n_steps - 1 - step) * kT;
        page = tid < n_boxes ? item.pages[min(max((tile + tid * rows) >> a.page_shift, low), high)] : 0;
    };
    auto ask = [&](int buffer) {
        if (ask_n >= n_items) return;
        const TileItem &item = items[ask_n % kItems];
        if (tid == 0) barrier_expect(&b.raw[buffer], kT * kD);
        __syncwarp();
        if (tid < n_boxes)
            copy_rows(shared_address(stage) + buffer * kT * kD + tid * rows * kD, ask_v ? &maps.v : &maps.k, item.head * a.page_tokens + ((tile + tid * rows) & (a.page_tokens - 1)), page, &b.raw[buffer]);
        if (++ask_index == 2 * steps_of(item)) {
            ask_index = 0;
            ++ask_n;
        }
        look();
    };
    if (n_items == 0) return;
    if (tid == 32) publish(0);
    if (tid < 32) {
        look();
        ask(0);
    }
    RingTurn<1> q;
    RingTurn<2> raw;
    RingTurn<kStages> k, v;
#pragma unroll 1
    for (int n = 0; n < n_items; ++n) {
        if (tid == 32 && n + 1 < n_items) publish(n + 1);
        if (n == 0 && tid < 32) ask(1);
        barrier_wait(&b.item_full[n % kItems], (n / kItems) & 1);
        const TileItem &item = items[n % kItems];
        const int first = first_of_tiles<kD>(a, item), n_steps = steps_of(item);
        barrier_wait(&b.q_empty[0], q.phase ^ 1);
        load_q<kD, true, 4, false>(a, item, shared, tid >> 5);
        fence_async_proxy();
        barrier_arrive(&b.q_full[0]);
        q.advance();
#pragma unroll 1
        for (int index = 0; index < 2 * n_steps; ++index) {
            int step;
            const bool is_v = operand(index, n_steps, &step);
            const int at = first + (n_steps - 1 - step) * kT;
            const RingTurn<kStages> ring = is_v ? v : k;
            barrier_wait(&b.raw[raw.stage], raw.phase);
            barrier_wait(is_v ? &b.v_empty[ring.stage] : &b.k_empty[ring.stage], ring.phase ^ 1);
            const uint8_t *from = stage + raw.stage * kT * kD;
            uint8_t *to = shared + kRingAt<kD> + ((is_v ? kStages : 0) + ring.stage) * kPartBytes<kD>;
            // Unwritten values may be no numbers, which no weight of zero cancels: they become zeros.
            const bool is_edge = is_v && (at < item.row_first || at + kT > item.row_end);
            // Eight neighbouring threads have half a row and the other half of the next one: so all banks take part where they load and where they store.
            const int in = tid % (2 * kWide), odd = in / (kWide / 2) & 1, row = tid / (2 * kWide) * 2 + odd, piece = in % (kWide / 2) + kWide / 2 * (odd ^ in / kWide);
            constexpr int kRows = 128 / kWide;  // of a load of all threads: whole blocks of eight
            static_assert(kRows % 8 == 0);
            uint4 x[kLoads];
#pragma unroll
            for (int j = 0; j < kLoads; ++j) x[j] = *reinterpret_cast<const uint4 *>(from + (row + j * kRows) * kD + 16 * piece);
            if (is_edge) {
#pragma unroll
                for (int j = 0; j < kLoads; ++j)
                    if (const int p = at + row + j * kRows; p < item.row_first || p >= item.row_end) x[j] = make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                uint4 w[2];
                widen(x[j], w);
#pragma unroll
                for (int half = 0; half < 2; ++half) *reinterpret_cast<uint4 *>(to + block_offset<kD>(row, 2 * piece + half) + j * kRows / 8 * (kD / 64 * 1024)) = w[half];
            }
            fence_async_proxy();
            barrier_arrive(is_v ? &b.v_full[ring.stage] : &b.k_full[ring.stage]);
            if (is_v) v.advance(); else k.advance();
            named_wait<128>(4);  // everybody has read the stage
            if (tid < 32) ask(raw.stage);
            raw.advance();
        }
    }
}

// Warp 0: boxes of pages, K of a tile and then V of the tile before it, over the borders of items. A lane a page; page numbers are
// asked for one tile ahead.
template <int kD>
__device__ void produce_copied(const AttentionArguments &a, const Maps &maps, uint8_t *shared, Barriers &b, const TileItem *items, int n_items) {
    constexpr int kT = kTile<kD>;
    RingTurn<kStages> k, v;
    uint32_t edge = 0;
    const int lane = threadIdx.x, rows = min(a.page_tokens, kT), n_boxes = kT / rows;
    const uint32_t ring = shared_address(shared) + kRingAt<kD>;
    int n = 0, step = 0, n_steps, first, head, page;
    auto page_at = [&](const TileItem &item, int at) {  // of this lane's box in the tile that begins at `at`
        const int low = item.row_first >> a.page_shift, high = (item.row_end - 1) >> a.page_shift;
        return lane < n_boxes ? item.pages[min(max((at + lane * rows) >> a.page_shift, low), high)] : 0;
    };
    auto open = [&] {  // the n-th item, and the page of its first tile
        barrier_wait(&b.item_full[n % kItems], (n / kItems) & 1);
        const TileItem &item = items[n % kItems];
        first = first_of_tiles<kD>(a, item);
        n_steps = (item.kv_end - first + kT - 1) / kT;
        head = item.head * a.page_tokens;
        page = page_at(item, first + (n_steps - 1) * kT);
    };
    auto box = [&](int tile, int head_row, int number, const CUtensorMap *map, uint32_t to, uint64_t *barrier) {
        if (lane == 0) barrier_expect(barrier, kPartBytes<kD>);
        __syncwarp();
        if (lane < n_boxes) copy_page(to + lane * rows * kD * 2, map, (head_row + ((tile + lane * rows) & (a.page_tokens - 1))) >> 3, number, barrier);
    };
    if (n_items == 0) return;
    open();
    int tile_before = -1, head_before = 0, page_before = 0, low_before = 0, high_before = 0;
#pragma unroll 1
    for (;;) {
        const bool more = n < n_items;
        const int tile = first + (n_steps - 1 - step) * kT;
        if (more) {
            barrier_wait(&b.k_empty[k.stage], k.phase ^ 1);
            box(tile, head, page, &maps.k, ring + k.stage * kPartBytes<kD>, &b.k_full[k.stage]);
            k.advance();
        }
        if (tile_before >= 0) {
            // Unwritten values may be no numbers, which no weight of zero cancels: they become zeros.
            const bool is_edge = tile_before < low_before || tile_before + kT > high_before;
            uint64_t *barrier = is_edge ? &b.edge : &b.v_full[v.stage];
            const int v_at = (kStages + v.stage) * kPartBytes<kD>;
            barrier_wait(&b.v_empty[v.stage], v.phase ^ 1);
            box(tile_before, head_before, page_before, &maps.v, ring + v_at, barrier);
            if (is_edge) {
                barrier_wait(barrier, edge);
                edge ^= 1;
#pragma unroll 1
                for (int r = 0; r < kT; ++r) {
                    if (tile_before + r >= low_before && tile_before + r < high_before) continue;
                    if (lane < kD / 8) *reinterpret_cast<uint4 *>(shared + kRingAt<kD> + v_at + block_offset<kD>(r, lane)) = make_uint4(0, 0, 0, 0);
                }
                fence_async_proxy();
                __syncwarp();
                if (lane == 0) barrier_arrive(&b.v_full[v.stage]);
            }
            v.advance();
        }
        if (!more) return;
        const TileItem &item = items[n % kItems];
        tile_before = tile;
        head_before = head;
        page_before = page;
        low_before = item.row_first;
        high_before = item.row_end;
        if (++step < n_steps) {
            page = page_at(item, tile - kT);
        } else {
            step = 0;
            if (++n < n_items) open();
        }
    }
}

// Warps 1 to 3 beside produce_copied.
template <int kD, bool kHalf>
__device__ void produce_q(const AttentionArguments &a, uint8_t *shared, const Work &work, Barriers &b, TileItem *items) {
    RingTurn<kQBuffers<kD>> q;
    for (int n = 0; n < work.counts->n_items; ++n) {
        const TileItem &item = next_item<kD>(a, work, b, items, n);
        barrier_wait(&b.q_empty[q.stage], q.phase ^ 1);
        load_q<kD, kHalf, 3, kHalf>(a, item, shared + q.stage * kQBytes<kD>, (threadIdx.x >> 5) - 1);
        fence_async_proxy();
        barrier_arrive(&b.q_full[q.stage]);
        q.advance();
    }
}

#endif

}  // namespace hopper
}  // namespace pk
