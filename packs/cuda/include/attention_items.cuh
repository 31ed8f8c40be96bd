// What blocks of Hopper's prefill attention (prefill_wgmma.cu) do and where: places in shared memory, and the work items with their tiles,
// those of shared prefixes among them.
#pragma once
#include "attention_pieces.cuh"
#include "attention_share.cuh"
#include "attention_tiles.cuh"
#include "ring_turn.cuh"
#include "wgmma_attention.cuh"

namespace pk {
namespace hopper {

constexpr int kThreads = 384, kPairs = 128, kStages = 2, kItems = 8;  // items known: those ahead, and the one whose rows are being stored
constexpr float kSlack = 8.0f;
template <int kD>
constexpr int kTile = kD <= 128 ? 128 : 64;
template <int kD>
constexpr int kQBuffers = kD <= 128 ? 2 : 1;

struct Maps {
    CUtensorMap k, v;
};

// Offset of a piece of eight elements: blocks of 8 rows x 64 columns, swizzled.
template <int kD>
__device__ __forceinline__ uint32_t block_offset(int row, int piece) {
    return (row >> 3) * (kD / 64 * 1024) + (piece >> 3) * 1024 + (row & 7) * 128 + (((piece ^ row) & 7) << 4);
}

template <int kD>
constexpr int kQBytes = kPairs * kD * 2;
template <int kD>
constexpr int kPartBytes = kTile<kD> * kD * 2;
// FP8 comes through a stage of raw bytes: the second buffer of Q, which that producer does without.
template <int kD>
constexpr bool kHasStage = kD <= 128 && kTile<kD> * kD * 2 <= kQBytes<kD>;
template <int kD>
constexpr int kRingAt = kQBuffers<kD> * kQBytes<kD>;
template <int kD>
constexpr int kStageAt = kRingAt<kD> + 2 * kStages * kPartBytes<kD>;  // 2 kB a consumer warp
template <int kD>
constexpr int kEndsAt = kStageAt<kD> + 8 * 2048;

struct Barriers {
    uint64_t q_full[2], q_empty[2], k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages], raw[2], edge, item_full[kItems];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The first position of an item's tiles, and their number. Pages are not cut by tiles.
template <int kD>
__device__ __forceinline__ int first_of_tiles(const AttentionArguments &a, const TileItem &item) {
    const int whole = min(a.page_tokens, kTile<kD>);
    return a.page_shift >= 0 ? item.kv_first & ~(whole - 1) : item.kv_first;
}

template <bool kHalf>
__device__ __forceinline__ uint32_t pack2(float x, float y) {
    if constexpr (kHalf) {
        const __half2 v = __floats2half2_rn(x, y);
        return *reinterpret_cast<const uint32_t *>(&v);
    } else {
        return pack_bf16(x, y);
    }
}

template <bool kHalf>
__device__ __forceinline__ uint4 to_math(uint4 v) {  // eight bf16
    if constexpr (kHalf)
        return make_uint4(pack2<true>(low_f32(v.x), high_f32(v.x)), pack2<true>(low_f32(v.y), high_f32(v.y)), pack2<true>(low_f32(v.z), high_f32(v.z)), pack2<true>(low_f32(v.w), high_f32(v.w)));
    else
        return v;
}

// Items of shared prefixes: (group, KV head, tile of pairs, piece of the positions). Their number; running sums into `ends`.
__device__ __forceinline__ int schedule_shared(const AttentionArguments &a, int *ends, int *warps, int *total) {
    int n_items = 0;
    const int n_groups = a.share_head->n_groups;
    for (int base = 0; base < n_groups; base += kThreads) {
        const int g = base + threadIdx.x;
        const int end = block_scan(g < n_groups ? (a.share_groups[g].pairs + kPairs - 1) / kPairs * a.n_kv_heads * a.share_groups[g].n_pieces : 0, warps) + n_items;
        if (g < n_groups) ends[g] = end;
        __syncthreads();
        if (threadIdx.x == kThreads - 1) *total = end;
        __syncthreads();
        n_items = *total;
        __syncthreads();
    }
    return n_items;
}

__device__ __forceinline__ TileItem find_shared(const AttentionArguments &a, const int *ends, int index) {
    int low = 0;
    while (ends[low] <= index) ++low;
    const ShareGroup g = a.share_groups[low];
    const int local = index - (low ? ends[low - 1] : 0), piece = local % g.n_pieces, rest = local / g.n_pieces;
    TileItem item = {};
    item.members = a.share_members + g.first;
    item.pages = a.page_table + static_cast<int64_t>(a.row_slot[item.members[0]]) * a.slot_pages;
    item.head = rest % a.n_kv_heads;
    item.first_pair = rest / a.n_kv_heads * kPairs;
    item.n_pairs = g.pairs;
    item.kv_first = piece * g.length;
    item.kv_end = min(g.tokens, item.kv_first + g.length);
    item.row_end = g.tokens;
    item.part = g.part + (piece * a.n_kv_heads + item.head) * g.pairs;
    return item;
}

// What all blocks do together: items of shared prefixes, tiles, or pieces of tiles (null: they are whole).
struct Counts {
    int n_items, n_blocks;  // of this block; at work
};
struct Work {
    const int *ends;
    int n_tiles;           // of all blocks
    const Counts *counts;
    const Pieces *pieces;
};

__device__ __forceinline__ int nth_of_whole(int n, int n_blocks) { return n * n_blocks + ((n & 1) ? n_blocks - 1 - blockIdx.x : blockIdx.x); }
__device__ __forceinline__ int n_whole(const AttentionArguments &a, const Work &work) { return a.share_head != nullptr ? work.n_tiles : work.n_tiles * a.n_kv_heads; }

// The n-th item of this block, which has so many.
template <int kD>
__device__ __forceinline__ TileItem find_item(const AttentionArguments &a, const Work &work, int n) {
    if (work.pieces != nullptr) return piece_at<kPairs, kTile<kD>>(a, *work.pieces, n);
    const int index = nth_of_whole(n, work.counts->n_blocks);
    return a.share_head != nullptr ? find_shared(a, work.ends, index) : find_tile<kPairs>(a, work.ends, work.n_tiles, index);
}

// The n-th item where all warps of the block see it; one thread looks for it.
template <int kD>
__device__ __forceinline__ const TileItem &next_item(const AttentionArguments &a, const Work &work, Barriers &b, TileItem *items, int n) {
    if (threadIdx.x == 32) {
        items[n % kItems] = find_item<kD>(a, work, n);
        barrier_arrive(&b.item_full[n % kItems]);
    }
    barrier_wait(&b.item_full[n % kItems], (n / kItems) & 1);
    return items[n % kItems];
}

// Where a pair's row of q (or of out) begins; -1 outside the item.
__device__ __forceinline__ int64_t row_of_pair(const AttentionArguments &a, const TileItem &item, int pair, int64_t stride, int width) {
    if (pair >= item.n_pairs) return -1;
    const int group = a.n_heads / a.n_kv_heads, in = pair / group, token = item.members ? a.row_start[item.members[in]] : item.start + in;
    return static_cast<int64_t>(token) * stride + static_cast<int64_t>(item.head * group + pair - in * group) * width;
}

#endif

}  // namespace hopper
}  // namespace pk
