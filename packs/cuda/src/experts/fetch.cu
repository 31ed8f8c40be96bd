// Experts whose matrices lie in host memory: one launch decides which chosen experts are copied where, and copies them; then the
// products run over the places of the device, while a second stream copies what the next layer will probably want.
//
// One block decides, in shared memory, while the others wait at a barrier of the grid; then all blocks copy, 16 bytes a load, each
// thread with several under way: PCIe takes about two microseconds there and back, and only what is under way keeps it full. Four blocks are
// enough for that. In steps of few rows the host may compute some of those that are missing meanwhile (src/cold): it is asked before the copies begin,
// its experts are nowhere on the device, and their pairs are none of the products'. Copies ahead have as many multiprocessors to themselves: kernels whose grid is all multiprocessors, and
// that take all registers of each, would otherwise wait for them, or they for those.
#include <algorithm>
#include <climits>
#include <map>
#include <mutex>
#include <vector>

#include "../../include/cold.cuh"
#include "../../include/device.cuh"
#include "../../include/experts.cuh"

namespace pk {
namespace {

constexpr int kFetchThreads = 512, kWarps = kFetchThreads / 32, kLoads = 4, kHit = INT_MAX, kLastStep = INT_MAX - 1, kAheadBlocks = 4, kCold = 3;
constexpr int64_t kPieceBytes = int64_t{kFetchThreads} * kLoads * 16;
// Words of a cache's head: steps, copies of this step, the step whose experts were all staged, u64 counts from word 4 on, right guesses less wrong ones.
constexpr int kCopiesWord = 1, kStagedWord = 2, kCountsWord = 4, kGuessWord = 14;
constexpr int kLeastGuess = -4, kMostGuess = 64, kTryEvery = 16, kManyTimes = 4;

struct CacheArguments {
    const uint8_t *home;
    uint8_t *slots;
    int32_t *head, *slot_of, *place_of, *staged_of, *copies, *expert_of, *used;
    uint64_t *counts;
    int64_t stride, n_bytes;
    int32_t n_experts, n_slots, first_staging;
};

struct FetchArguments {
    CacheArguments c;
    const int32_t *ids;  // ahead: those expected, or null
    int32_t *counter;    // zero between launches
    const StepInfo *info;
    int64_t ids_stride, rows_symbol;
    int32_t n_used, n_chosen, n_most;  // n_used: columns of ids; n_chosen: of the step's choices
};

__device__ __forceinline__ void count(const CacheArguments &c, int which, int n) {
    uint64_t *sum = reinterpret_cast<uint64_t *>(c.head + kCountsWord) + which;
    *sum += n;
    c.counts[which] = *sum;
}

// Where e stands among those with a flag, in the order of e; adds to *before. All threads of the block call it. scan: [kWarps].
__device__ __forceinline__ int ordered(bool flag, int *before, int32_t *scan) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const unsigned mask = __ballot_sync(~0u, flag);
    if (lane == 0) scan[warp] = __popc(mask);
    __syncthreads();
    int at = *before + __popc(mask & ((1u << lane) - 1)), all = *before;
    for (int w = 0; w < kWarps; ++w) {
        if (w < warp) at += scan[w];
        all += scan[w];
    }
    *before = all;
    __syncthreads();
    return at;
}

// victims[i]: the slot that was not used for i-th longest, of those whose key is not kHit; up to n of them.
__device__ __forceinline__ void rank_victims(const int32_t *key, int n_slots, int n, int32_t *victims) {
    for (int s = threadIdx.x; s < n_slots; s += kFetchThreads) {
        const int mine = key[s];
        if (mine == kHit) continue;
        int rank = 0;
        for (int t = 0; t < n_slots; ++t) rank += key[t] < mine || (key[t] == mine && t < s);
        if (rank < n) victims[rank] = s;
    }
}

__device__ __forceinline__ void put(const CacheArguments &c, int expert, int slot, int when) {
    if (const int old = c.expert_of[slot]) c.slot_of[old - 1] = 0;
    c.expert_of[slot] = expert + 1;
    c.slot_of[expert] = slot + 1;
    c.used[slot] = when;
}

__device__ __forceinline__ void mark(const FetchArguments &a, int32_t *named, int n_pairs) {
    for (int e = threadIdx.x; e < a.c.n_experts; e += kFetchThreads) named[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < n_pairs; p += kFetchThreads) {
        const int e = a.ids[p / a.n_used * a.ids_stride + p % a.n_used];
        if (e >= 0 && e < a.c.n_experts) named[e] = 1;
    }
    __syncthreads();
}

// Takes the host's part out of the list of what is missing, n_cold neighbours from the first-th on, around the end: those are marked, the others move up.
__device__ __forceinline__ void leave_to_host(const CacheArguments &c, int n_missing, int n_cold, int first, int32_t *chosen) {
    const int around = max(0, first + n_cold - n_missing);
    for (int start = 0; start < n_missing; start += kFetchThreads) {
        const int i = start + threadIdx.x, e = i < n_missing ? c.copies[2 * i] : 0;
        const bool is_cold = (i >= first && i < first + n_cold) || i < around;
        __syncthreads();
        if (i < n_missing && is_cold) {
            chosen[e] = kCold;
            c.place_of[e] = 0;
        } else if (i < n_missing) {
            c.copies[2 * (i - min(i, around) - max(0, min(i - first, n_cold)))] = e;
        }
        __syncthreads();
    }
}

// Which pairs are the device's and which the host's. True when the host has any.
__device__ __forceinline__ bool share_pairs(const FetchArguments &a, const ColdAsk &cold, const int32_t *chosen, bool is_any) {
    const int n_pairs = rows_of(a.info, a.rows_symbol) * a.n_used;
    for (int p = threadIdx.x; p < n_pairs; p += kFetchThreads) {
        const int t = p / a.n_used, i = p - t * a.n_used, e = a.ids[t * a.ids_stride + i];
        const bool is_cold = is_any && e >= 0 && e < a.c.n_experts && chosen[e] == kCold;
        cold.state->ids[p] = is_cold ? -1 : e;
        if (!is_any) continue;
        cold.mail->ids[p] = is_cold ? e : -1;
        cold.mail->weights[p] = cold.weights[t * cold.weights_stride + i];
    }
    if (threadIdx.x == 0) {
        cold.state->is_asked = is_any;
        if (is_any) ++cold.state->request;
    }
    return is_any;
}

// Gives every chosen expert a place, but those that are left to the host. True when any is.
__device__ __forceinline__ bool choose_places(const FetchArguments &a, const ColdAsk &cold, int32_t *shared) {
    __shared__ int32_t scan[kWarps], n_found, n_right;
    const CacheArguments &c = a.c;
    const int tid = threadIdx.x;
    int32_t *chosen = shared, *key = chosen + c.n_experts, *victims = key + c.n_slots;
    const bool wraps = c.head[0] == kLastStep;
    const int clock = wraps ? 1 : c.head[0] + 1;
    const bool is_staged = !wraps && c.head[kStagedWord] == clock;
    if (tid == 0) n_found = n_right = 0;
    mark(a, chosen, rows_of(a.info, a.rows_symbol) * a.n_used);
    for (int s = tid; s < c.n_slots; s += kFetchThreads) {
        const int e = c.expert_of[s] - 1;
        int use = wraps ? 0 : c.used[s];
        if (e >= 0 && chosen[e]) {
            chosen[e] = 2;
            c.place_of[e] = s;
            c.used[s] = clock;
            if (use == 0) atomicAdd(&n_right, 1);
            use = kHit;
            atomicAdd(&n_found, 1);
        } else if (wraps) {
            c.used[s] = 0;
        }
        key[s] = use;
    }
    __syncthreads();
    const int n_free = c.n_slots - n_found;
    __syncthreads();
    int n_missing = 0;
    for (int first = 0; first < c.n_experts; first += kFetchThreads) {
        const int e = first + tid, what = e < c.n_experts ? chosen[e] : 2;
        if (what == 1 && is_staged) {
            c.place_of[e] = c.staged_of[e];
            atomicAdd(&n_found, 1);
        }
        const bool is_missing = what == 1 && !is_staged;
        const int at = ordered(is_missing, &n_missing, scan);
        if (is_missing) c.copies[2 * at] = e;
        if (what == 0) c.place_of[e] = 0;
    }
    const int n_distinct = n_found + n_missing;
    int n_cold = 0;
    if (cold.mail != nullptr && n_missing > 0 && !cold.state->is_given_up) {
        const int n_rows = rows_of(a.info, a.rows_symbol);
        n_cold = cold_share(cold.costs, n_missing, static_cast<float>(n_rows * a.n_used) / n_distinct, clock, cold.state->slack_us[n_rows]);
        __syncthreads();
        // Who is not asked cannot show that it is quick again.
        if (tid == 0 && n_cold == 0 && cold.state->slack_us[n_rows] < 0.0f) cold.state->slack_us[n_rows] += 0.05f;
        if (n_cold > 0) leave_to_host(c, n_missing, n_cold, clock % n_missing, chosen);
        n_missing -= n_cold;
    }
    if (n_missing > 0) rank_victims(key, c.n_slots, n_missing, victims);
    __syncthreads();
    for (int i = tid; i < n_missing; i += kFetchThreads) {
        const int e = c.copies[2 * i], place = i < n_free ? victims[i] : c.first_staging + i - n_free;
        if (i < n_free) put(c, e, place, clock);
        c.place_of[e] = place;
        c.copies[2 * i + 1] = place;
    }
    if (tid == 0) {
        c.head[0] = clock;
        if (wraps) c.head[kStagedWord] = 0;
        if (n_right) c.head[kGuessWord] = min(kMostGuess, c.head[kGuessWord] + 2 * n_right);
        c.head[kCopiesWord] = n_missing;
        count(c, 0, n_found);
        count(c, 1, min(n_missing, n_free));
        count(c, 2, max(0, n_missing - n_free));
        count(c, 3, 1);
    }
    return cold.mail != nullptr && share_pairs(a, cold, chosen, n_cold > 0);
}

// Which experts of the next layer are copied before it is known what it wants. One block.
__device__ __forceinline__ void look_ahead(const FetchArguments &a, int32_t *shared) {
    __shared__ int32_t scan[kWarps], n_picked;
    const CacheArguments &c = a.c;
    const int tid = threadIdx.x, n_rows = rows_of(a.info, a.rows_symbol);
    int32_t *named = shared, *key = named + c.n_experts, *victims = key + c.n_slots;
    int n_copies = 0;
    const bool may_guess = c.head[kGuessWord] >= 0 || c.head[0] % kTryEvery == 0;
    if (n_rows * a.n_chosen >= kManyTimes * c.n_experts) {
        int n_empty = 0;
        for (int first = 0; first < c.n_slots; first += kFetchThreads) {
            const int s = first + tid;
            const bool is_empty = s < c.n_slots && c.expert_of[s] == 0;
            const int at = ordered(is_empty, &n_empty, scan);
            if (is_empty) victims[at] = s;
        }
        __syncthreads();
        for (int first = 0; first < c.n_experts; first += kFetchThreads) {
            const int e = first + tid;
            const bool is_away = e < c.n_experts && c.slot_of[e] == 0;
            const int at = ordered(is_away, &n_copies, scan);
            if (!is_away) continue;
            const int place = at < n_empty ? victims[at] : c.first_staging + at - n_empty;
            if (at < n_empty) put(c, e, place, 0);
            else c.staged_of[e] = place;
            c.copies[2 * at] = e;
            c.copies[2 * at + 1] = place;
        }
        if (tid == 0) c.head[kStagedWord] = c.head[0] == kLastStep ? 1 : c.head[0] + 1;
    } else if (n_rows <= PK_AHEAD_TOKENS && a.ids != nullptr && may_guess) {
        mark(a, named, n_rows * a.n_used);
        for (int s = tid; s < c.n_slots; s += kFetchThreads) {
            const int e = c.expert_of[s] - 1;
            key[s] = e >= 0 && named[e] ? kHit : c.used[s];
        }
        if (tid == 0) {
            // A named expert that has a slot, or was picked, is not picked again.
            int n = 0;
            for (int i = 0; i < a.n_used && n < a.n_most; ++i)
                for (int t = 0; t < n_rows && n < a.n_most; ++t) {
                    const int e = a.ids[t * a.ids_stride + i];
                    if (e < 0 || e >= c.n_experts || named[e] == 2 || c.slot_of[e] != 0) continue;
                    named[e] = 2;
                    c.copies[2 * n++] = e;
                }
            n_picked = n;
        }
        __syncthreads();
        int n_free = 0;
        for (int first = 0; first < c.n_slots; first += kFetchThreads) ordered(first + tid < c.n_slots && key[first + tid] != kHit, &n_free, scan);
        n_copies = min(n_picked, n_free);
        if (n_copies > 0) rank_victims(key, c.n_slots, n_copies, victims);
        __syncthreads();
        for (int i = tid; i < n_copies; i += kFetchThreads) {
            put(c, c.copies[2 * i], victims[i], 0);
            c.copies[2 * i + 1] = victims[i];
        }
        if (tid == 0) c.head[kGuessWord] = max(kLeastGuess, c.head[kGuessWord] - n_copies);
    }
    if (tid == 0) {
        c.head[kCopiesWord] = n_copies;
        count(c, 4, n_copies);
    }
}

__device__ __forceinline__ void run_copies(const CacheArguments &c) {
    const int64_t n = __ldcg(c.head + kCopiesWord), n_vectors = c.n_bytes / 16, pieces = (c.n_bytes + kPieceBytes - 1) / kPieceBytes;
    for (int64_t i = blockIdx.x; i < n * pieces; i += gridDim.x) {
        const int64_t copy = i / pieces, first = (i - copy * pieces) * (kPieceBytes / 16) + threadIdx.x;
        const uint4 *from = reinterpret_cast<const uint4 *>(c.home + __ldcg(c.copies + 2 * copy) * c.stride);
        uint4 *to = reinterpret_cast<uint4 *>(c.slots + __ldcg(c.copies + 2 * copy + 1) * c.stride);
        uint4 v[kLoads];
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            if (first + j * kFetchThreads < n_vectors) v[j] = __ldcs(from + first + j * kFetchThreads);
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            if (first + j * kFetchThreads < n_vectors) to[first + j * kFetchThreads] = v[j];
    }
}

// Grid: at most as many blocks as run at once. Shared: i32 [E + 2 n_slots].
__global__ void __launch_bounds__(kFetchThreads) expert_fetch_kernel(const __grid_constant__ FetchArguments a, const __grid_constant__ ColdAsk cold) {
    extern __shared__ int32_t shared[];
    wait_dependence();
    release_dependents();
    const bool asks = blockIdx.x == 0 && choose_places(a, cold, shared);
    meet(a.counter);
    if (asks) ask_host(cold, rows_of(a.info, a.rows_symbol), a.n_used, kFetchThreads);
    run_copies(a.c);
    leave(a.counter);
}

// Two launches: blocks that waited for each other beside a kernel whose blocks do so too might wait for ever.
__global__ void __launch_bounds__(kFetchThreads) expert_ahead_kernel(const __grid_constant__ FetchArguments a) {
    extern __shared__ int32_t shared[];
    look_ahead(a, shared);
}
__global__ void __launch_bounds__(kFetchThreads) expert_copy_kernel(const __grid_constant__ CacheArguments c) { run_copies(c); }

CacheArguments cache_of(const pk_expert_cache &from) {
    CacheArguments c = {};
    c.home = reinterpret_cast<const uint8_t *>(from.home);
    c.slots = reinterpret_cast<uint8_t *>(from.slots);
    c.head = reinterpret_cast<int32_t *>(from.cache);
    c.slot_of = c.head + PK_CACHE_HEAD;
    c.place_of = c.slot_of + from.n_experts;
    c.staged_of = c.place_of + from.n_experts;
    c.copies = c.staged_of + from.n_experts;
    c.expert_of = c.copies + 2 * from.n_experts;
    c.used = c.expert_of + from.n_slots;
    c.counts = reinterpret_cast<uint64_t *>(from.counts);
    c.stride = from.stride;
    c.n_bytes = from.n_bytes;
    c.n_experts = from.n_experts;
    c.n_slots = from.n_slots;
    c.first_staging = from.n_staging ? static_cast<int32_t>(static_cast<int64_t>(from.staging - from.slots) / from.stride) : 0;
    return c;
}

// The stream beside a context's own. waits_for: the cache whose copies ahead have been given and not been waited for.
struct Side {
    cudaStream_t stream = nullptr;
    cudaEvent_t forked = nullptr, joined = nullptr;
    uint64_t waits_for = 0;
};

std::mutex lock;
std::map<const pk_ctx *, Side> &sides() {
    static auto *map = new std::map<const pk_ctx *, Side>;
    return *map;
}

Side *side_of(const pk_ctx *ctx) {
    std::lock_guard guard(lock);
    auto found = sides().find(ctx);
    return found == sides().end() ? nullptr : &found->second;
}

int32_t make_side(pk_ctx *ctx) {
    std::lock_guard guard(lock);
    Side &side = sides()[ctx];
    side.waits_for = 0;
    if (side.stream != nullptr) return PK_OK;
    if (int32_t e = check(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking), "experts")) return e;
    if (int32_t e = check(cudaEventCreateWithFlags(&side.forked, cudaEventDisableTiming), "experts")) return e;
    if (int32_t e = check(cudaEventCreateWithFlags(&side.joined, cudaEventDisableTiming), "experts")) return e;
    if (ctx->n_processors > 8 * kAheadBlocks) ctx->n_processors -= kAheadBlocks;
    return PK_OK;
}

// On the side, from here on: what the next layer will probably want.
int32_t fork_ahead(const Launch &l, const pk_op_experts_fetched &op, Side *side) {
    const int64_t bound_rows = bound(l, op.experts.x.rows);
    const bool may_be_few = bound_rows <= PK_AHEAD_TOKENS && op.expected.data && op.n_most > 0;
    if (side == nullptr || (!may_be_few && bound_rows * op.experts.ids.cols < kManyTimes * op.next.n_experts)) return PK_OK;
    FetchArguments a = {};
    a.c = cache_of(op.next);
    a.ids = reinterpret_cast<const int32_t *>(op.expected.data);
    a.ids_stride = op.expected.stride / 4;
    a.n_used = static_cast<int32_t>(op.expected.cols);
    a.n_chosen = static_cast<int32_t>(op.experts.ids.cols);
    a.n_most = op.n_most;
    a.info = l.info;
    a.rows_symbol = op.experts.x.rows;
    if (int32_t e = check(cudaEventRecord(side->forked, l.stream), "experts")) return e;
    if (int32_t e = check(cudaStreamWaitEvent(side->stream, side->forked), "experts")) return e;
    Launch beside = l;
    beside.stream = side->stream;
    beside.overlap = false;
    if (int32_t e = launch(beside, "expert_ahead", expert_ahead_kernel, dim3(1), dim3(kFetchThreads), (op.next.n_experts + 2ll * op.next.n_slots) * 4, a)) return e;
    if (int32_t e = launch(beside, "expert_copy", expert_copy_kernel, dim3(kAheadBlocks), dim3(kFetchThreads), 0, a.c)) return e;
    side->waits_for = op.next.cache;
    return check(cudaEventRecord(side->joined, side->stream), "experts");
}

}  // namespace

void drop_fetches(const pk_ctx *ctx) {
    std::lock_guard guard(lock);
    auto found = sides().find(ctx);
    if (found == sides().end()) return;
    if (found->second.stream) cudaStreamDestroy(found->second.stream);
    if (found->second.forked) cudaEventDestroy(found->second.forked);
    if (found->second.joined) cudaEventDestroy(found->second.joined);
    sides().erase(found);
}

int32_t check_fetched(pk_ctx *ctx, const pk_op_experts_fetched &op, int64_t at) {
    for (const pk_expert_cache *c : {&op.here, &op.next})
        if (c->home && (c->n_bytes % 16 || c->stride % 128))
            return fail(PK_BAD_ARG, "op %lld experts_fetched: experts of %lld bytes, %lld apart: the CUDA pack wants multiples of 16 and 128", (long long)at, (long long)c->n_bytes, (long long)c->stride);
    if (op.next.home)
        if (int32_t e = make_side(ctx)) return e;
    if (int32_t e = check_experts(ctx, op.experts, at)) return e;
    return keep_cold_layer(ctx, op);
}

int32_t launch_first_copies(pk_ctx *ctx, const pk_expert_cache &cache, int32_t *words, int32_t n, int32_t n_repeats) {
    std::vector<int32_t> list(PK_CACHE_HEAD + 2 * n);
    list[kCopiesWord] = n;
    for (int32_t i = 0; i < n; ++i) list[PK_CACHE_HEAD + 2 * i] = list[PK_CACHE_HEAD + 2 * i + 1] = i;
    if (int32_t e = check(cudaMemcpyAsync(words, list.data(), list.size() * 4, cudaMemcpyHostToDevice, ctx->stream), "experts")) return e;
    CacheArguments c = cache_of(cache);
    c.head = words;
    c.copies = words + PK_CACHE_HEAD;
    Launch l;
    l.ctx = ctx;
    l.stream = ctx->stream;
    for (int32_t i = 0; i < n_repeats; ++i)
        if (int32_t e = launch(l, "expert_copy", expert_copy_kernel, dim3(ctx->n_processors), dim3(kFetchThreads), 0, c)) return e;
    return PK_OK;
}

int32_t launch_fetched(const Launch &l, const pk_op_experts_fetched &op) {
    Side *side = side_of(l.ctx);
    if (side != nullptr && side->waits_for == op.here.cache) {
        side->waits_for = 0;
        if (int32_t e = check(cudaStreamWaitEvent(l.stream, side->joined), "experts")) return e;
    }
    FetchArguments a = {};
    a.c = cache_of(op.here);
    a.ids = reinterpret_cast<const int32_t *>(op.experts.ids.data);
    a.counter = l.counters;
    a.info = l.info;
    a.ids_stride = op.experts.ids.stride / 4;
    a.rows_symbol = op.experts.x.rows;
    a.n_used = a.n_chosen = static_cast<int32_t>(op.experts.ids.cols);
    const int64_t shared_bytes = (op.here.n_experts + 2ll * op.here.n_slots) * 4;
    const ColdAsk cold = cold_ask(l, op);
    if (int32_t e = launch(l, "expert_fetch", expert_fetch_kernel, dim3(l.ctx->n_processors), dim3(kFetchThreads), shared_bytes, a, cold)) return e;
    if (op.next.home)
        if (int32_t e = fork_ahead(l, op, side)) return e;
    pk_op_experts here = op.experts;
    if (cold.mail != nullptr) {
        here.ids.data = reinterpret_cast<uint64_t>(cold.state->ids);
        here.ids.stride = here.ids.cols * 4;
    }
    if (int32_t e = launch_experts_at(l, here, {static_cast<int64_t>(op.here.slots - op.here.home), a.c.place_of, std::max(op.here.n_slots, a.c.first_staging + op.here.n_staging)})) return e;
    return cold.mail != nullptr ? launch_cold_sums(l, op.experts, cold) : PK_OK;
}

}  // namespace pk
