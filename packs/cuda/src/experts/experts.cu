// Mixture of experts: pairs (token, expert) are sorted by expert on the device, gate and up run over the sorted pairs, then down,
// and each token adds its experts' outputs in the order of their numbers.
//
// Few pairs an expert: the streaming product, eight pairs an item (BF16 and e4m3 on Hopper: src/experts/few.cu). Many: tiles of 128 pairs; the output of `down` is made in
// panels of columns so that it never takes more than kPanelBytes. The order inside an expert is that of arrival and changes
// nothing: rows of a product do not depend on each other. BF16 and e4m3 on Hopper: x goes to the pairs' positions first (src/experts/grouped.cu).
#include <algorithm>

#include "../../include/choice.cuh"
#include "../../include/chosen.cuh"
#include "../../include/experts_few.cuh"
#include "../../include/format/rows.cuh"
#include "../../include/format/unit.cuh"
#include "../../include/fp4.cuh"
#include "../../include/gemm.cuh"
#include "../../include/grouped.cuh"
#include "../../include/invariant.h"
#include "../../include/operand.h"
#include "../../include/repack.cuh"

namespace pk {
namespace {

constexpr int64_t kPanelBytes = 64 << 20, kStreamShared = 96 << 10, kLoneShared = 160 << 10;
constexpr int32_t kSortThreads = 1024, kStreamTokens = 8, kStreamPairs = 8, kGroupedPairs = 4, kMostChosen = 64, kFewPairs = 1024, kPanelRows = 256;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

ExpertUnit unit_of(int32_t format) {
    ExpertUnit f = {};
    if (with_unit(format, [&](auto u) { f = {decltype(u)::kU, decltype(u)::kGroup}; })) return f;
    return {format == PK_FP8_E4M3 || format == PK_FP8_E5M2 ? 128 : 64, 0};
}

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

struct CombineArguments {
    const int32_t *ids, *rank;  // rank null: a lone token, whose pair is its position
    const float *weights;
    const void *out, *add;
    void *y;
    const StepInfo *info;
    int64_t ids_stride, weights_stride, out_stride, add_stride, y_stride, rows_symbol;
    int32_t out_format, add_format, y_format, n_used, n_experts, first, n, is_wide;  // is_wide: eight columns are one or two loads
    float scale;
};

// y[:, first : first + n] = add + scale * sum of the token's experts. Grid: tokens, columns. 64 threads or more.
__global__ void __launch_bounds__(256) expert_combine_kernel(const __grid_constant__ CombineArguments a) {
    __shared__ int32_t positions[kMostChosen];
    __shared__ float factors[kMostChosen];
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x;
    if (t >= rows_of(a.info, a.rows_symbol)) return;
    const int32_t *ids = a.ids + t * a.ids_stride;
    if (threadIdx.x < a.n_used) {
        const int i = threadIdx.x, e = ids[i];
        int before = 0;
        for (int j = 0; j < a.n_used; ++j) before += ids[j] < e || (ids[j] == e && j < i);
        const bool is_there = e >= 0 && e < a.n_experts;
        positions[before] = !is_there ? -1 : a.rank != nullptr ? a.rank[t * a.n_used + i] : i;
        factors[before] = a.weights[t * a.weights_stride + i] * a.scale;
    }
    __syncthreads();
    if (a.is_wide) {
        const int c = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
        if (c >= a.n) return;
        float v[8] = {}, x[8], old[8] = {};
        if (a.add != nullptr) load8(a.add, t * a.add_stride + a.first + c, a.add_format, old);
        if (a.out_format == PK_BF16) {
            constexpr int kFlight = 8;  // loads under way
            for (int first = 0; first < a.n_used; first += kFlight) {
                uint4 raw[kFlight];
#pragma unroll
                for (int i = 0; i < kFlight; ++i) {
                    const int at = first + i < a.n_used ? positions[first + i] : -1;
                    raw[i] = at >= 0 ? __ldcs(reinterpret_cast<const uint4 *>(static_cast<const bf16 *>(a.out) + at * a.out_stride + c)) : make_uint4(0, 0, 0, 0);
                }
#pragma unroll
                for (int i = 0; i < kFlight; ++i) {
                    const float f = first + i < a.n_used ? factors[first + i] : 0.0f;
                    const uint32_t w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        v[2 * e] = fmaf(f, low_f32(w[e]), v[2 * e]);
                        v[2 * e + 1] = fmaf(f, high_f32(w[e]), v[2 * e + 1]);
                    }
                }
            }
        } else {
#pragma unroll 4
            for (int i = 0; i < a.n_used; ++i) {
                if (positions[i] < 0) continue;
                load8(a.out, positions[i] * a.out_stride + c, a.out_format, x);
#pragma unroll
                for (int e = 0; e < 8; ++e) v[e] = fmaf(factors[i], x[e], v[e]);
            }
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] += old[e];
        store8(a.y, t * a.y_stride + a.first + c, a.y_format, v);
        return;
    }
    for (int c = blockIdx.y * blockDim.x + threadIdx.x; c < a.n; c += gridDim.y * blockDim.x) {
        float v = 0.0f;
        for (int i = 0; i < a.n_used; ++i)
            if (positions[i] >= 0) v = fmaf(factors[i], load_as_f32(a.out, positions[i] * a.out_stride + c, a.out_format), v);
        if (a.add != nullptr) v += load_as_f32(a.add, t * a.add_stride + a.first + c, a.add_format);
        store_from_f32(a.y, t * a.y_stride + a.first + c, a.y_format, v);
    }
}

// The stack that the first product reads: experts without a gate begin with `up`.
const pk_tensor &first_stack(const pk_op_experts &op) { return op.gate.data ? op.gate : op.up; }

// Gate and up run as one product.
bool is_pair(const pk_op_experts &op) { return op.gate.data && stored_format(op.gate.format) == stored_format(op.up.format); }

// How many of a block's eight warps split K: the fewest rounds of units, waves of blocks counted. rows_each: rows of a warp.
int32_t warps_over_k(const pk_ctx &ctx, int64_t n_items, const pk_tensor &w, int64_t rows_each) {
    const int64_t unit = unit_of(stored_format(w.format)).unit, n_units = (w.cols + unit - 1) / unit;
    int32_t best = 8;
    int64_t least = INT64_MAX;
    for (int32_t n : {8, 4, 2, 1}) {
        const int64_t blocks = n_items * ((w.rows + rows_each * (8 / n) - 1) / (rows_each * (8 / n))), rounds = (n_units + n - 1) / n * ((blocks + 2 * ctx.n_processors - 1) / (2 * ctx.n_processors));
        if (rounds < least) {
            least = rounds;
            best = n;
        }
    }
    return best;
}

// The shape of a launch for up to n_rows tokens, and where its parts lie in the scratch.
struct Plan {
    bool is_stream = false, is_lone = false, is_grouped = false, is_fp8 = false;
    int64_t pairs = 0, positions = 0;
    int32_t item_pairs = 0, max_items = 0, warps_k[3] = {};  // of gate, up and down
    int64_t x_row_bytes[3] = {}, shared_bytes[3] = {};
    int64_t x_cols = 0, hidden_cols = 0, panel = 0, scale_stride = 0;
    int32_t out_format = PK_F32;
    int64_t items = 0, n_items = 0, done = 0, cursors = 0, order = 0, rank = 0, hidden = 0, hidden_scales = 0, x = 0, x_scales = 0, out = 0, fp4 = 0, bytes = 0;
};

bool is_wide(const pk_tensor &x) { return x.cols % 8 == 0 && x.stride % 16 == 0 && x.data % 16 == 0; }

// src/experts/grouped.cu takes them.
bool can_group(const pk_ctx &ctx, const pk_op_experts &op) {
    const int32_t format = stored_format(op.up.format);
    const bool is_fp8 = format == PK_FP8_E4M3, has_bias = op.gate_bias.data || op.up_bias.data || op.down_bias.data;
    return has_wgmma(&ctx) && (is_fp8 || format == PK_BF16) && is_pair(op) && stored_format(op.down.format) == format && !has_bias && (op.act == PK_ACT_SILU || op.act == PK_ACT_GELU_TANH) && is_wide(op.x) &&
           op.x.cols % 16 == 0 && op.up.rows % (is_fp8 ? 128 : 8) == 0 && op.y.cols % 8 == 0;
}

int64_t stream_shared(int64_t k, const ExpertUnit &u, int64_t pairs, int64_t *x_row_bytes) {
    const int64_t padded = round_up(k, u.unit);
    *x_row_bytes = padded * 2 + 64;
    return pairs * *x_row_bytes + (u.group ? padded / u.group * 32 * ((pairs + 7) / 8) : 0) + 8 * 32 * 9 * 4;
}

Plan plan_of(const pk_ctx &ctx, const pk_op_experts &op, int64_t n_rows) {
    Plan p;
    const int64_t panel_bytes = std::min(kPanelBytes, int64_t{ctx.n_processors} << 20);  // small devices have small workspaces
    const int64_t k = op.ids.cols, cols = op.y.cols;
    p.pairs = n_rows * k;
    // Every pair by itself: tiles, in which a pair's products are added up along all of K whatever its company, and sums in f32.
    const bool is_invariant = pk::is_invariant(&ctx);
    p.is_lone = n_rows == 1 && !is_invariant;
    const bool can = can_group(ctx, op);
    p.is_stream = !is_invariant && (n_rows <= kStreamTokens || p.pairs <= int64_t{can ? kGroupedPairs : kStreamPairs} * op.n_experts);
    p.is_grouped = can && !p.is_stream && !is_invariant;
    p.is_fp8 = stored_format(op.up.format) == PK_FP8_E4M3;
    p.positions = p.pairs + (p.is_grouped ? (kGroupedAlign - 1) * std::min<int64_t>(p.pairs, op.n_experts) : 0);
    const pk_tensor *stacks[3] = {&first_stack(op), &op.up, &op.down};
    // More pairs an item where many experts would have two items of eight, their weights read twice, and where registers allow it.
    bool is_small = true;
    for (const pk_tensor *stack : stacks) is_small = is_small && unit_of(stored_format(stack->format)).unit <= 128;
    p.item_pairs = !p.is_stream ? kTileRows : is_small && p.pairs > int64_t{kStreamPairs} / 2 * op.n_experts ? 2 * kStreamPairs : kStreamPairs;
    if (p.is_stream) {
        p.item_pairs = static_cast<int32_t>(std::min<int64_t>(p.item_pairs, n_rows));
        for (int i = 0; i < 3; ++i) {
            const ExpertUnit unit = unit_of(stored_format(stacks[i]->format));
            while (p.item_pairs > 1 && stream_shared(stacks[i]->cols, unit, p.item_pairs, &p.x_row_bytes[i]) > kStreamShared) p.item_pairs /= 2;
        }
        for (int i = 0; i < 3; ++i) p.shared_bytes[i] = stream_shared(stacks[i]->cols, unit_of(stored_format(stacks[i]->format)), p.item_pairs, &p.x_row_bytes[i]);
    }
    p.max_items = static_cast<int32_t>(p.is_lone ? k : std::min(p.pairs, op.n_experts + p.pairs / p.item_pairs));
    for (int i = 0; i < 3 && p.is_stream; ++i) p.warps_k[i] = warps_over_k(ctx, p.max_items, *stacks[i], i < 2 && is_pair(op) ? 16 : 32);
    p.hidden_cols = round_up(op.up.rows, 8);
    const bool is_whole = p.is_stream || (!p.is_grouped && p.pairs * cols * 4 <= panel_bytes);
    p.out_format = is_whole || is_invariant ? PK_F32 : PK_BF16;
    const int64_t out_bytes = p.out_format == PK_F32 ? 4 : 2;
    p.panel = is_whole ? cols : std::min(cols, std::max<int64_t>(kTileRows, panel_bytes / (p.pairs * out_bytes) / kTileRows * kTileRows));
    int64_t at = 0;
    auto take = [&](int64_t bytes) {
        const int64_t start = at;
        at += round_up(bytes, 256);
        return start;
    };
    p.n_items = take(4);
    p.cursors = take(op.n_experts * 4);
    p.items = take(p.max_items * static_cast<int64_t>(sizeof(ExpertItem)));
    p.done = take(p.max_items * 4);
    p.order = take(p.positions * 4);
    p.rank = take(p.pairs * 4);
    if (p.is_grouped) {
        // The output of `down` goes where x was.
        const int64_t element = p.is_fp8 ? 1 : 2;
        p.x_cols = p.is_fp8 ? round_up(op.x.cols, 128) : op.x.cols;
        p.scale_stride = round_up(p.positions, kGroupedAlign) + kTileRows;
        const int64_t x_bytes = p.positions * std::max(p.x_cols * element, std::min<int64_t>(cols, kPanelRows) * 2);
        p.panel = std::min(cols, x_bytes / (p.positions * 2) / kPanelRows * kPanelRows);
        if (p.panel == 0) p.panel = cols;
        p.x = p.out = take(x_bytes);
        p.x_scales = take(p.is_fp8 ? p.x_cols / 128 * p.scale_stride * 4 : 0);
        p.hidden = take(p.positions * p.hidden_cols * element);
        p.hidden_scales = take(p.is_fp8 ? p.hidden_cols / 128 * p.scale_stride * 4 : 0);
        p.bytes = at;
        return p;
    }
    p.hidden = take(p.pairs * p.hidden_cols * 2);
    p.x = take(p.is_stream || (op.x.format == PK_BF16 && is_wide(op.x)) ? 0 : n_rows * round_up(op.x.cols, 8) * 2);
    p.out = take(p.pairs * p.panel * out_bytes);
    // Rows of x, later of the hidden values, for products with block scales: factors first.
    const bool has_fp4 = !p.is_stream && has_fp4_mma(&ctx) && (is_fp4(op.up.format) || is_fp4(op.down.format) || is_fp4(first_stack(op).format));
    p.fp4 = take(has_fp4 ? round_up(p.pairs * 4, 256) + std::max(n_rows * fp4_row_bytes(PK_NVFP4, round_up(op.x.cols, 128), kTerms), p.pairs * fp4_row_bytes(PK_NVFP4, round_up(p.hidden_cols, 128), kTerms)) : 0);
    p.bytes = at;
    return p;
}

ExpertWeight weight_of(const Launch &l, const pk_tensor &w, const pk_tensor &bias, int64_t shift) {
    const Packed &p = *find_packed(l.ctx, w);
    ExpertWeight e = {};
    e.data = reinterpret_cast<const uint8_t *>(w.data + shift);
    e.bias = reinterpret_cast<const float *>(bias.data);
    e.stride = w.stride;
    e.row_bytes = p.row_bytes;
    e.scale_at = p.scale_at;
    e.row_scale_at = p.scale_kind == PK_SCALES_ROW ? p.scales : -1;
    e.block_scale_at = p.scale_kind == PK_SCALES_BLOCK ? p.scales : -1;
    e.rows = static_cast<int32_t>(p.rows);
    e.padded_rows = static_cast<int32_t>(p.padded_rows);
    e.block_stride = static_cast<int32_t>(p.scale_stride);
    return e;
}

int32_t launch_product(const Launch &l, int32_t format, const Plan &plan, const ExpertProduct &p, int which) {
    switch (format) {
#define PK_CASE(F) case F: return plan.is_stream ? launch_expert_stream<F>(l, p, plan.max_items, plan.shared_bytes[which]) : launch_expert_tiles<F>(l, p, plan.max_items);
        PK_CASE(PK_BF16) PK_CASE(PK_F16) PK_CASE(PK_FP8_E4M3) PK_CASE(PK_FP8_E5M2) PK_CASE(PK_Q8_0) PK_CASE(PK_Q4_0) PK_CASE(PK_Q4_1) PK_CASE(PK_Q5_0) PK_CASE(PK_Q5_1)
        PK_CASE(PK_Q2_K) PK_CASE(PK_Q3_K) PK_CASE(PK_Q4_K) PK_CASE(PK_Q5_K) PK_CASE(PK_Q6_K) PK_CASE(PK_IQ4_NL) PK_CASE(PK_IQ4_XS) PK_CASE(PK_MXFP4) PK_CASE(PK_NVFP4)
#undef PK_CASE
        default: return fail(PK_UNSUPPORTED, "experts: no kernel for weight format %d", format);
    }
}

int32_t launch_lone(const Launch &l, int32_t format, const ExpertProduct &p, const ExpertProduct &d, const LoneEnd &end, int64_t shared_bytes) {
    switch (format) {
#define PK_CASE(F) case F: return launch_expert_lone<F>(l, p, d, end, shared_bytes);
        PK_CASE(PK_BF16) PK_CASE(PK_F16) PK_CASE(PK_FP8_E4M3) PK_CASE(PK_FP8_E5M2) PK_CASE(PK_Q8_0) PK_CASE(PK_Q4_0) PK_CASE(PK_Q4_1) PK_CASE(PK_Q5_0) PK_CASE(PK_Q5_1)
        PK_CASE(PK_Q2_K) PK_CASE(PK_Q3_K) PK_CASE(PK_Q4_K) PK_CASE(PK_Q5_K) PK_CASE(PK_Q6_K) PK_CASE(PK_IQ4_NL) PK_CASE(PK_IQ4_XS) PK_CASE(PK_MXFP4) PK_CASE(PK_NVFP4)
#undef PK_CASE
        default: return fail(PK_UNSUPPORTED, "experts: no kernel for weight format %d", format);
    }
}

// Bytes that the launch of a lone token's experts stages at once: x of the first half, or every expert's hidden values.
int64_t lone_shared(const Plan &plan, const pk_op_experts &op) {
    const ExpertUnit unit = unit_of(stored_format(op.up.format));
    int64_t row_bytes = 0;
    auto staged = [&](int64_t k) { return stream_shared(k, unit, 1, &row_bytes) - 8 * 32 * 9 * 4; };
    return std::max(staged(op.up.cols) + 8 * 32 * 4, op.ids.cols * staged(op.down.cols) + 8 * 16 * 4);
}

// How many of a block's warps split K of gate and up: the fewest rounds of units and of tasks of 16 rows.
int32_t lone_warps(const pk_ctx &ctx, const pk_op_experts &op, int64_t n_units) {
    const int64_t tasks = (op.up.rows + 15) / 16 * op.ids.cols;
    int32_t best = 8;
    int64_t least = INT64_MAX;
    for (int32_t n : {8, 4, 2, 1}) {
        const int64_t teams = int64_t{ctx.n_processors} * (8 / n), rounds = (n_units + n - 1) / n * ((tasks + teams - 1) / teams);
        if (rounds < least) {
            least = rounds;
            best = n;
        }
    }
    return best;
}

// route: when the pairs are chosen in the same launch, or null.
int32_t launch_sort(const Launch &l, const pk_op_experts &op, const Plan &plan, const ExpertPlaces &places, const pk_op_route *route = nullptr) {
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

int32_t launch_combine(const Launch &l, const pk_op_experts &op, const Plan &plan, int64_t first, int64_t n) {
    CombineArguments a = {};
    a.ids = reinterpret_cast<const int32_t *>(op.ids.data);
    a.rank = plan.is_lone ? nullptr : reinterpret_cast<const int32_t *>(l.scratch + plan.rank);
    a.weights = reinterpret_cast<const float *>(op.weights.data);
    a.out = l.scratch + plan.out;
    a.add = reinterpret_cast<const void *>(op.add.data);
    a.y = reinterpret_cast<void *>(op.y.data);
    a.info = l.info;
    a.ids_stride = op.ids.stride / 4;
    a.weights_stride = op.weights.stride / 4;
    a.out_stride = plan.panel;
    a.add_stride = elements_apart(op.add);
    a.y_stride = elements_apart(op.y);
    a.rows_symbol = op.x.rows;
    a.out_format = plan.out_format;
    a.add_format = op.add.format;
    a.y_format = op.y.format;
    a.n_used = static_cast<int32_t>(op.ids.cols);
    a.n_experts = op.n_experts;
    a.first = static_cast<int32_t>(first);
    a.n = static_cast<int32_t>(n);
    a.scale = op.scale;
    auto is_eight = [](const void *p, int64_t stride) { return p == nullptr || (stride % 8 == 0 && reinterpret_cast<uint64_t>(p) % 16 == 0); };
    a.is_wide = n % 8 == 0 && first % 8 == 0 && is_eight(a.out, a.out_stride) && is_eight(a.add, a.add_stride) && is_eight(a.y, a.y_stride);
    // Eight columns a thread, or four turns of one.
    const int64_t threads = a.is_wide ? std::clamp<int64_t>(round_up(n / 8, 32), 64, 256) : 256, each = a.is_wide ? 8 * threads : 1024;
    return launch(l, "expert_combine", expert_combine_kernel, dim3(static_cast<unsigned>(bound(l, op.x.rows)), static_cast<unsigned>((n + each - 1) / each)), dim3(static_cast<unsigned>(threads)), 0, a);
}

// Many pairs on Hopper's asynchronous units.
int32_t run_grouped(const Launch &l, const pk_op_experts &op, const Plan &plan, const ExpertPlaces &places) {
    auto floats = [&](int64_t at) { return reinterpret_cast<float *>(l.scratch + at); };
    if (int32_t e = launch_sort(l, op, plan, places)) return e;
    SpreadArguments s = {};
    s.x = reinterpret_cast<const void *>(op.x.data);
    s.out = l.scratch + plan.x;
    s.scales = floats(plan.x_scales);
    s.rank = reinterpret_cast<const int32_t *>(l.scratch + plan.rank);
    s.x_stride = elements_apart(op.x);
    s.out_stride = plan.x_cols;
    s.scale_stride = plan.scale_stride;
    s.rows_symbol = op.x.rows;
    s.x_format = op.x.format;
    s.n_used = static_cast<int32_t>(op.ids.cols);
    s.k = static_cast<int32_t>(op.x.cols);
    if (int32_t e = launch_spread(l, s, plan.is_fp8, bound(l, op.x.rows))) return e;
    GroupedProduct g = {};
    g.w[0] = weight_of(l, op.gate, op.gate_bias, places.shift);
    g.w[1] = weight_of(l, op.up, op.up_bias, places.shift);
    g.x = l.scratch + plan.x;
    g.out = l.scratch + plan.hidden;
    g.x_scales = floats(plan.x_scales);
    g.out_scales = floats(plan.hidden_scales);
    g.items = reinterpret_cast<const ExpertItem *>(l.scratch + plan.items);
    g.n_items = reinterpret_cast<const int32_t *>(l.scratch + plan.n_items);
    g.positions = plan.positions;
    g.scale_stride = plan.scale_stride;
    g.x_stride = plan.x_cols;
    g.out_stride = plan.hidden_cols;
    g.k = static_cast<int32_t>(plan.x_cols);
    g.n_places = places.at != nullptr ? places.n : op.n_experts;
    g.n_rows = static_cast<int32_t>(op.up.rows);
    g.act = op.act;
    if (int32_t e = launch_grouped(l, g, plan.is_fp8, true)) return e;
    g.w[0] = weight_of(l, op.down, op.down_bias, places.shift);
    g.x = g.out;
    g.x_scales = g.out_scales;
    g.x_stride = plan.hidden_cols;
    g.k = static_cast<int32_t>(op.up.rows);
    g.out = l.scratch + plan.out;
    g.out_stride = plan.panel;
    for (int64_t first = 0; first < op.down.rows; first += plan.panel) {
        g.first_row = static_cast<int32_t>(first);
        g.n_rows = static_cast<int32_t>(std::min(plan.panel, op.down.rows - first));
        if (int32_t e = launch_grouped(l, g, plan.is_fp8, false)) return e;
        if (int32_t e = launch_combine(l, op, plan, first, g.n_rows)) return e;
    }
    return PK_OK;
}

}  // namespace

// route: when this launch is to choose, too; or null.
static int32_t run_experts(const Launch &step, const pk_op_experts &op, const ExpertPlaces &places, const pk_op_route *route) {
    const int64_t n_rows = bound(step, op.x.rows);
    const Plan plan = plan_of(*step.ctx, op, n_rows);
    Launch l = step;
    l.overlap = step.overlap || (step.decode_only && plan.is_stream && plan.pairs <= kFewPairs);
    if (plan.bytes > l.scratch_bytes) return fail(PK_BAD_ARG, "experts: %lld bytes of scratch are needed, the workspace has %lld", (long long)plan.bytes, (long long)l.scratch_bytes);
    if (plan.is_grouped) return run_grouped(l, op, plan, places);
    pk_tensor x = op.x;
    if (!plan.is_stream && (x.format != PK_BF16 || !is_wide(x))) {
        pk_op_copy copy = {};
        copy.x = copy.out = op.x;
        copy.out.data = reinterpret_cast<uint64_t>(l.scratch + plan.x);
        copy.out.format = PK_BF16;
        copy.out.stride = round_up(op.x.cols, 8) * 2;
        if (op.x.cols % 8)
            if (int32_t e = check(cudaMemsetAsync(l.scratch + plan.x, 0, n_rows * copy.out.stride, l.stream), "experts")) return e;
        if (int32_t e = launch_copy(l, copy)) return e;
        x = copy.out;
        x.cols = round_up(op.x.cols, 8);
    }
    if (!plan.is_lone)
        if (int32_t e = launch_sort(l, op, plan, places, route)) return e;
    ExpertProduct p = {};
    p.items = reinterpret_cast<const ExpertItem *>(l.scratch + plan.items);
    p.n_items = reinterpret_cast<const int32_t *>(l.scratch + plan.n_items);
    p.order = reinterpret_cast<const int32_t *>(l.scratch + plan.order);
    p.ids = plan.is_lone ? reinterpret_cast<const int32_t *>(op.ids.data) : nullptr;
    p.places = places.at;
    p.info = l.info;
    p.rows_symbol = op.x.rows;
    p.n_used = static_cast<int32_t>(op.ids.cols);
    p.n_experts = op.n_experts;
    p.limit = op.limit;
    p.alpha = op.alpha;

    // The product of stack `which` (0 gate, 1 up, 2 down) as the plan has shaped it.
    auto run = [&](ExpertProduct q, const Packed &packed, int which) {
        if (plan.is_stream || !is_fp4(packed.format) || !has_fp4_mma(l.ctx)) return launch_product(l, packed.format, plan, q, which);
        const int32_t per_token = q.by_position ? q.n_used : 1;
        float *factors = reinterpret_cast<float *>(l.scratch + plan.fp4);
        const NarrowFp4 a = {q.x, l.scratch + plan.fp4 + round_up(plan.pairs * 4, 256), factors, nullptr, q.x_stride, fp4_row_bytes(packed.format, packed.padded_cols, kTerms), q.rows_symbol, q.x_format, q.k, 0, 0, per_token};
        if (q.first_row == 0)
            if (int32_t e = launch_narrow_fp4(l, packed.format, a, n_rows * per_token)) return e;
        q.x = a.out;
        q.x_stride = a.row_bytes / 2;
        q.x_factors = factors;
        return launch_product(l, packed.format, plan, q, which);
    };
    auto shape = [&](ExpertProduct *q, const Packed &packed, int which) {
        q->n_units = static_cast<int32_t>(packed.padded_cols / unit_of(packed.format).unit);
        q->warps_k = plan.warps_k[which];
        q->x_row_bytes = static_cast<int32_t>(plan.x_row_bytes[which]);
    };
    const Packed &gate = *find_packed(l.ctx, first_stack(op)), &up = *find_packed(l.ctx, op.up), &down = *find_packed(l.ctx, op.down);
    const bool has_gate = op.gate.data != 0, is_one = has_gate && gate.format == up.format;
    p.w[0] = has_gate ? weight_of(l, op.gate, op.gate_bias, places.shift) : weight_of(l, op.up, op.up_bias, places.shift);
    if (is_one) p.w[1] = weight_of(l, op.up, op.up_bias, places.shift);
    p.n_w = is_one ? 2 : 1;
    p.act = op.act;
    p.x = reinterpret_cast<const void *>(x.data);
    p.x_stride = elements_apart(x);
    p.x_format = x.format;
    p.is_wide = is_wide(x);
    p.k = static_cast<int32_t>(x.cols);
    p.n_rows = static_cast<int32_t>(gate.rows);
    p.out = l.scratch + plan.hidden;
    p.out_format = PK_BF16;
    p.out_stride = p.padded_out = static_cast<int32_t>(plan.hidden_cols);
    shape(&p, gate, 0);
    ExpertProduct d = p;
    d.w[0] = weight_of(l, op.down, op.down_bias, places.shift);
    d.w[1] = {};
    d.act = PK_ACT_NONE;
    d.n_w = 1;
    d.x = l.scratch + plan.hidden;
    d.x_stride = plan.hidden_cols;
    d.x_format = PK_BF16;
    d.by_position = 1;
    d.is_wide = gate.rows % 8 == 0;
    d.k = static_cast<int32_t>(plan.is_stream ? gate.rows : plan.hidden_cols);
    d.n_rows = static_cast<int32_t>(down.rows);
    d.out = l.scratch + plan.out;
    d.out_format = plan.out_format;
    d.out_stride = plan.panel;
    d.padded_out = 0;
    shape(&d, down, 2);
    const bool is_alike = gate.format == down.format && up.format == down.format;
    // Where every block has at most one tile of the output; with more, the blocks of three launches share the work better.
    if (plan.is_lone && is_alike && lone_shared(plan, op) <= kLoneShared && down.rows <= 16ll * l.ctx->n_processors) {
        p.warps_k = lone_warps(*l.ctx, op, p.n_units);
        LoneEnd end = {};
        end.weights = reinterpret_cast<const float *>(op.weights.data);
        end.add = reinterpret_cast<const void *>(op.add.data);
        end.y = reinterpret_cast<void *>(op.y.data);
        end.counter = l.counters;
        end.add_format = op.add.format;
        end.y_format = op.y.format;
        end.scale = op.scale;
        return launch_lone(l, down.format, p, d, end, lone_shared(plan, op));
    }
    if (plan.is_stream && !plan.is_lone && is_alike && fits_expert_few(l, p, d, down.format, plan.item_pairs)) {
        const int32_t n_places = places.at != nullptr ? places.n : op.n_experts;
        if (int32_t e = launch_expert_few(l, p, d, reinterpret_cast<int32_t *>(l.scratch + plan.done), down.format, plan.item_pairs, n_places)) return e;
        return launch_combine(l, op, plan, 0, down.rows);
    }
    if (int32_t e = run(p, gate, 0)) return e;
    if (has_gate && !is_one) {
        p.w[0] = weight_of(l, op.up, op.up_bias, places.shift);
        p.gate = p.out;
        shape(&p, up, 1);
        if (int32_t e = run(p, up, 1)) return e;
    }
    for (int64_t first = 0; first < down.rows; first += plan.panel) {
        d.first_row = static_cast<int32_t>(first);
        d.n_rows = static_cast<int32_t>(std::min(plan.panel, down.rows - first));
        if (int32_t e = run(d, down, 2)) return e;
        if (int32_t e = launch_combine(l, op, plan, first, d.n_rows)) return e;
    }
    return PK_OK;
}

int32_t launch_experts(const Launch &l, const pk_op_experts &op) { return run_experts(l, op, {}, nullptr); }
int32_t launch_experts_at(const Launch &l, const pk_op_experts &op, const ExpertPlaces &places) { return run_experts(l, op, places, nullptr); }

int32_t launch_chosen_experts(const Launch &l, const pk_op_route &route, const pk_op_experts &op) {
    const Plan plan = plan_of(*l.ctx, op, bound(l, op.x.rows));
    const bool is_one = is_few_choice(route) && op.n_experts <= 32 * kChoosePerLane && !plan.is_lone && plan.is_stream && plan.pairs <= kFewPairs && route.ids.data == op.ids.data &&
                        route.weights.data == op.weights.data && route.ids.stride == op.ids.stride && route.logits.cols == op.n_experts && route.logits.rows == op.x.rows;
    if (!is_one)
        if (int32_t e = launch_route(l, route)) return e;
    return run_experts(l, op, {}, is_one ? &route : nullptr);
}

int32_t check_experts(pk_ctx *ctx, const pk_op_experts &op, int64_t at) {
    const pk_tensor *stacks[3] = {&op.gate, &op.up, &op.down};
    static const char *const kNames[3] = {"gate", "up", "down"};
    const Packed *packed[3] = {};
    for (int i = op.gate.data ? 0 : 1; i < 3; ++i) {
        for (int32_t e = 0; e < op.n_experts; ++e) {
            pk_tensor one = *stacks[i];
            one.data += e * one.stride;
            const Packed *p = find_packed(ctx, one);
            if (p == nullptr || p->rows != one.rows || p->cols != one.cols)
                return fail(PK_BAD_ARG, "op %lld experts: matrix %d of %s was not made by pk_repack of this context", (long long)at, e, kNames[i]);
            if (e == 0) packed[i] = p;
            if (p->format != packed[i]->format || p->scale_kind != packed[i]->scale_kind)
                return fail(PK_UNSUPPORTED, "op %lld experts: matrices 0 and %d of %s have different formats or scales", (long long)at, e, kNames[i]);
        }
    }
    if (op.ids.cols > kMostChosen) return fail(PK_UNSUPPORTED, "op %lld experts: %lld experts a token; the CUDA pack takes up to %d", (long long)at, (long long)op.ids.cols, kMostChosen);
    const int64_t widest = std::max(op.x.cols, op.up.rows);
    if (widest > 16384) return fail(PK_UNSUPPORTED, "op %lld experts: rows of %lld elements; the CUDA pack takes up to 16384", (long long)at, (long long)widest);
    for (const pk_tensor *t : {&op.y, &op.add})
        if (t->data && t->format != PK_F32 && t->format != PK_BF16) return fail(PK_UNSUPPORTED, "op %lld experts: y or add is format %d; the CUDA pack takes F32 and BF16", (long long)at, t->format);
    return PK_OK;
}

int64_t experts_scratch(const pk_ctx *ctx, const pk_op_experts &op, int64_t max_rows) {
    if (is_invariant(ctx)) {
        // Smaller steps may have more of the output at once.
        const Plan p = plan_of(*ctx, op, max_rows);
        return p.bytes + std::max<int64_t>(0, std::min({kPanelBytes, int64_t{ctx->n_processors} << 20, p.pairs * op.y.cols * 4}) - p.pairs * p.panel * 4);
    }
    // Both ways: the streaming product serves small steps of a program whose largest step takes tiles.
    const int64_t few = std::max<int64_t>(kStreamTokens, int64_t{can_group(*ctx, op) ? kGroupedPairs : kStreamPairs} * op.n_experts / op.ids.cols);
    return std::max({plan_of(*ctx, op, max_rows).bytes, plan_of(*ctx, op, std::min(max_rows, few)).bytes, plan_of(*ctx, op, std::min(max_rows, few + 1)).bytes});
}

}  // namespace pk
