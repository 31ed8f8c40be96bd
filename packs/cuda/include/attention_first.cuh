// What the warps of the decode kernel (src/attention/decode.cu) take first in a step of single tokens, found once for all layers (attention_plan.h).
//
// An entry a warp: its first segment, where its team goes on, whose plan it is, and the pages of its boxes, one a lane.
#pragma once
#include "attention_even.cuh"
#include "attention_plan.h"

namespace pk {
namespace ring {

// Rows of a program, seen by heads and pages alike.
struct PlanKey {
    int4 of;
    int2 too;
    __device__ __forceinline__ explicit PlanKey(const AttentionArguments &a) {
        const uint64_t info = reinterpret_cast<uint64_t>(a.info), table = reinterpret_cast<uint64_t>(a.page_table);
        of = make_int4(static_cast<int>(info), static_cast<int>(info >> 32), static_cast<int>(table), static_cast<int>(table >> 32));
        too = make_int2(a.n_heads << 16 | a.n_kv_heads, a.window);
    }
};

// False: the entry is another op's, or of rows that are cut into equal runs.
template <class Work>
__device__ __forceinline__ bool read_plan(const AttentionArguments &a, const int4 *mine, Segment &s, Work &work, bool &has_work, int &page) {
    const int4 x = __ldcg(mine), y = __ldcg(mine + 1), z = __ldcg(mine + 2), u = __ldcg(mine + 3), t = __ldcg(mine + 4), of = __ldcg(mine + 5), too = __ldcg(mine + 6);
    page = __ldcg(reinterpret_cast<const int *>(mine + 8) + (threadIdx.x & 31));
    s.start = x.x;
    s.n_pairs = x.y;
    s.position = x.z;
    s.head = x.w;
    s.pair = 0;
    s.first = y.x;
    s.end = y.y;
    s.group = y.z;
    s.n_groups = y.w;
    s.block_first = z.x;
    s.block_last = z.y;
    s.is_first = z.z;
    s.pages = a.page_table + static_cast<int64_t>(z.w) * a.slot_pages;
    has_work = u.x;
    work.shift = u.y;
    work.parts = u.z;
    work.at = u.w;
    work.until = t.x;
    const PlanKey key(a);
    return t.y == 0 && of.x == key.of.x && of.y == key.of.y && of.z == key.of.z && of.w == key.of.w && too.x == key.too.x && too.y == key.too.y;
}

// Of heads that are dealt out one a warp: which this warp takes (n_heads: none). Blocks that begin while the product in front runs, since it leaves them multiprocessors, are
// through first: theirs are the longest rows. The others get long and short ones. `ends`: two ints a row.
template <class Work>
__device__ __forceinline__ int sorted_head(const AttentionArguments &a, const Work &work, int n_rows, int *ends) {
    int *order = ends + a.max_rows;
    for (int r = threadIdx.x; r < n_rows; r += kThreads) {
        int start, position;
        const auto w = work.read_row(r, &start, &position);
        ends[r] = w.tiles * w.groups;
    }
    __syncthreads();
    for (int r = threadIdx.x; r < n_rows; r += kThreads) {
        const int mine = ends[r];
        int rank = 0;
        for (int i = 0; i < n_rows; ++i) rank += ends[i] > mine || (ends[i] == mine && i < r);
        order[rank] = r;
    }
    __syncthreads();
    const int warp = threadIdx.x >> 5, n_heads = n_rows * a.n_kv_heads;
    const int n_early = gridDim.x * 3 / 11, n_late = gridDim.x - n_early, late = static_cast<int>(blockIdx.x) - n_early;
    const int i = late < 0 ? blockIdx.x * kWarps + warp : n_early * kWarps + warp * n_late + (warp & 1 ? n_late - 1 - late : late);
    return i < n_heads ? order[i / a.n_kv_heads] * a.n_kv_heads + i % a.n_kv_heads : n_heads;
}

// By the grid of the decode kernel.
template <int kD, int kKind>
__global__ void __launch_bounds__(kThreads) attention_plan_kernel(const __grid_constant__ AttentionArguments a, int4 *plan) {
    extern __shared__ int ends[];
    __shared__ int warps[kSums * kWarps];
    wait_dependence();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    EvenWork<kGroup<kD, kKind>, false> work{a, ends};
    Segment s = {};
    work.template begin<kD>(warps, kHoldQ<kD> ? 0 : 2, kShift<kKind>);
    const int n_rows = a.info->n_rows, n_heads = n_rows * a.n_kv_heads;
    if (work.per == 0 && work.parts == 1 && work.shift == 0 && n_heads <= static_cast<int>(gridDim.x) * kWarps) {
        work.at = sorted_head(a, work, n_rows, ends);
        work.until = min(work.at + 1, n_heads);
    }
    const bool has_work = work.per == 0 && work.next(s);
    int4 *to = plan + (blockIdx.x * kWarps + warp) * (kPlanEntryBytes / 16);
    const Maps none = {};
    const Warp<kD, kKind, true> w{a, none, nullptr, nullptr, lane, Team(work.shift)};
    reinterpret_cast<int *>(to + 8)[lane] = has_work ? w.look_boxes(s, 0) : 0;
    if (lane == 0) {
        const int slot = has_work ? static_cast<int>((s.pages - a.page_table) / a.slot_pages) : 0;
        const PlanKey key(a);
        to[0] = make_int4(s.start, s.n_pairs, s.position, s.head);
        to[1] = make_int4(s.first, s.end, s.group, s.n_groups);
        to[2] = make_int4(s.block_first, s.block_last, s.is_first, slot);
        to[3] = make_int4(has_work, work.shift, work.parts, work.at);
        to[4] = make_int4(work.until, work.per, 0, 0);
        to[5] = key.of;
        to[6] = make_int4(key.too.x, key.too.y, 0, 0);
    }
}

}  // namespace ring
}  // namespace pk
