// Work items of the prefill kernels, and how a row's sum ends: shared by prefill.cu and prefill_wgmma.cu.
//
// An item is (row, KV head, tile of kPairs (token, head) pairs): heads that share a KV head share its loads. Every block
// derives the list from the row lengths in device memory; later tiles of a row come first, since they see more positions.
#pragma once
#include "attention.cuh"

namespace pk {

struct TileItem {
    const int32_t *pages;
    const int32_t *members;  // rows whose pairs these are, one token each; null: the pairs of one row
    int head, first_pair, n_pairs, start, position;
    int kv_first, kv_end;    // positions that some pair of the tile sees
    int row_first, row_end;  // positions that some token of the row sees: outside, pages may hold anything
    bool is_piece;           // some of the positions that the tile sees
    int part;                // with members, or of a piece: where the partial sums go
};

// Running sums of tiles per row into `ends`; returns their number. Called by all kThreads threads of the block.
template <int kThreads, int kPairs>
__device__ __forceinline__ int schedule_tiles(const AttentionArguments &a, int *ends, int *warps, int *total) {
    int n_tiles = 0;
    const int n_rows = a.info->n_rows;
    for (int base = 0; base < n_rows; base += kThreads) {
        const int r = base + threadIdx.x;
        const int end = block_scan(r < n_rows ? tiles_of<kPairs>(a, r) : 0, warps) + n_tiles;
        if (r < n_rows) ends[r] = end;
        __syncthreads();
        if (threadIdx.x == kThreads - 1) *total = end;
        __syncthreads();
        n_tiles = *total;
        __syncthreads();
    }
    return n_tiles;
}

// A tile of a row, all the positions that it sees.
template <int kPairs>
__device__ __forceinline__ TileItem tile_of_row(const AttentionArguments &a, int row, int head, int tile) {
    const int group = a.n_heads / a.n_kv_heads;
    TileItem item = {};
    item.head = head;
    item.first_pair = tile * kPairs;
    item.start = a.row_start[row];
    item.position = a.row_position[row];
    const int n_tokens = a.row_start[row + 1] - item.start;
    item.n_pairs = n_tokens * group;
    item.pages = a.page_table + static_cast<int64_t>(a.row_slot[row]) * a.slot_pages;
    item.kv_end = item.position + min(item.first_pair + kPairs - 1, item.n_pairs - 1) / group + 1;
    item.kv_first = a.window > 0 ? max(0, item.position + item.first_pair / group - a.window + 1) : 0;
    item.row_end = item.position + n_tokens;
    item.row_first = a.window > 0 ? max(0, item.position - a.window + 1) : 0;
    return item;
}

template <int kPairs>
__device__ __forceinline__ TileItem find_tile(const AttentionArguments &a, const int *ends, int n_tiles, int index) {
    const int of_all = n_tiles - 1 - index / a.n_kv_heads;
    int low = 0, high = a.info->n_rows - 1;
    while (low < high) {
        const int mid = (low + high) >> 1;
        if (ends[mid] > of_all) high = mid; else low = mid + 1;
    }
    return tile_of_row<kPairs>(a, low, index % a.n_kv_heads, of_all - (low ? ends[low - 1] : 0));
}

// Where an element of the q row of a pair lies.
__device__ __forceinline__ int64_t place_q(const AttentionArguments &a, const TileItem &item, int pair, int column) {
    const int group = a.n_heads / a.n_kv_heads;
    return static_cast<int64_t>(item.start + pair / group) * a.q_stride + (item.head * group + pair % group) * a.head_width + column;
}

// Two neighbours of the q row of a pair, as bf16; zeros outside.
__device__ __forceinline__ uint32_t pair_q(const AttentionArguments &a, const TileItem &item, int pair, int column) {
    if (pair >= item.n_pairs || column >= a.head_width) return 0;
    return load_q_pair(a, place_q(a, item, pair, column));
}

// What O of a pair is multiplied with at the end; the sink of its head joins the sum here.
__device__ __forceinline__ float last_factor(const AttentionArguments &a, int q_head, float top, float sum) {
    float f = 1.0f;
    if (a.sinks != nullptr) {
        const float sink = a.sinks[q_head] * kLog2e, joint = fmaxf(top, sink);
        f = power2(top - joint);
        sum = sum * f + power2(sink - joint);
    }
    return f * gain_of(a, q_head) / sum;
}

}  // namespace pk
