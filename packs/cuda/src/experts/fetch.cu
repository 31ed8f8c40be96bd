// Experts whose matrices lie in host memory: one launch decides which chosen experts are copied where, and copies them; then the
// products run over the places of the device.
//
// One block decides, in shared memory, while the others wait at a barrier of the grid; then all blocks copy, 16 bytes a load, each
// thread with several under way: PCIe takes about two microseconds there and back, and only what is under way keeps it full.
#include <algorithm>
#include <climits>

#include "../../include/device.cuh"
#include "../../include/experts.cuh"

namespace pk {
namespace {

constexpr int kFetchThreads = 512, kLoads = 4, kHit = INT_MAX;
constexpr int64_t kPieceBytes = int64_t{kFetchThreads} * kLoads * 16;
// Words of the cache's head, after the count of steps: copies of this step; u64 counts from word 4 on.
constexpr int kCopiesWord = 1, kCountsWord = 4;

struct FetchArguments {
    const int32_t *ids;
    const uint8_t *home;
    uint8_t *slots;
    int32_t *head, *slot_of, *place_of, *copies, *expert_of, *used;
    uint64_t *counts;
    int32_t *counter;  // zero between launches
    const StepInfo *info;
    int64_t ids_stride, rows_symbol, stride, n_bytes;
    int32_t n_used, n_experts, n_slots, first_staging;
};

__device__ __forceinline__ void decide(const FetchArguments &a, int32_t *shared) {
    __shared__ int32_t scan[kFetchThreads / 32], n_missing, n_found;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    int32_t *chosen = shared, *key = chosen + a.n_experts, *victims = key + a.n_slots;
    const int last = a.head[0], clock = last == INT_MAX ? 1 : last + 1, n_pairs = rows_of(a.info, a.rows_symbol) * a.n_used;
    for (int e = tid; e < a.n_experts; e += kFetchThreads) chosen[e] = 0;
    if (tid == 0) n_missing = n_found = 0;
    __syncthreads();
    for (int p = tid; p < n_pairs; p += kFetchThreads) {
        const int e = a.ids[p / a.n_used * a.ids_stride + p % a.n_used];
        if (e >= 0 && e < a.n_experts) chosen[e] = 1;
    }
    __syncthreads();
    for (int s = tid; s < a.n_slots; s += kFetchThreads) {
        const int e = a.expert_of[s] - 1;
        int use = last == INT_MAX ? 0 : a.used[s];
        if (e >= 0 && chosen[e]) {
            chosen[e] = 2;
            a.place_of[e] = s;
            a.used[s] = clock;
            use = kHit;
            atomicAdd(&n_found, 1);
        } else if (last == INT_MAX) {
            a.used[s] = 0;
        }
        key[s] = use;
    }
    __syncthreads();
    // Missing experts in the order of their numbers.
    int before = 0;
    for (int first = 0; first < a.n_experts; first += kFetchThreads) {
        const int e = first + tid, is_missing = e < a.n_experts && chosen[e] == 1;
        const unsigned mask = __ballot_sync(~0u, is_missing);
        if (lane == 0) scan[warp] = __popc(mask);
        __syncthreads();
        int at = before + __popc(mask & ((1u << lane) - 1)), all = before;
        for (int w = 0; w < kFetchThreads / 32; ++w) {
            if (w < warp) at += scan[w];
            all += scan[w];
        }
        if (is_missing) a.copies[2 * at] = e;
        if (e < a.n_experts && chosen[e] == 0) a.place_of[e] = 0;
        before = all;
        __syncthreads();
    }
    if (tid == 0) n_missing = before;
    const int n_free = a.n_slots - n_found;
    if (before > 0)
        for (int s = tid; s < a.n_slots; s += kFetchThreads) {
            const int mine = key[s];
            if (mine == kHit) continue;
            int rank = 0;
            for (int t = 0; t < a.n_slots; ++t) rank += key[t] < mine || (key[t] == mine && t < s);
            if (rank < before) victims[rank] = s;
        }
    __syncthreads();
    for (int i = tid; i < n_missing; i += kFetchThreads) {
        const int e = a.copies[2 * i];
        int place = a.first_staging + i - n_free;
        if (i < n_free) {
            place = victims[i];
            if (const int old = a.expert_of[place]) a.slot_of[old - 1] = 0;
            a.expert_of[place] = e + 1;
            a.slot_of[e] = place + 1;
            a.used[place] = clock;
        }
        a.place_of[e] = place;
        a.copies[2 * i + 1] = place;
    }
    if (tid == 0) {
        a.head[0] = clock;
        a.head[kCopiesWord] = n_missing;
        uint64_t *sums = reinterpret_cast<uint64_t *>(a.head + kCountsWord);
        const int to_slots = min(n_missing, n_free);
        const uint64_t more[4] = {static_cast<uint64_t>(n_found), static_cast<uint64_t>(to_slots), static_cast<uint64_t>(n_missing - to_slots), 1};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[i] += more[i];
            a.counts[i] = sums[i];
        }
    }
}

// Grid: at most as many blocks as run at once. Shared: i32 [E + 2 n_slots].
__global__ void __launch_bounds__(kFetchThreads) expert_fetch_kernel(const __grid_constant__ FetchArguments a) {
    extern __shared__ int32_t shared[];
    wait_dependence();
    release_dependents();
    if (blockIdx.x == 0) decide(a, shared);
    meet(a.counter);
    const int64_t n = __ldcg(a.head + kCopiesWord), n_vectors = a.n_bytes / 16, pieces = (a.n_bytes + kPieceBytes - 1) / kPieceBytes;
    for (int64_t i = blockIdx.x; i < n * pieces; i += gridDim.x) {
        const int64_t copy = i / pieces, first = (i - copy * pieces) * (kPieceBytes / 16) + threadIdx.x;
        const uint4 *from = reinterpret_cast<const uint4 *>(a.home + __ldcg(a.copies + 2 * copy) * a.stride);
        uint4 *to = reinterpret_cast<uint4 *>(a.slots + __ldcg(a.copies + 2 * copy + 1) * a.stride);
        uint4 v[kLoads];
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            if (first + j * kFetchThreads < n_vectors) v[j] = __ldcs(from + first + j * kFetchThreads);
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            if (first + j * kFetchThreads < n_vectors) to[first + j * kFetchThreads] = v[j];
    }
    leave(a.counter);
}

}  // namespace

int32_t check_fetched(pk_ctx *ctx, const pk_op_experts_fetched &op, int64_t at) {
    if (op.n_bytes % 16 || op.stride % 128) return fail(PK_BAD_ARG, "op %lld experts_fetched: experts of %lld bytes, %lld apart: the CUDA pack wants multiples of 16 and 128", (long long)at, (long long)op.n_bytes, (long long)op.stride);
    return check_experts(ctx, op.experts, at);
}

int32_t launch_fetched(const Launch &l, const pk_op_experts_fetched &op) {
    const int32_t n = op.experts.n_experts;
    FetchArguments a = {};
    a.ids = reinterpret_cast<const int32_t *>(op.experts.ids.data);
    a.home = reinterpret_cast<const uint8_t *>(op.home);
    a.slots = reinterpret_cast<uint8_t *>(op.slots);
    a.head = reinterpret_cast<int32_t *>(op.cache);
    a.slot_of = a.head + PK_CACHE_HEAD;
    a.place_of = a.slot_of + n;
    a.copies = a.place_of + n;
    a.expert_of = a.copies + 2 * n;
    a.used = a.expert_of + op.n_slots;
    a.counts = reinterpret_cast<uint64_t *>(op.counts);
    a.counter = l.counters;
    a.info = l.info;
    a.ids_stride = op.experts.ids.stride / 4;
    a.rows_symbol = op.experts.x.rows;
    a.stride = op.stride;
    a.n_bytes = op.n_bytes;
    a.n_used = static_cast<int32_t>(op.experts.ids.cols);
    a.n_experts = n;
    a.n_slots = op.n_slots;
    a.first_staging = op.n_staging ? static_cast<int32_t>(static_cast<int64_t>(op.staging - op.slots) / op.stride) : 0;
    const int64_t shared_bytes = (n + 2ll * op.n_slots) * 4;
    if (int32_t e = launch(l, "expert_fetch", expert_fetch_kernel, dim3(l.ctx->n_processors), dim3(kFetchThreads), shared_bytes, a)) return e;
    return launch_experts_at(l, op.experts, {static_cast<int64_t>(op.slots - op.home), a.place_of, std::max(op.n_slots, a.first_staging + op.n_staging)});
}

}  // namespace pk
