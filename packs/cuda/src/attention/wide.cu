// Paged attention for what the other kernels do not take: heads up to 576 wide, values that are the end of the keys (latent
// attention), tokens that see the ones behind them (encoders).
//
// An item is (row, KV head, tile of 64 (token, head) pairs, range of positions): heads that share a KV head share its loads. Eight
// warps: 16 pairs x half of the positions of a tile for S, 16 pairs x half of the values' columns for O; K and V tiles of 32
// positions come in cp.async stages. When the items do not fill the device, positions are cut into ranges of equal length and a
// second kernel joins their sums. KV of every format, widened to bf16; widths in multiples of eight.
#include "../../include/attention_tiles.cuh"
#include "../../include/attention_wide.cuh"

namespace pk {
namespace {

constexpr int kThreads = 256, kPairs = 64, kTile = 32, kPitch = 80, kMostSplits = 32;
constexpr float kLowest = -1e30f;  // where running maxima start: finite, so that differences are never NaN

struct WideArguments {
    AttentionArguments a;
    float *part;  // [items of split positions, 64, width of the values]
    float2 *ml;   // [items, 64]: largest logit (base 2) and sum
    int32_t v_from, n_blocks;
};

template <int kDK, int kDV, bool kLatent>
struct Shape {
    static constexpr int kStages = kDK <= 128 ? 4 : kLatent || kDK <= 256 ? 3 : 2, kQ = kPairs * kRowBytes<kDK>;
    static constexpr int kV = kTile * kRowBytes<kDK>, kStage = kV + (kLatent ? 0 : kTile * kRowBytes<kDV>);
    static constexpr int kBytes = kQ + kStages * kStage + kPairs * kPitch, kPerProcessor = kDV <= 128 ? 2 : 1;
};

struct WideItem {
    const int32_t *pages;
    int head, first_pair, n_pairs, start, position, row_end;
    int first, end;  // positions that some pair of the tile sees
};

// Running sums of tiles per row into `ends`; returns their number.
__device__ __forceinline__ int schedule_wide(const AttentionArguments &a, int *ends, int *warps, int *total) {
    const int n_rows = a.info->n_rows, group = a.n_heads / a.n_kv_heads;
    int n_tiles = 0;
    for (int base = 0; base < n_rows; base += kThreads) {
        const int r = base + threadIdx.x, n = r < n_rows && !(a.row_flags[r] & PK_ROW_DEAD) ? a.row_start[r + 1] - a.row_start[r] : 0;
        const int end = block_scan((n * group + kPairs - 1) / kPairs, warps) + n_tiles;
        if (r < n_rows) ends[r] = end;
        __syncthreads();
        if (threadIdx.x == kThreads - 1) *total = end;
        __syncthreads();
        n_tiles = *total;
        __syncthreads();
    }
    return n_tiles;
}

__device__ __forceinline__ int splits_of(int n_items, int n_blocks) { return n_items == 0 || n_items >= n_blocks ? 1 : min(n_blocks / n_items, kMostSplits); }

// Later tiles of a row first: they see more positions.
__device__ __forceinline__ WideItem find_wide(const AttentionArguments &a, const int *ends, int n_tiles, int index) {
    const int of_all = n_tiles - 1 - index / a.n_kv_heads, group = a.n_heads / a.n_kv_heads;
    int low = 0, high = a.info->n_rows - 1;
    while (low < high) {
        const int mid = (low + high) >> 1;
        if (ends[mid] > of_all) high = mid; else low = mid + 1;
    }
    WideItem item = {};
    item.head = index % a.n_kv_heads;
    item.first_pair = (of_all - (low ? ends[low - 1] : 0)) * kPairs;
    item.start = a.row_start[low];
    item.position = a.row_position[low];
    const int n_tokens = a.row_start[low + 1] - item.start;
    item.n_pairs = n_tokens * group;
    item.row_end = item.position + n_tokens;
    item.pages = a.page_table + static_cast<int64_t>(a.row_slot[low]) * a.slot_pages;
    const int last = item.position + min(item.first_pair + kPairs - 1, item.n_pairs - 1) / group;
    item.end = !a.is_bidirectional ? last + 1 : a.window > 0 ? min(item.row_end, last + a.window) : item.row_end;
    item.first = a.window > 0 ? max(0, item.position + item.first_pair / group - a.window + 1) : 0;
    return item;
}

// Asks for Q of a tile, [64, kDK] bf16; zeros outside.
template <int kDK>
__device__ __forceinline__ void load_tile_q(const AttentionArguments &a, const WideItem &item, uint8_t *to, int n_pieces) {
    const int group = a.n_heads / a.n_kv_heads, lane = threadIdx.x & 31;
    const bool is_aligned = a.q_format == PK_BF16 && a.q_stride % 8 == 0 && reinterpret_cast<uintptr_t>(a.q) % 16 == 0;
    for (int p = threadIdx.x >> 5; p < kPairs; p += kThreads / 32) {
        const int pair = item.first_pair + p;
        const bool is_there = pair < item.n_pairs;
        const int64_t from = is_there ? static_cast<int64_t>(item.start + pair / group) * a.q_stride + static_cast<int64_t>(item.head * group + pair % group) * a.head_width : 0;
        for (int piece = lane; piece < n_pieces; piece += 32) {
            const bool ok = is_there && piece * 8 < a.head_width;
            uint8_t *at = to + piece_offset<kDK>(p, piece);
            if (is_aligned) {
                copy16_async(shared_address(at), static_cast<const bf16 *>(a.q) + (ok ? from + piece * 8 : 0), ok);
            } else {
                for (int e = 0; e < 4; ++e) reinterpret_cast<uint32_t *>(at)[e] = ok ? load_q_pair(a, from + piece * 8 + 2 * e) : 0;
            }
        }
    }
}

// Asks for K and V of kTile positions from `first` on; zeros from `end` on. A warp brings four positions.
template <int kDK, int kDV, bool kLatent>
__device__ __forceinline__ void load_tile_kv(const AttentionArguments &a, const WideItem &item, int first, int end, uint8_t *to, int k_pieces) {
    using S = Shape<kDK, kDV, kLatent>;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
        const int token = warp * (kTile / 8) + j;
        const bool is_there = first + token < end;
        const int p = is_there ? first + token : end - 1, index = page_of(a, p);
        const uint8_t *page = a.kv + static_cast<int64_t>(item.pages[index]) * a.page_stride;
        const int64_t in_page = static_cast<int64_t>(item.head) * a.page_tokens + p - index * a.page_tokens;
        auto put = [&](uint8_t *at, const uint8_t *base, int64_t element, bool ok) {
            if (a.kv_format == PK_BF16)
                copy16_async(shared_address(at), base + (ok ? element * 2 : 0), ok);
            else
                *reinterpret_cast<uint4 *>(at) = ok ? load_kv8(base, element, a.kv_format) : make_uint4(0, 0, 0, 0);
        };
        for (int piece = lane; piece < k_pieces; piece += 32)
            put(to + piece_offset<kDK>(token, piece), page + a.k_offset, in_page * a.head_width + piece * 8, is_there && piece * 8 < a.head_width);
        if constexpr (!kLatent)
            for (int piece = lane; piece < (a.v_width + 15) / 16 * 2; piece += 32)
                put(to + S::kV + piece_offset<kDV>(token, piece), page + a.v_offset, in_page * a.v_width + piece * 8, is_there && piece * 8 < a.v_width);
    }
}

// Grid: n_blocks. Shared: Q, stages of K and V, P, [rows] ends.
template <int kDK, int kDV, bool kLatent>
__global__ void __launch_bounds__(kThreads, Shape<kDK, kDV, kLatent>::kPerProcessor) attention_wide_kernel(const __grid_constant__ WideArguments w) {
    using S = Shape<kDK, kDV, kLatent>;
    constexpr int kStages = S::kStages;
    const AttentionArguments &a = w.a;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int warps[8];
    __shared__ int total;
    __shared__ float tops[2][kPairs], sums[2][kPairs];
    uint8_t *ring = shared + S::kQ, *p_shared = ring + kStages * S::kStage;
    int *ends = reinterpret_cast<int *>(p_shared + kPairs * kPitch);
    wait_dependence();
    release_dependents();
    clear_dead_rows(a);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wr = warp & 3, wc = warp >> 2, group = a.n_heads / a.n_kv_heads;
    const int n_tiles = schedule_wide(a, ends, warps, &total), n_items = n_tiles * a.n_kv_heads, n_splits = splits_of(n_items, w.n_blocks);
    const int n_k = (a.head_width + 15) / 16;
    const uint32_t q_at = shared_address(shared), p_at = shared_address(p_shared);
    for (int index = blockIdx.x; index < n_items * n_splits; index += gridDim.x) {
        const WideItem item = find_wide(a, ends, n_tiles, index / n_splits);
        const int per = ((item.end - item.first + n_splits - 1) / n_splits + kTile - 1) / kTile * kTile;
        const int first = item.first + index % n_splits * per, end = min(item.end, first + per), n_steps = (max(0, end - first) + kTile - 1) / kTile;
        wait_async<0>();
        __syncthreads();
        load_tile_q<kDK>(a, item, shared, 2 * n_k);
        auto fetch = [&](int n) {
            if (n < n_steps) load_tile_kv<kDK, kDV, kLatent>(a, item, first + n * kTile, end, ring + n % kStages * S::kStage, 2 * n_k);
            commit_async();
        };
#pragma unroll
        for (int n = 0; n < kStages - 1; ++n) fetch(n);
        int pair[2], low[2], limit[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            pair[h] = item.first_pair + wr * 16 + (lane >> 2) + 8 * h;
            const int own = item.position + pair[h] / group;
            low[h] = a.window > 0 ? own - a.window + 1 : 0;
            limit[h] = pair[h] >= item.n_pairs ? -1 : !a.is_bidirectional ? own : a.window > 0 ? min(item.row_end - 1, own + a.window - 1) : item.row_end - 1;
        }
        float o[kDV / 16][4] = {}, top[2] = {kLowest, kLowest}, sum[2] = {0.0f, 0.0f};
#pragma unroll 1
        for (int n = 0; n < n_steps; ++n) {
            wait_async<kStages - 2>();
            __syncthreads();
            fetch(n + kStages - 1);
            const uint32_t k_at = shared_address(ring) + n % kStages * S::kStage, v_at = kLatent ? k_at : k_at + S::kV;
            float s[2][4] = {};
#pragma unroll 4
            for (int k = 0; k < n_k; ++k) {
                uint32_t q[4], b[4];
                load_matrix4(q, q_at + piece_offset<kDK>(wr * 16 + (lane & 15), 2 * k + (lane >> 4)));
                load_matrix4(b, k_at + piece_offset<kDK>(wc * 16 + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
                mma_bf16(s[0], q[0], q[1], q[2], q[3], b[0], b[1]);
                mma_bf16(s[1], q[0], q[1], q[2], q[3], b[2], b[3]);
            }
            logits2<8>(&s[0][0], a.scale, a.softcap);
            float most[2] = {kLowest, kLowest}, fade[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int p = first + n * kTile + wc * 16 + (i >> 1) * 8 + 2 * (lane & 3) + (i & 1);
                    float &x = s[i >> 1][2 * h + (i & 1)];
                    if (p >= end || p > limit[h] || p < low[h]) x = -INFINITY;
                    most[h] = fmaxf(most[h], x);
                }
                most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
                most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
                if ((lane & 3) == 0) tops[wc][wr * 16 + (lane >> 2) + 8 * h] = most[h];
            }
            __syncthreads();
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = wr * 16 + (lane >> 2) + 8 * h;
                const float next = fmaxf(top[h], fmaxf(tops[0][row], tops[1][row]));
                fade[h] = power2(top[h] - next);
                top[h] = next;
                sum[h] *= fade[h];
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    const float x = power2(s[t][2 * h] - next), y = power2(s[t][2 * h + 1] - next);
                    sum[h] += x + y;
                    *reinterpret_cast<uint32_t *>(p_shared + row * kPitch + (wc * 16 + t * 8 + 2 * (lane & 3)) * 2) = pack_bf16(x, y);
                }
            }
            __syncthreads();
#pragma unroll
            for (int d = 0; d < kDV / 16; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[d][e] *= fade[e >> 1];
#pragma unroll
            for (int k = 0; k < kTile / 16; ++k) {
                uint32_t p[4];
                load_matrix4(p, p_at + (wr * 16 + (lane & 15)) * kPitch + (2 * k + (lane >> 4)) * 16);
#pragma unroll
                for (int d = 0; d < kDV / 32; ++d) {
                    const int column = wc * (kDV / 2) + d * 16;
                    if (column < a.v_width) {
                        uint32_t b[4];
                        load_matrix4_transposed(b, v_at + piece_offset<kLatent ? kDK : kDV>(k * 16 + (lane & 15), ((kLatent ? w.v_from : 0) + column) / 8 + (lane >> 4)));
                        mma_bf16(o[2 * d], p[0], p[1], p[2], p[3], b[0], b[1]);
                        mma_bf16(o[2 * d + 1], p[0], p[1], p[2], p[3], b[2], b[3]);
                    }
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            if ((lane & 3) == 0) sums[wc][wr * 16 + (lane >> 2) + 8 * h] = sum[h];
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (pair[h] >= item.n_pairs) continue;
            const int row = wr * 16 + (lane >> 2) + 8 * h, q_head = item.head * group + pair[h] % group;
            const float all = sums[0][row] + sums[1][row];
            const int64_t at = static_cast<int64_t>(item.start + pair[h] / group) * a.out_stride + static_cast<int64_t>(q_head) * a.v_width, to = static_cast<int64_t>(index) * kPairs + row;
            const float f = n_splits == 1 ? last_factor(a, q_head, top[h], all) : 1.0f;
            if (n_splits > 1 && wc == 0 && (lane & 3) == 0) w.ml[to] = make_float2(top[h], all);
#pragma unroll
            for (int d = 0; d < kDV / 16; ++d) {
                const int column = wc * (kDV / 2) + d * 8 + 2 * (lane & 3);
                if (column >= a.v_width) continue;
                if (n_splits == 1)
                    store_out_pair(a, at + column, o[d][2 * h] * f, o[d][2 * h + 1] * f);
                else
                    *reinterpret_cast<float2 *>(w.part + to * kDV + column) = make_float2(o[d][2 * h], o[d][2 * h + 1]);
            }
        }
    }
    wait_async<0>();
}

// Joins the ranges of positions of a tile; nothing to do when there is one. A warp a pair. Grid: any. Shared: [rows] ends.
template <int kDV>
__global__ void __launch_bounds__(kThreads) attention_join_kernel(const __grid_constant__ WideArguments w) {
    const AttentionArguments &a = w.a;
    extern __shared__ int ends[];
    __shared__ int warps[8];
    __shared__ int total;
    wait_dependence();
    release_dependents();
    const int lane = threadIdx.x & 31, group = a.n_heads / a.n_kv_heads;
    const int n_tiles = schedule_wide(a, ends, warps, &total), n_items = n_tiles * a.n_kv_heads, n_splits = splits_of(n_items, w.n_blocks);
    if (n_splits == 1) return;
    for (int i = blockIdx.x * (kThreads / 32) + (threadIdx.x >> 5); i < n_items * kPairs; i += gridDim.x * (kThreads / 32)) {
        const WideItem item = find_wide(a, ends, n_tiles, i / kPairs);
        const int pair = item.first_pair + i % kPairs, q_head = item.head * group + pair % group;
        if (pair >= item.n_pairs) continue;
        auto row_of = [&](int s) { return (static_cast<int64_t>(i / kPairs) * n_splits + s) * kPairs + i % kPairs; };
        const float2 mine = lane < n_splits ? w.ml[row_of(lane)] : make_float2(kLowest, 0.0f);
        float top = mine.x;
        for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
        const float weight = power2(mine.x - top), f = last_factor(a, q_head, top, warp_sum(mine.y * weight));
        float v[(kDV + 63) / 64][2] = {};
        for (int s = 0; s < n_splits; ++s) {
            const float by = __shfl_sync(~0u, weight, s);
            const float *from = w.part + row_of(s) * kDV;
#pragma unroll
            for (int j = 0; j < (kDV + 63) / 64; ++j) {
                const int column = j * 64 + 2 * lane;
                if (column >= a.v_width) continue;
                const float2 x = *reinterpret_cast<const float2 *>(from + column);
                v[j][0] = fmaf(by, x.x, v[j][0]);
                v[j][1] = fmaf(by, x.y, v[j][1]);
            }
        }
        const int64_t at = static_cast<int64_t>(item.start + pair / group) * a.out_stride + static_cast<int64_t>(q_head) * a.v_width;
#pragma unroll
        for (int j = 0; j < (kDV + 63) / 64; ++j)
            if (const int column = j * 64 + 2 * lane; column < a.v_width) store_out_pair(a, at + column, v[j][0] * f, v[j][1] * f);
    }
}

template <int kDK, int kDV, bool kLatent>
int32_t start(const Launch &l, WideArguments &w) {
    using S = Shape<kDK, kDV, kLatent>;
    const AttentionArguments &a = w.a;
    w.n_blocks = l.ctx->n_processors * S::kPerProcessor;
    w.ml = reinterpret_cast<float2 *>(w.part + static_cast<int64_t>(w.n_blocks) * kPairs * kDV);
    if (int32_t e = launch(l, "attention wide", attention_wide_kernel<kDK, kDV, kLatent>, dim3(w.n_blocks), dim3(kThreads), S::kBytes + a.max_rows * 4, w)) return e;
    return launch(l, "attention join", attention_join_kernel<kDV>, dim3(l.ctx->n_processors), dim3(kThreads), a.max_rows * 4, w);
}

}  // namespace

int64_t attention_wide_scratch(const pk_ctx *ctx) { return int64_t{2} * ctx->n_processors * kPairs * (512 + 2) * 4; }

int32_t launch_attention_wide(const Launch &l, const AttentionArguments &a, bool is_latent) {
    WideArguments w = {};
    w.a = a;
    w.part = a.partial;
    w.v_from = is_latent ? a.head_width - a.v_width : 0;
    if (is_latent) return start<576, 512, true>(l, w);
    const int width = a.head_width > a.v_width ? a.head_width : a.v_width;
    if (width <= 64) return start<64, 64, false>(l, w);
    if (width <= 128) return start<128, 128, false>(l, w);
    return width <= 256 ? start<256, 256, false>(l, w) : start<512, 512, false>(l, w);
}

}  // namespace pk
