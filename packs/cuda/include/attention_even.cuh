// Work of the decode kernel's first form (decode.cu): who takes which (row, KV head, tile of 16 (token, head) pairs), or what part of it.
//
// Where all pairs of a head are one tile, a team of one, two or four warps takes whole heads, so that there is nothing to join with others;
// or, where heads are few and long, as many blocks take each as there are. Else, and when rows are of very unlike lengths, every block takes
// an equal run of groups of positions in the order row, head, tile (StreamK). Every lane works out what one of these takes.
#pragma once
#include "attention_beside.cuh"
#include "attention_ring.cuh"

namespace pk {
namespace ring {

constexpr int kLeast = 128;           // positions worth a block
constexpr int kSums = 6;              // ints of a warp that EvenWork counts by
// Times on an H200 in 10 ns: of a group that a warp goes through by itself, of one that a block gets while all read, of one more head of a
// team, of a join of blocks. Of what the longest head takes beyond the mean, half is lost.
constexpr int kGroupTime = 85, kShareTime = 49, kHeadTime = 200, kJoinTime = 250, kNever = 1 << 25;

// kBeside: prefill may run at the same time.
template <int kSize, bool kBeside>
struct EvenWork {
    const AttentionArguments &a;
    int *ends;
    int at = 0, until = 0, per = 0;   // heads, or (per > 0) groups
    int parts = 1, shift = 2;         // of a head; log2 of a team's warps
    bool is_single = false;           // rows that have work have one token each, and a key head eight queries at most

    struct RowWork {
        int first, end, tiles, groups;  // visible positions, tiles of pairs, groups of positions
    };
    __device__ __forceinline__ RowWork row_work(int start, int next, int position, int flags, int shared) const {
        RowWork w;
        const int n = next - start, group = a.n_heads / a.n_kv_heads;
        w.first = a.window > 0 ? max(0, position - a.window + 1) : shared;
        w.end = position + n;
        w.tiles = is_decode_row(n, group) && !(flags & PK_ROW_DEAD) ? (n * group + 15) / 16 : 0;
        w.groups = (w.end + kSize - 1) / kSize - w.first / kSize;
        return w;
    }
    __device__ __forceinline__ RowWork read_row(int r, int *start, int *position) const {
        *start = a.row_start[r];
        *position = a.row_position[r];
        return row_work(*start, a.row_start[r + 1], *position, a.row_flags[r], a.share_rows != nullptr ? a.share_rows[r].tokens : 0);
    }

    // Groups in all, those of the longest head, and the most (token, head) pairs that a row has for a KV head; what is asked of prefill. `sums`: six ints a warp.
    template <int kT>
    __device__ __forceinline__ int count(int *sums, int *longest, int *n_pairs, BesideLoad *load) const {
        int total = 0, most = 0, pairs = 0;
        *load = {};
        const int group = a.n_heads / a.n_kv_heads;
        for (int r = threadIdx.x; r < a.max_rows; r += kThreads) {  // loaded before the number of rows is known
            int start, position;
            const RowWork w = read_row(r, &start, &position);
            asm volatile("" ::"r"(a.row_slot[r]));  // next() will find it near
            if (r >= a.info->n_rows) continue;
            if constexpr (kBeside) load->template add<kT>(a, w.end - position, position, a.row_flags[r], a.share_rows != nullptr ? a.share_rows[r].tokens : 0);
            if (w.tiles == 0) continue;
            total += w.tiles * w.groups;
            most = max(most, w.groups);
            pairs = max(pairs, (w.end - position) * group);
        }
        total = __reduce_add_sync(~0u, total);
        most = __reduce_max_sync(~0u, most);
        pairs = __reduce_max_sync(~0u, pairs);
        if constexpr (kBeside) load->sum_warp();
        if ((threadIdx.x & 31) == 0) {
            int *mine = sums + kSums * (threadIdx.x >> 5);
            mine[0] = total;
            mine[1] = most;
            mine[2] = pairs;
            if constexpr (kBeside) {
                mine[3] = load->seen;
                mine[4] = load->tiles;
                mine[5] = load->steps;
            }
        }
        __syncthreads();
        total = *longest = *n_pairs = 0;
        *load = {};
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
            total += sums[kSums * i];
            *longest = max(*longest, sums[kSums * i + 1]);
            *n_pairs = max(*n_pairs, sums[kSums * i + 2]);
            if constexpr (kBeside) {
                load->seen += sums[kSums * i + 3];
                load->tiles += sums[kSums * i + 4];
                load->steps += sums[kSums * i + 5];
            }
        }
        return total * a.n_kv_heads;
    }

    // Running sums of groups per row into `ends`.
    __device__ __forceinline__ void sum_rows(int *sums) {
        const int n_rows = a.info->n_rows;
        for (int base = 0, carried = 0; base < n_rows; base += kThreads) {
            const int r = base + threadIdx.x;
            int work = 0;
            if (r < n_rows) {
                int start, position;
                const RowWork w = read_row(r, &start, &position);
                work = w.tiles * w.groups * a.n_kv_heads;
            }
            const int end = block_scan(work, sums) + carried;
            if (r < n_rows) ends[r] = end;
            if (threadIdx.x == kThreads - 1) sums[kWarps] = end;
            __syncthreads();
            carried = sums[kWarps];
        }
    }

    // All threads. least_shift: log2 of the fewest warps of a team; shift: of an element's bytes. `sums`: six ints a warp.
    template <int kD>
    __device__ __forceinline__ void begin(int *sums, int least_shift, int element_shift) {
        constexpr int kT = kD <= 128 ? 128 : 64;
        int longest, pairs;
        BesideLoad load;
        const int total = count<kT>(sums, &longest, &pairs, &load), n_heads = a.info->n_rows * a.n_kv_heads, lane = threadIdx.x & 31;
        if (total == 0) return;
        is_single = pairs == a.n_heads / a.n_kv_heads && pairs <= 8;
        constexpr int kAbreast = kD <= 128 ? 2 : 1;
        int n_blocks = gridDim.x;
        if (kBeside && load.tiles > 0) {
            const int n = n_blocks / kAbreast, taken = load.prefill_blocks<kD, kT>(a, n, a.n_kv_heads * (a.head_width + a.v_width) << element_shift);
            if (taken < n) n_blocks = (n - taken) * kAbreast;
        }
        // Lanes 0 to 2: teams of four, two, one warps. 3: several blocks a head. 4: equal runs.
        const int warps = lane < 3 ? 4 >> lane : 4, n_takers = lane < 3 ? n_blocks << lane : n_blocks;
        const int each = lane < 3 ? quotient(n_heads - 1, n_takers) + 1 : 1;  // heads
        const int n_parts = lane == 3 ? min(quotient(n_blocks, n_heads), longest * kSize / kLeast) : 1;
        const int together = kShareTime * (quotient(total - 1, n_blocks) + 1), mean = quotient(total, n_heads);
        int time = max(together, kGroupTime * each * (quotient(longest - 1, n_parts * warps) + 1)) + kGroupTime * each * quotient(longest - mean, 2 * n_parts * warps) + kHeadTime * (each - 1);
        if (lane == 3) time += kJoinTime;
        if (lane == 4) time = max(together, kShareTime * kLeast / kSize) + 2 * kJoinTime + kHeadTime;
        const bool can = lane < 3 ? 2 - lane >= least_shift && pairs <= 16 >> lane : lane == 3 ? n_parts > 1 && pairs <= 16 : lane == 4;
        const int best = __reduce_min_sync(~0u, (can ? min(time, kNever) : kNever + 1) << 5 | lane) & 31;
        if (best == 4) {
            per = max(kLeast / kSize, (total + n_blocks * kWarps - 1) / (n_blocks * kWarps) * kWarps);
            sum_rows(sums);
            at = min(total, static_cast<int>(blockIdx.x) * per);
            until = min(total, at + per);
            return;
        }
        shift = best < 3 ? 2 - best : 2;
        parts = __shfl_sync(~0u, n_parts, best);
        const int heads = __shfl_sync(~0u, each, best), taker = parts > 1 ? quotient(blockIdx.x, parts) : (static_cast<int>(blockIdx.x) << (2 - shift)) + (static_cast<int>(threadIdx.x) >> (5 + shift));
        at = min(n_heads, taker * heads);
        until = min(n_heads, at + heads);
    }

    // The next segment of the caller's team; false: there is none.
    __device__ __forceinline__ bool next(Segment &s) {
        int row, which, in = 0, whole = 0;
        RowWork w;
        for (;; ++at) {
            if (at >= until) return false;
            if (per == 0) {
                row = quotient(at, a.n_kv_heads);
                which = at - row * a.n_kv_heads;
            } else {
                int low = 0, high = a.info->n_rows - 1;
                while (low < high) {
                    const int mid = (low + high) >> 1;
                    if (ends[mid] > at) high = mid; else low = mid + 1;
                }
                row = low;
            }
            w = read_row(row, &s.start, &s.position);
            if (w.tiles > 0) break;  // (per > 0: always)
        }
        s.n_pairs = (w.end - s.position) * (a.n_heads / a.n_kv_heads);
        s.share = a.share_rows != nullptr ? a.share_rows[row] : ShareRow{};
        s.pages = a.page_table + static_cast<int64_t>(a.row_slot[row]) * a.slot_pages;
        s.first = w.first;
        s.end = w.end;
        if (per == 0) {
            int n = 1, part = 0, begin = 0, end = w.groups;
            at += 1;
            if (parts > 1) {
                n = min(parts, w.groups);
                part = blockIdx.x - quotient(blockIdx.x, parts) * parts;
                if (part >= n) return false;
                begin = quotient(part * w.groups, n);
                if (part + 1 < n) end = quotient((part + 1) * w.groups, n);  // of the last one no float may lose a group
            }
            s.head = which;
            s.pair = 0;
            s.group = w.first / kSize + begin;
            s.n_groups = end - begin;
            s.block_first = blockIdx.x - part;
            s.block_last = s.block_first + n - 1;
            s.is_first = part == 0;
            return true;
        }
        const int local = at - (row ? ends[row - 1] : 0);
        which = local / w.groups;
        in = local - which * w.groups;
        whole = at - in;
        s.head = which / w.tiles;
        s.pair = (which - s.head * w.tiles) * 16;
        s.group = w.first / kSize + in;
        s.n_groups = min(w.groups - in, until - at);
        s.block_first = whole / per;
        s.block_last = (whole + w.groups - 1) / per;
        s.is_first = in == 0;
        at += s.n_groups;
        return true;
    }
};

}  // namespace ring
}  // namespace pk
