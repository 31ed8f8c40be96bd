// Pairs (token, expert) in the order of their experts, and the items that products take them by: in one launch for few pairs, with the choice
// of the experts where that is possible, in three for many. The order inside an expert is that of arrival and changes nothing.
#include "../../include/choice.cuh"
#include "../../include/chosen.cuh"
#include "../../include/device.cuh"
#include "../../include/experts_plan.h"
#include "../../include/grouped.cuh"

namespace pk {
namespace {

constexpr int32_t kSortThreads = 1024;

struct SortArguments {
    const int32_t *ids;
    ExpertItem *items;
    int32_t *n_items, *order, *rank, *done;  // done: a number an item, which become zeros
    int32_t *cursors;  // [E]: pairs of an expert, then where its next pair goes
    const int32_t *places;  // [E] or null
    const StepInfo *info;
    int64_t ids_stride, rows_symbol;
    int32_t n_used, n_experts, item_pairs, align;  // align: of an expert's first position

    __device__ int n_pairs() const { return rows_of(info, rows_symbol) * n_used; }
    // The expert of a pair; -1: none.
    __device__ int expert_of(int pair) const {
        const int e = ids[pair / n_used * ids_stride + pair % n_used];
        return e >= 0 && e < n_experts ? e : -1;
    }
};

// Pairs of each expert become starts, and items are written. One block; counts [E] are replaced by the starts. scan: [32].
__device__ __forceinline__ void lay_items(const SortArguments &a, int32_t *counts, int32_t *scan) {
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    // Inclusive sum over the block; the total goes to *total.
    auto sum_to = [&](int v, int *total) {
        for (int o = 1; o < 32; o <<= 1) {
            const int up = __shfl_up_sync(~0u, v, o);
            if (lane >= o) v += up;
        }
        if (lane == 31) scan[warp] = v;
        __syncthreads();
        int before = 0, all = 0;
        for (int w = 0; w < kSortThreads / 32; ++w) {
            if (w < warp) before += scan[w];
            all += scan[w];
        }
        __syncthreads();
        *total = all;
        return v + before;
    };
    int pairs_before = 0, items_before = 0;
    for (int first = 0; first < a.n_experts; first += kSortThreads) {
        const int e = first + tid, n = e < a.n_experts ? counts[e] : 0, n_items = (n + a.item_pairs - 1) / a.item_pairs;
        int pairs = 0, items = 0;
        const int room = (n + a.align - 1) / a.align * a.align, start = pairs_before + sum_to(room, &pairs) - room, at = items_before + sum_to(n_items, &items) - n_items;
        if (e < a.n_experts) counts[e] = start;
        const int place = a.places != nullptr && e < a.n_experts ? a.places[e] : e;
        for (int i = 0; i < n_items; ++i) {
            a.items[at + i] = {e, start + i * a.item_pairs, min(a.item_pairs, n - i * a.item_pairs), place};
            a.done[at + i] = 0;
        }
        pairs_before += pairs;
        items_before += items;
    }
    if (tid == 0) *a.n_items = items_before;
}

// All in one block, for few pairs. shared: [E] cursors, [32] of the scan.
__global__ void __launch_bounds__(kSortThreads) expert_sort_kernel(const __grid_constant__ SortArguments a) {
    extern __shared__ int32_t cursor[];
    wait_dependence();
    release_dependents();
    const int tid = threadIdx.x, n_pairs = a.n_pairs();
    for (int e = tid; e < a.n_experts; e += kSortThreads) cursor[e] = 0;
    __syncthreads();
    for (int p = tid; p < n_pairs; p += kSortThreads)
        if (const int e = a.expert_of(p); e >= 0) atomicAdd(cursor + e, 1);
    __syncthreads();
    lay_items(a, cursor, cursor + a.n_experts);
    __syncthreads();
    for (int p = tid; p < n_pairs; p += kSortThreads) {
        const int e = a.expert_of(p), at = e >= 0 ? atomicAdd(cursor + e, 1) : -1;
        a.rank[p] = at;
        if (at >= 0) a.order[at] = p;
    }
}
// A warp a token chooses; the last block to have chosen sorts. Strides in elements.
constexpr int kChoosePerLane = kMostPerLane / 2, kChooseThreads = 32 * kChoosePerLane, kChooseTokens = kChooseThreads / 32;
struct ChosenArguments {
    ChoiceArguments choice;
    int32_t *ids, *counter;  // counter: zero between launches
    float *weights;
    int64_t logits_stride, weights_stride;
};
// Up to kFewPairs pairs and kChooseThreads experts, of which a thread has one when it sorts. Grid: kChooseTokens tokens each.
__global__ void __launch_bounds__(kChooseThreads) expert_choose_kernel(const __grid_constant__ SortArguments a, const __grid_constant__ ChosenArguments c) {
    constexpr int kPairs = kFewPairs / kChooseThreads;
    __shared__ int32_t counts[kChooseThreads], scan[kChoosePerLane], own_ids[kChooseTokens * 32];
    __shared__ bool is_last;
    wait_dependence();
    release_dependents();
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, n_rows = rows_of(a.info, a.rows_symbol), t = blockIdx.x * kChooseTokens + warp;
    counts[tid] = 0;
    if (t < n_rows) {
        ChoiceArguments own = c.choice;
        own.logits += t * c.logits_stride;
        Choice<kChoosePerLane> choice;
        choice.load(own);
        const int id = choice.choose(own);
        if (lane < a.n_used) c.ids[t * a.ids_stride + lane] = own_ids[warp * a.n_used + lane] = id;
        const float weight = choice.weigh(own, id);
        if (lane < a.n_used) c.weights[t * c.weights_stride + lane] = weight;
    }
    __syncthreads();
    const bool is_alone = gridDim.x == 1;
    if (!is_alone) {
        if (tid == 0) {
            __threadfence();
            is_last = atomicAdd(c.counter, 1) == static_cast<int>(gridDim.x) - 1;
            if (is_last) *c.counter = 0;
            __threadfence();
        }
        __syncthreads();
        if (!is_last) return;
    }
    int expert[kPairs], in[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const int p = tid + i * kChooseThreads;
        expert[i] = p >= n_rows * a.n_used ? -1 : is_alone ? own_ids[p] : __ldcg(c.ids + p / a.n_used * a.ids_stride + p % a.n_used);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        if (expert[i] >= a.n_experts) expert[i] = -1;
        in[i] = expert[i] >= 0 ? atomicAdd(counts + expert[i], 1) : 0;
    }
    __syncthreads();
    // Pairs in the low half, items in the high one.
    const int n = counts[tid], n_items = (n + a.item_pairs - 1) / a.item_pairs;
    int sum = n | n_items << 16;
    for (int o = 1; o < 32; o <<= 1) {
        const int up = __shfl_up_sync(~0u, sum, o);
        if (lane >= o) sum += up;
    }
    if (lane == 31) scan[warp] = sum;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kChoosePerLane; ++w) sum += w < warp ? scan[w] : 0;
    const int start = (sum & 0xffff) - n, at = (sum >> 16) - n_items;
    counts[tid] = start;
    if (n > 0) {
        const int place = a.places != nullptr ? a.places[tid] : tid;
        for (int i = 0; i < n_items; ++i) {
            a.items[at + i] = {tid, start + i * a.item_pairs, min(a.item_pairs, n - i * a.item_pairs), place};
            a.done[at + i] = 0;
        }
    }
    if (tid == kChooseThreads - 1) *a.n_items = sum >> 16;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const int p = tid + i * kChooseThreads;
        if (p >= n_rows * a.n_used) break;
        const int to = expert[i] >= 0 ? counts[expert[i]] + in[i] : -1;
        a.rank[p] = to;
        if (to >= 0) a.order[to] = p;
    }
}

// For many pairs: counts by blocks of kSortThreads pairs (cursors begin as zeros), items by one block, then places: a block takes the
// room of its pairs from each expert at once. Shared: [E].
__global__ void __launch_bounds__(kSortThreads) expert_count_kernel(const __grid_constant__ SortArguments a) {
    extern __shared__ int32_t shared[];
    wait_dependence();
    release_dependents();
    for (int e = threadIdx.x; e < a.n_experts; e += kSortThreads) shared[e] = 0;
    __syncthreads();
    const int p = blockIdx.x * kSortThreads + threadIdx.x, e = p < a.n_pairs() ? a.expert_of(p) : -1;
    if (e >= 0) atomicAdd(shared + e, 1);
    __syncthreads();
    for (int i = threadIdx.x; i < a.n_experts; i += kSortThreads)
        if (shared[i]) atomicAdd(a.cursors + i, shared[i]);
}

__global__ void __launch_bounds__(kSortThreads) expert_items_kernel(const __grid_constant__ SortArguments a) {
    __shared__ int32_t scan[32];
    wait_dependence();
    release_dependents();
    lay_items(a, a.cursors, scan);
}

__global__ void __launch_bounds__(kSortThreads) expert_place_kernel(const __grid_constant__ SortArguments a) {
    extern __shared__ int32_t shared[];
    wait_dependence();
    release_dependents();
    for (int e = threadIdx.x; e < a.n_experts; e += kSortThreads) shared[e] = 0;
    __syncthreads();
    const int p = blockIdx.x * kSortThreads + threadIdx.x, n_pairs = a.n_pairs(), e = p < n_pairs ? a.expert_of(p) : -1;
    const int in = e >= 0 ? atomicAdd(shared + e, 1) : 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.n_experts; i += kSortThreads)
        if (shared[i]) shared[i] = atomicAdd(a.cursors + i, shared[i]);
    __syncthreads();
    if (p >= n_pairs) return;
    const int at = e >= 0 ? shared[e] + in : -1;
    a.rank[p] = at;
    if (at >= 0) a.order[at] = p;
}

}  // namespace

int32_t launch_expert_sort(const Launch &l, const pk_op_experts &op, const ExpertPlan &plan, const ExpertPlaces &places, const pk_op_route *route) {
    SortArguments a = {};
    a.ids = reinterpret_cast<const int32_t *>(op.ids.data);
    a.items = reinterpret_cast<ExpertItem *>(l.scratch + plan.items);
    a.n_items = reinterpret_cast<int32_t *>(l.scratch + plan.n_items);
    a.done = reinterpret_cast<int32_t *>(l.scratch + plan.done);
    a.order = reinterpret_cast<int32_t *>(l.scratch + plan.order);
    a.rank = reinterpret_cast<int32_t *>(l.scratch + plan.rank);
    a.info = l.info;
    a.ids_stride = op.ids.stride / 4;
    a.rows_symbol = op.x.rows;
    a.n_used = static_cast<int32_t>(op.ids.cols);
    a.n_experts = op.n_experts;
    a.item_pairs = plan.item_pairs;
    a.align = plan.is_grouped ? kGroupedAlign : 1;
    a.places = places.at;
    if (route != nullptr) {
        ChosenArguments c = {};
        c.choice = {reinterpret_cast<const float *>(route->logits.data), reinterpret_cast<const float *>(route->bias.data), op.n_experts, a.n_used, route->score, route->is_normalised, route->scale};
        c.ids = reinterpret_cast<int32_t *>(op.ids.data);
        c.weights = reinterpret_cast<float *>(op.weights.data);
        c.logits_stride = route->logits.stride / 4;
        c.weights_stride = op.weights.stride / 4;
        c.counter = l.counters;
        const dim3 blocks(static_cast<unsigned>((bound(l, op.x.rows) + kChooseTokens - 1) / kChooseTokens));
        return launch(l, "expert_choose", expert_choose_kernel, blocks, dim3(kChooseThreads), 0, a, c);
    }
    if (plan.pairs <= kFewPairs) return launch(l, "expert_sort", expert_sort_kernel, dim3(1), dim3(kSortThreads), (op.n_experts + 32) * 4, a);
    const dim3 blocks(static_cast<unsigned>((plan.pairs + kSortThreads - 1) / kSortThreads));
    a.cursors = reinterpret_cast<int32_t *>(l.scratch + plan.cursors);
    if (int32_t e = check(cudaMemsetAsync(a.cursors, 0, op.n_experts * 4, l.stream), "experts")) return e;
    if (int32_t e = launch(l, "expert_count", expert_count_kernel, blocks, dim3(kSortThreads), op.n_experts * 4, a)) return e;
    if (int32_t e = launch(l, "expert_items", expert_items_kernel, dim3(1), dim3(kSortThreads), 0, a)) return e;
    return launch(l, "expert_place", expert_place_kernel, blocks, dim3(kSortThreads), op.n_experts * 4, a);
}

bool sorts_choice(const pk_op_route &route, const pk_op_experts &op, const ExpertPlan &plan) {
    return is_few_choice(route) && op.n_experts <= 32 * kChoosePerLane && !plan.is_lone && plan.is_stream && plan.pairs <= kFewPairs && route.ids.data == op.ids.data &&
           route.weights.data == op.weights.data && route.ids.stride == op.ids.stride && route.logits.cols == op.n_experts && route.logits.rows == op.x.rows;
}

}  // namespace pk
