// Work of the decode kernel's second form (decode.cu, kCut): all rows of a step, cut at fixed positions of the sequence, so that what
// is added up with what, and in which order, depends on a token's own position alone.
//
// A segment is (row, KV head, tile of 16 (token, head) pairs, kCutPositions positions). While the segments of all rows have a place in
// memory each, every block takes an equal run of them; else blocks take whole tiles, last ones first, and keep the sums so far in a place
// of their own. A run's segments that a tile does not see are passed over; groups before a tile's window are masked, which changes no bit.
#pragma once
#include "attention_ring.cuh"

namespace pk {
namespace ring {

constexpr int kCutPositions = 512;

// Where a segment stands in its tile.
struct CutPlace {
    int segment;                    // in the list of all
    int first_segment, n_segments;  // of the tile, those it sees
    bool is_last, is_last_here;     // of the tile; of the tile in this block
};

template <int kSize>
struct CutWork {
    const AttentionArguments &a;
    int *ends;
    int at = 0, in = 0;            // the next segment; or the next tile and its next segment
    int total = 0, per = 0, begun = 0, until = 0;
    bool is_whole = false;         // blocks take whole tiles

    struct RowCut {
        int tiles, first, n_cuts;  // tiles of pairs, first cut, cuts
    };
    __device__ __forceinline__ RowCut cut_row(int start, int next, int position, int flags) const {
        const int n = next - start, group = a.n_heads / a.n_kv_heads, low = a.window > 0 ? max(0, position - a.window + 1) : 0;
        return {flags & PK_ROW_DEAD ? 0 : (n * group + 15) / 16, low / kCutPositions, (position + n + kCutPositions - 1) / kCutPositions - low / kCutPositions};
    }

    // Running sums per row of segments, or of tiles; returns their number.
    __device__ __forceinline__ int sum_rows(int *warps, bool of_tiles) {
        int carried = 0;
        const int n_rows = a.info->n_rows;
        for (int base = 0; base < n_rows; base += kThreads) {
            const int r = base + threadIdx.x;
            int work = 0;
            if (r < n_rows) {
                const RowCut c = cut_row(a.row_start[r], a.row_start[r + 1], a.row_position[r], a.row_flags[r]);
                work = c.tiles * a.n_kv_heads * (of_tiles ? 1 : c.n_cuts);
            }
            const int end = block_scan(work, warps) + carried;
            if (r < n_rows) ends[r] = end;
            if (threadIdx.x == kThreads - 1) warps[kWarps] = end;
            __syncthreads();
            carried = warps[kWarps];
        }
        return carried;
    }

    // False when this block has nothing to do. All threads.
    __device__ __forceinline__ bool begin(int *warps, int n_parts) {
        total = sum_rows(warps, false);
        is_whole = total > n_parts;
        if (is_whole) {
            __syncthreads();
            total = sum_rows(warps, true);
        }
        const int n_blocks = gridDim.x;
        per = (total + n_blocks - 1) / n_blocks;
        begun = at = is_whole ? blockIdx.x : min(total, static_cast<int>(blockIdx.x) * per);
        until = is_whole ? total : min(total, at + per);
        if (at >= until) return false;
        // Of a run, maybe no tile sees any segment.
        CutWork ahead = *this;
        Segment s;
        CutPlace place;
        return ahead.next(s, place);
    }

    // The next segment that its tile sees.
    __device__ __forceinline__ bool next(Segment &s, CutPlace &place) {
        while (at < until) {
            const int item = is_whole ? total - 1 - at : at;
            int low = 0, high = a.info->n_rows - 1;
            while (low < high) {
                const int mid = (low + high) >> 1;
                if (ends[mid] > item) high = mid; else low = mid + 1;
            }
            const int local = item - (low ? ends[low - 1] : 0), group = a.n_heads / a.n_kv_heads, start = a.row_start[low], position = a.row_position[low], after = a.row_start[low + 1];
            const RowCut c = cut_row(start, after, position, 0);
            const int tile = is_whole ? local : local / c.n_cuts, cut = is_whole ? in : local - tile * c.n_cuts;
            if (is_whole && ++in < c.n_cuts) {
            } else {
                at += is_whole ? gridDim.x : 1;
                in = 0;
            }
            const int n_pairs = (after - start) * group, head = tile / c.tiles, pair = (tile - head * c.tiles) * 16;
            // Positions that the tile sees.
            const int seen = position + min(pair + 15, n_pairs - 1) / group + 1, from = a.window > 0 ? max(0, position + pair / group - a.window + 1) : 0;
            const int first_cut = from / kCutPositions - c.first, end_cut = (seen + kCutPositions - 1) / kCutPositions - c.first;
            if (cut < first_cut || cut >= end_cut) continue;
            const int begin = (c.first + cut) * kCutPositions, low_at = max(begin, from / (kSize * kWarps) * (kSize * kWarps)), high_at = min(begin + kCutPositions, seen);
            s.pages = a.page_table + static_cast<int64_t>(a.row_slot[low]) * a.slot_pages;
            s.start = start;
            s.n_pairs = n_pairs;
            s.position = position;
            s.head = head;
            s.pair = pair;
            s.first = a.window > 0 ? max(0, position - a.window + 1) : 0;
            s.end = position + after - start;
            s.group = low_at / kSize;
            s.n_groups = (high_at - low_at + kSize - 1) / kSize;
            s.is_first = cut == first_cut;
            const int whole = item - cut + first_cut;
            s.block_first = is_whole ? 0 : whole / per;
            s.block_last = is_whole ? 0 : (item - cut + end_cut - 1) / per;
            place.segment = item;
            place.first_segment = whole;
            place.n_segments = end_cut - first_cut;
            place.is_last = cut == end_cut - 1;
            place.is_last_here = place.is_last || at >= until;
            return true;
        }
        return false;
    }
};

}  // namespace ring
}  // namespace pk
