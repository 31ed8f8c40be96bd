// Paged attention for rows of few tokens: out[t, h] = softmax(scale q.k) v over the pages, KV read once per KV head.
//
// An item is (row, KV head, tile of 16 (token, head) pairs, range of positions); each block derives the list from the row
// lengths in device memory, so that ranges are equal whatever the lengths. Four warps take groups of 16 positions in turn,
// each with a cp.async ring of its own, S and O in mma registers, and join in shared memory. Rows cut into several ranges
// leave partial sums; the last block to arrive joins them in range order. Grid: persistent. KV: BF16 (cp.async), F16, F32,
// FP8 (converted on the way). Does not handle: rows that is_decode_row() leaves to prefill.
#include "../../include/attention.cuh"

namespace pk {
namespace {

constexpr int kThreads = 128, kWarps = 4, kTokens = 16, kStages = 3, kMinRange = 128, kMostSplits = 256;

struct Item {
    int row, head, tile, split, n_splits, first, last, group_at;
};

// Items per row, as a running sum in shared memory: the schedule of this launch.
struct Schedule {
    int n_items, range;
};

__device__ __forceinline__ int visible(const AttentionArguments &a, int r, int *tiles, int *first) {
    const int n = a.row_start[r + 1] - a.row_start[r], group = a.n_heads / a.n_kv_heads, position = a.row_position[r];
    *tiles = (n * group + 15) / 16;
    *first = a.window > 0 ? max(0, position - a.window + 1) : 0;
    if (!is_decode_row(n, group) || (a.row_flags[r] & PK_ROW_DEAD)) return 0;
    return position + n - *first;
}

__device__ Schedule build_schedule(const AttentionArguments &a, int *ends, int *warps) {
    const int n_rows = a.info->n_rows;
    int work = 0;  // in units of 16 positions
    for (int r = threadIdx.x; r < n_rows; r += kThreads) {
        int tiles, first;
        const int n = visible(a, r, &tiles, &first);
        work += (n + 15) / 16 * tiles;
    }
    const int scan = block_scan(work, warps);
    __shared__ int total;
    if (threadIdx.x == kThreads - 1) total = scan;
    __syncthreads();
    const int64_t positions = static_cast<int64_t>(total) * 16 * a.n_kv_heads;
    // One round of blocks when a few rows must fill the device, else two; every row may add one item by rounding up.
    const int64_t blocks = gridDim.x, heads = static_cast<int64_t>(n_rows) * a.n_kv_heads;
    const int64_t items = 2 * heads <= blocks ? blocks - heads : 2 * blocks > heads + blocks / 2 ? 2 * blocks - heads / 2 : 2 * blocks;
    const int range = max(max(kMinRange, (a.slot_pages * a.page_tokens + kMostSplits - 1) / kMostSplits), static_cast<int>((positions + items - 1) / items));
    int carried = 0;
    for (int base = 0; base < n_rows; base += kThreads) {
        const int r = base + threadIdx.x;
        int tiles = 0, first, items = 0;
        if (r < n_rows) {
            const int n = visible(a, r, &tiles, &first);
            items = (n + range - 1) / range * tiles * a.n_kv_heads;
        }
        const int end = block_scan(items, warps) + carried;
        if (r < n_rows) ends[r] = end;
        __syncthreads();
        if (threadIdx.x == kThreads - 1) total = end;
        __syncthreads();
        carried = total;
        __syncthreads();
    }
    return {carried, range};
}

__device__ Item find_item(const AttentionArguments &a, const int *ends, const Schedule &s, int i) {
    int low = 0, high = a.info->n_rows - 1;
    while (low < high) {
        const int mid = (low + high) >> 1;
        if (ends[mid] > i) high = mid; else low = mid + 1;
    }
    Item item;
    int tiles, first;
    const int n = visible(a, low, &tiles, &first), local = i - (low ? ends[low - 1] : 0);
    item.row = low;
    item.n_splits = (n + s.range - 1) / s.range;
    item.split = local % item.n_splits;
    item.tile = local / item.n_splits % tiles;
    item.head = local / item.n_splits / tiles;
    const int per = ((n + item.n_splits - 1) / item.n_splits + 15) / 16 * 16;
    item.first = min(first + n, first + item.split * per);
    item.last = min(first + n, item.first + per);
    item.group_at = i - item.split;
    return item;
}

template <int kD>
__device__ void write_row(const AttentionArguments &a, const Item &item, int pair, int d, float o, float sum, float top) {
    const int group = a.n_heads / a.n_kv_heads, token = a.row_start[item.row] + pair / group, head = item.head * group + pair % group;
    if (a.sinks != nullptr) {
        const float sink = a.sinks[head] * kLog2e, joint = fmaxf(top, sink);
        o *= power2(top - joint);
        sum = sum * power2(top - joint) + power2(sink - joint);
    }
    store_from_f32(a.out, token * a.out_stride + static_cast<int64_t>(head) * a.v_width + d, a.out_format, sum > 0.0f ? o / sum : 0.0f);
}

template <int kD, bool kCopy>
__global__ void __launch_bounds__(kThreads, kD <= 128 ? 2 : 1) attention_decode_kernel(const __grid_constant__ AttentionArguments a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int warps[kWarps];
    __shared__ int is_last;
    __shared__ float merge_top[kWarps][16], merge_sum[kWarps][16];
    constexpr int kStageBytes = 2 * kTokens * kRowBytes<kD>, kWarpBytes = kStages * kStageBytes;
    int *ends = reinterpret_cast<int *>(shared + kWarps * kWarpBytes);
    wait_dependence();
    release_dependents();
    clear_dead_rows(a);
    const Schedule schedule = build_schedule(a, ends, warps);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = a.n_heads / a.n_kv_heads;
    uint8_t *ring = shared + warp * kWarpBytes;
    const uint32_t ring_at = shared_address(ring);
    const int k_pieces = a.head_width / 8, v_pieces = a.v_width / 8;

    for (int index = blockIdx.x; index < schedule.n_items; index += gridDim.x) {
        const Item item = find_item(a, ends, schedule, index);
        const int start = a.row_start[item.row], n_pairs = (a.row_start[item.row + 1] - start) * group, position = a.row_position[item.row];
        const int32_t *pages = a.page_table + static_cast<int64_t>(a.row_slot[item.row]) * a.slot_pages;
        // This lane's two rows of the tile.
        int pair[2], limit[2];
        uint32_t q[kD / 16][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            pair[h] = item.tile * 16 + (lane >> 2) + 8 * h;
            limit[h] = pair[h] < n_pairs ? position + pair[h] / group : -1;
        }
#pragma unroll
        for (int k = 0; k < kD / 16; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int h = e & 1, column = 16 * k + 2 * (lane & 3) + 8 * (e >> 1);
                q[k][e] = 0;
                if (limit[h] >= 0 && column < a.head_width) {
                    const int64_t from = static_cast<int64_t>(start + pair[h] / group) * a.q_stride + (item.head * group + pair[h] % group) * a.head_width + column;
                    q[k][e] = load_q_pair(a, from);
                }
            }
        float o[kD / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

        auto fetch = [&](int n) {  // the n-th group of 16 positions of this warp
            const int first = item.first + (n * kWarps + warp) * kTokens;
            if (first < item.last) {
                const int mine = first + (lane & 15), p = min(mine, item.last - 1);
                const int64_t page = static_cast<int64_t>(pages[page_of(a, p)]) * a.page_stride;
                const int in = item.head * a.page_tokens + p - page_of(a, p) * a.page_tokens;
                const uint32_t at = ring_at + n % kStages * kStageBytes;
                uint8_t *to = ring + n % kStages * kStageBytes;
                constexpr int kPieces = kD / 8, kPer = kTokens * kPieces / 32;
#pragma unroll
                for (int part = 0; part < 2; ++part)
#pragma unroll
                    for (int j = 0; j < kPer; ++j) {
                        const int i = j * 32 + lane, token = i / kPieces, piece = i % kPieces;
                        const int64_t page_at = __shfl_sync(~0u, page, token);
                        const int in_page = __shfl_sync(~0u, in, token);
                        const int pieces = part ? v_pieces : k_pieces, width = part ? a.v_width : a.head_width;
                        const bool ok = first + token < item.last && piece < pieces;
                        const uint8_t *base = a.kv + page_at + (part ? a.v_offset : a.k_offset);
                        const int64_t element = static_cast<int64_t>(in_page) * width + (ok ? piece * 8 : 0);
                        const uint32_t offset = part * kTokens * kRowBytes<kD> + piece_offset<kD>(token, piece);
                        if constexpr (kCopy) {
                            copy16_async(at + offset, base + element * 2, ok);
                        } else {
                            *reinterpret_cast<uint4 *>(to + offset) = ok ? load_kv8(base, element, a.kv_format) : make_uint4(0, 0, 0, 0);
                        }
                    }
            }
            commit_async();
        };
        const int n_groups = max(0, (item.last - item.first - warp * kTokens + kWarps * kTokens - 1) / (kWarps * kTokens));
        // One copy of fetch in the code: this kernel is short of instruction cache, not of branches.
#pragma unroll 1
        for (int n = 1 - kStages; n < n_groups; ++n) {
            if (n >= 0) {
                wait_async<kStages - 2>();
                __syncwarp();
            }
            fetch(n + kStages - 1);
            if (n < 0) continue;
            const uint32_t k_at = ring_at + n % kStages * kStageBytes, v_at = k_at + kTokens * kRowBytes<kD>;
            float s[2][4] = {};
#pragma unroll
            for (int k = 0; k < kD / 16; ++k) {
                uint32_t b[4];
                load_matrix4(b, k_at + piece_offset<kD>((lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
                mma_bf16(s[0], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
                mma_bf16(s[1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
            }
            const int first = item.first + (n * kWarps + warp) * kTokens;
            logits2<8>(&s[0][0], a.scale, a.softcap);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float most = -INFINITY;
#pragma unroll
                for (int t = 0; t < 2; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int p = first + t * 8 + 2 * (lane & 3) + e;
                        const bool ok = p < item.last && p <= limit[h] && (a.window == 0 || p > limit[h] - a.window);
                        float &x = s[t][2 * h + e];
                        x = ok ? x : -INFINITY;
                        most = fmaxf(most, x);
                    }
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                const float next = fmaxf(top[h], most), base = next == -INFINITY ? 0.0f : next, fade = power2(top[h] - base);
                float part = 0.0f;
#pragma unroll
                for (int t = 0; t < 2; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float &x = s[t][2 * h + e];
                        x = power2(x - base);
                        part += x;
                    }
                sum[h] = sum[h] * fade + part;
                top[h] = next;
#pragma unroll
                for (int d = 0; d < kD / 8; ++d) {
                    o[d][2 * h] *= fade;
                    o[d][2 * h + 1] *= fade;
                }
            }
            const uint32_t p0 = pack_bf16(s[0][0], s[0][1]), p1 = pack_bf16(s[0][2], s[0][3]), p2 = pack_bf16(s[1][0], s[1][1]), p3 = pack_bf16(s[1][2], s[1][3]);
#pragma unroll
            for (int d = 0; d < kD / 16; ++d) {
                uint32_t b[4];
                load_matrix4_transposed(b, v_at + piece_offset<kD>((lane & 7) + ((lane >> 3) & 1) * 8, 2 * d + (lane >> 4)));
                mma_bf16(o[2 * d], p0, p1, p2, p3, b[0], b[1]);
                mma_bf16(o[2 * d + 1], p0, p1, p2, p3, b[2], b[3]);
            }
            __syncwarp();
        }
        wait_async<0>();
        // Join the warps: each leaves its O in its own ring.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
            sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
            if ((lane & 3) == 0) {
                merge_top[warp][(lane >> 2) + 8 * h] = top[h];
                merge_sum[warp][(lane >> 2) + 8 * h] = sum[h];
            }
        }
        float *mine = reinterpret_cast<float *>(ring);
        __syncwarp();
#pragma unroll
        for (int d = 0; d < kD / 8; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) mine[((lane >> 2) + 8 * (e >> 1)) * kD + d * 8 + 2 * (lane & 3) + (e & 1)] = o[d][e];
        __syncthreads();
        float *part_o = a.partial + static_cast<int64_t>(index) * 16 * a.v_width;
        float *part_ml = a.partial + static_cast<int64_t>(a.max_items) * 16 * a.v_width + index * 32;
        const int rows_here = min(16, n_pairs - item.tile * 16);
        for (int j = threadIdx.x; j < rows_here * a.v_width; j += kThreads) {
            const int row = j / a.v_width, d = j % a.v_width;
            float most = -INFINITY, total = 0.0f, value = 0.0f;
            for (int w = 0; w < kWarps; ++w) most = fmaxf(most, merge_top[w][row]);
            for (int w = 0; w < kWarps; ++w) {
                const float f = merge_top[w][row] == -INFINITY ? 0.0f : power2(merge_top[w][row] - most);
                total += f * merge_sum[w][row];
                value += f * reinterpret_cast<const float *>(shared + w * kWarpBytes)[row * kD + d];
            }
            const int pair_row = item.tile * 16 + row;
            if (item.n_splits == 1) {
                write_row<kD>(a, item, pair_row, d, value, total, most);
            } else {
                __stcg(part_o + j, value);
                if (d == 0) {
                    __stcg(part_ml + 2 * row, most);
                    __stcg(part_ml + 2 * row + 1, total);
                }
            }
        }
        if (item.n_splits > 1) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) is_last = atomicAdd(a.counters + item.group_at, 1) == item.n_splits - 1;
            __syncthreads();
            if (is_last) {
                __threadfence();
                if (threadIdx.x == 0) a.counters[item.group_at] = 0;
                // Weights of the splits first (in the rings, which are idle), then all rows of a column side by side.
                const float *all_o = a.partial + static_cast<int64_t>(item.group_at) * 16 * a.v_width;
                const float *all_ml = a.partial + static_cast<int64_t>(a.max_items) * 16 * a.v_width + item.group_at * 32;
                float *weight = reinterpret_cast<float *>(shared);
                const int n_splits = min(item.n_splits, kMostSplits);
                for (int j = threadIdx.x; j < n_splits * 16; j += kThreads) weight[j] = __ldcg(all_ml + (j >> 4) * 32 + 2 * (j & 15));
                __syncthreads();
                if (threadIdx.x < 16) {
                    float most = -INFINITY;
                    for (int k = 0; k < n_splits; ++k) most = fmaxf(most, weight[k * 16 + threadIdx.x]);
                    merge_top[0][threadIdx.x] = most;
                }
                __syncthreads();
                for (int j = threadIdx.x; j < n_splits * 16; j += kThreads) {
                    const float f = weight[j] == -INFINITY ? 0.0f : power2(weight[j] - merge_top[0][j & 15]);
                    weight[j] = f;
                    weight[kMostSplits * 16 + j] = f * __ldcg(all_ml + (j >> 4) * 32 + 2 * (j & 15) + 1);
                }
                __syncthreads();
                if (threadIdx.x < 16) {
                    float sum_all = 0.0f;
                    for (int k = 0; k < n_splits; ++k) sum_all += weight[kMostSplits * 16 + k * 16 + threadIdx.x];
                    merge_sum[0][threadIdx.x] = sum_all;
                }
                __syncthreads();
                for (int j = threadIdx.x; j < rows_here * a.v_width; j += kThreads) {
                    const int row = j / a.v_width;
                    float value = 0.0f;
#pragma unroll 8
                    for (int k = 0; k < n_splits; ++k) value += weight[k * 16 + row] * __ldcg(all_o + static_cast<int64_t>(k) * 16 * a.v_width + j);
                    write_row<kD>(a, item, item.tile * 16 + row, j % a.v_width, value, merge_sum[0][row], merge_top[0][row]);
                }
            }
        }
        __syncthreads();
    }
}

template <int kD>
int32_t launch_width(const Launch &l, const AttentionArguments &a, int n_blocks) {
    const int64_t bytes = kWarps * kStages * 2 * kTokens * kRowBytes<kD> + a.max_rows * 4;
    return a.kv_format == PK_BF16 ? launch(l, "attention decode", attention_decode_kernel<kD, true>, dim3(n_blocks), dim3(kThreads), bytes, a)
                                  : launch(l, "attention decode", attention_decode_kernel<kD, false>, dim3(n_blocks), dim3(kThreads), bytes, a);
}

}  // namespace

int32_t launch_attention_decode(const Launch &l, const AttentionArguments &a) {
    const int width = a.head_width > a.v_width ? a.head_width : a.v_width, blocks = l.ctx->n_processors * (width <= 128 ? 2 : 1);
    if (width <= 64) return launch_width<64>(l, a, blocks);
    if (width <= 96) return launch_width<96>(l, a, blocks);
    if (width <= 128) return launch_width<128>(l, a, blocks);
    if (width <= 192) return launch_width<192>(l, a, blocks);
    return launch_width<256>(l, a, blocks);
}

}  // namespace pk
