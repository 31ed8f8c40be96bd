// Attention over the blocks of tokens that an index chooses (pk_op_sparse in rare.h). Every token is attended densely first; tokens
// with more complete blocks than an index keeps are then done again over those it chooses. Written to be right, not fast.
#include <algorithm>

#include "../../include/attention_arguments.h"
#include "../../include/rare.cuh"
#include "../../include/share.h"

namespace pk {
namespace {

constexpr int kThreads = 256, kMost = 8;  // elements a lane holds: heads up to 256

struct SparseArguments {
    AttentionArguments a;
    const void *index_q;
    const float *norm, *frequency;
    float *keys;       // [rows, max_blocks, index_width]
    uint32_t *scores;  // [grid of attend, max_blocks]: none is below 0, so their bits are in their order
    int64_t index_stride, i_offset;
    int32_t index_format, index_heads, index_width, block_tokens, n_blocks, max_blocks, rope_width, rope_layout;
    float rope_magnitude, eps;
};

__device__ __forceinline__ const uint8_t *page_at(const AttentionArguments &a, int row, int token) {
    return a.kv + static_cast<int64_t>(a.page_table[static_cast<int64_t>(a.row_slot[row]) * a.slot_pages + token / a.page_tokens]) * a.page_stride;
}

// Complete blocks that a row's last token sees.
__device__ __forceinline__ int blocks_of(const SparseArguments &s, int row) {
    const int n = s.a.row_start[row + 1] - s.a.row_start[row];
    return n > 0 && !(s.a.row_flags[row] & PK_ROW_DEAD) ? (s.a.row_position[row] + n) / s.block_tokens : 0;
}

// The key of each block: the mean of its index keys, normed, rotated for its first position. Grid: blocks, rows. Shared: [index_width].
__global__ void __launch_bounds__(kThreads) sparse_keys_kernel(const __grid_constant__ SparseArguments s) {
    extern __shared__ float key[];
    __shared__ float reduced[33];
    wait_dependence();
    release_dependents();
    const int row = blockIdx.y, width = s.index_width;
    if (row >= s.a.info->n_rows) return;
    const int n_blocks = blocks_of(s, row);
    if (n_blocks <= s.n_blocks) return;
    for (int b = blockIdx.x; b < n_blocks; b += gridDim.x) {
        float squares = 0.0f;
        for (int d = threadIdx.x; d < width; d += kThreads) {
            float sum = 0.0f;
            for (int j = b * s.block_tokens; j < (b + 1) * s.block_tokens; ++j)
                sum += load_as_f32(page_at(s.a, row, j) + s.i_offset, static_cast<int64_t>(j % s.a.page_tokens) * width + d, s.a.kv_format);
            key[d] = sum / s.block_tokens;
            squares += key[d] * key[d];
        }
        const float by = rsqrtf(block_sum(squares, reduced) / width + s.eps);
        for (int d = threadIdx.x; d < width; d += kThreads) key[d] *= by * s.norm[d];
        __syncthreads();
        const int half = s.rope_width / 2;
        for (int i = threadIdx.x; i < half; i += kThreads) {
            float sine, cosine;
            sincosf(static_cast<float>(b * s.block_tokens) * s.frequency[i], &sine, &cosine);
            const int x = s.rope_layout ? 2 * i : i, y = s.rope_layout ? 2 * i + 1 : i + half;
            const float u = key[x], v = key[y];
            key[x] = (u * cosine - v * sine) * s.rope_magnitude;
            key[y] = (v * cosine + u * sine) * s.rope_magnitude;
        }
        __syncthreads();
        for (int d = threadIdx.x; d < width; d += kThreads) s.keys[(static_cast<int64_t>(row) * s.max_blocks + b) * width + d] = key[d];
        __syncthreads();
    }
}

// The `wanted` largest of n scores into `chosen`, by position, the earlier of equal ones: the least of them is found byte by byte, then all
// threads count what they take of a part each. Whole block; ends synchronised.
__device__ void choose(const uint32_t *scores, int n, int wanted, int *chosen) {
    __shared__ int counts[2][kThreads];
    __shared__ uint32_t least;
    __shared__ int equals;
    static_assert(kThreads == 256);  // a thread a value of a byte
    if (threadIdx.x == 0) least = 0, equals = wanted;
    for (int shift = 24; shift >= 0; shift -= 8) {
        counts[0][threadIdx.x] = 0;
        __syncthreads();
        const uint32_t known = least;
        for (int b = threadIdx.x; b < n; b += kThreads)
            if (shift == 24 || scores[b] >> (shift + 8) == known >> (shift + 8)) atomicAdd(&counts[0][scores[b] >> shift & 255], 1);
        __syncthreads();
        if (threadIdx.x == 0) {
            int byte = 255;
            for (; byte > 0 && counts[0][byte] < equals; --byte) equals -= counts[0][byte];
            least = known | static_cast<uint32_t>(byte) << shift;
        }
        __syncthreads();
    }
    const int me = threadIdx.x, part = (n + kThreads - 1) / kThreads, begin = me * part, end = min(begin + part, n);
    int more = 0, same = 0;
    for (int b = begin; b < end; ++b) more += scores[b] > least, same += scores[b] == least;
    counts[0][me] = more;
    counts[1][me] = same;
    __syncthreads();
    more = same = 0;
    for (int i = 0; i < me; ++i) more += counts[0][i], same += counts[1][i];
    for (int b = begin; b < end; ++b) {
        const bool is_more = scores[b] > least, is_same = scores[b] == least;
        if (is_more || (is_same && same < equals)) chosen[more + min(same, equals)] = b;
        more += is_more, same += is_same;
    }
    __syncthreads();
}

// Scores, choice, and attention of a token after the other; a warp a head. Grid: as many as there are places for scores. Shared: chosen [n_blocks].
__global__ void __launch_bounds__(kThreads) sparse_attend_kernel(const __grid_constant__ SparseArguments s) {
    extern __shared__ int chosen[];
    wait_dependence();
    release_dependents();
    const AttentionArguments &a = s.a;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t *scores = s.scores + static_cast<int64_t>(blockIdx.x) * s.max_blocks;
    for (int t = blockIdx.x; t < a.info->n_tokens; t += gridDim.x) {
        const int row = a.token_row[t], own = a.row_position[row] + t - a.row_start[row], n_blocks = (own + 1) / s.block_tokens;
        if ((a.row_flags[row] & PK_ROW_DEAD) || n_blocks <= s.n_blocks) continue;
        for (int b = warp; b < n_blocks; b += kThreads / 32) {
            const float *key = s.keys + (static_cast<int64_t>(row) * s.max_blocks + b) * s.index_width;
            float score = 0.0f;
            for (int h = 0; h < s.index_heads; ++h) {
                float sum = 0.0f;
                for (int d = lane; d < s.index_width; d += 32) sum += load_as_f32(s.index_q, t * s.index_stride + h * s.index_width + d, s.index_format) * key[d];
                score += fmaxf(warp_sum(sum), 0.0f);
            }
            if (lane == 0) scores[b] = score > 0.0f ? __float_as_uint(score) : 0;
        }
        __syncthreads();
        choose(scores, n_blocks, s.n_blocks, chosen);
        const int in_blocks = s.n_blocks * s.block_tokens, n = in_blocks + own + 1 - n_blocks * s.block_tokens;
        for (int head = warp; head < a.n_heads; head += kThreads / 32) {
            const int kv_head = head / (a.n_heads / a.n_kv_heads);
            float q[kMost], o[kMost] = {}, top = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kMost; ++i) {
                const int d = i * 32 + lane;
                q[i] = d < a.head_width ? load_as_f32(a.q, t * a.q_stride + static_cast<int64_t>(head) * a.head_width + d, a.q_format) : 0.0f;
            }
            for (int i = 0; i < n; ++i) {
                const int p = i < in_blocks ? chosen[i / s.block_tokens] * s.block_tokens + i % s.block_tokens : n_blocks * s.block_tokens + i - in_blocks;
                const uint8_t *page = page_at(a, row, p);
                const int64_t in = static_cast<int64_t>(kv_head) * a.page_tokens + p % a.page_tokens;
                float x = 0.0f;
#pragma unroll
                for (int j = 0; j < kMost; ++j) {
                    const int d = j * 32 + lane;
                    if (d < a.head_width) x += q[j] * load_as_f32(page + a.k_offset, in * a.head_width + d, a.kv_format);
                }
                x = warp_sum(x) * a.scale * kLog2e;
                const float next = fmaxf(top, x), fade = exp2f(top - next), w = exp2f(x - next);
                sum = sum * fade + w;
                top = next;
#pragma unroll
                for (int j = 0; j < kMost; ++j) {
                    const int d = j * 32 + lane;
                    if (d < a.v_width) o[j] = o[j] * fade + w * load_as_f32(page + a.v_offset, in * a.v_width + d, a.kv_format);
                }
            }
            sum /= gain_of(a, head);
#pragma unroll
            for (int j = 0; j < kMost; ++j) {
                const int d = j * 32 + lane;
                if (d < a.v_width) store_from_f32(a.out, t * a.out_stride + static_cast<int64_t>(head) * a.v_width + d, a.out_format, o[j] / sum);
            }
        }
        __syncthreads();
    }
}

pk_op_attention dense_of(const pk_op_sparse &op) {
    pk_op_attention dense = {};
    dense.op = PK_OP_ATTENTION;
    dense.size = sizeof dense;
    dense.q = op.q;
    dense.gains = op.gains;
    dense.out = op.out;
    dense.k_offset = op.k_offset;
    dense.v_offset = op.v_offset;
    dense.n_heads = op.n_heads;
    dense.n_kv_heads = op.n_kv_heads;
    dense.head_width = op.head_width;
    dense.v_width = op.v_width;
    dense.kv_format = op.kv_format;
    dense.scale = op.scale;
    return dense;
}

int64_t max_blocks(const pk_op_sparse &op, const pk_state &state) { return state.max_ctx_tokens / op.block_tokens + 1; }
int64_t key_bytes(const pk_op_sparse &op, const pk_state &state) { return state.max_step_rows * max_blocks(op, state) * op.index_width * 4; }
// Tokens that are attended at a time: each has a place for its scores.
int64_t attend_blocks(const pk_ctx *ctx, int64_t max_tokens) { return std::min<int64_t>(max_tokens, 4 * ctx->n_processors); }

}  // namespace

int32_t check_sparse(const pk_op_sparse &op, const pk_state &state, int64_t at) {
    if (op.head_width > 32 * kMost || op.v_width > 32 * kMost) return fail(PK_UNSUPPORTED, "op %lld sparse: heads of %d and %d; the CUDA pack takes up to %d", (long long)at, op.head_width, op.v_width, 32 * kMost);
    if (op.n_blocks > 50000) return fail(PK_UNSUPPORTED, "op %lld sparse: %d blocks are kept; the CUDA pack takes up to %d", (long long)at, op.n_blocks, 50000);
    return PK_OK;
}

int64_t sparse_scratch(const pk_ctx *ctx, const pk_op_sparse &op, const pk_state &state) {
    const int64_t scores = attend_blocks(ctx, state.max_step_tokens) * max_blocks(op, state) * 4;
    return std::max<int64_t>(key_bytes(op, state) + scores, attention_scratch(ctx, dense_of(op), state.max_step_rows));
}

int32_t launch_sparse(const Launch &l, const pk_op_sparse &op) {
    const pk_op_attention dense = dense_of(op);
    if (reads_share(l, dense))
        if (int32_t e = launch_shared(l, dense, false)) return e;
    if (int32_t e = launch_attention(l, dense)) return e;
    const pk_state &state = *l.state;
    SparseArguments s = {};
    s.a = attention_arguments(l, op);
    s.index_q = reinterpret_cast<const void *>(op.index_q.data);
    s.norm = reinterpret_cast<const float *>(op.index_norm.data);
    s.frequency = reinterpret_cast<const float *>(op.frequency.data);
    s.keys = reinterpret_cast<float *>(l.scratch);
    s.scores = reinterpret_cast<uint32_t *>(reinterpret_cast<uint8_t *>(l.scratch) + key_bytes(op, state));
    s.index_stride = elements_apart(op.index_q);
    s.i_offset = op.i_offset;
    s.index_format = op.index_q.format;
    s.index_heads = op.index_heads;
    s.index_width = op.index_width;
    s.block_tokens = op.block_tokens;
    s.n_blocks = op.n_blocks;
    s.max_blocks = static_cast<int32_t>(max_blocks(op, state));
    s.rope_width = op.rope_width;
    s.rope_layout = op.rope_layout;
    s.rope_magnitude = op.rope_magnitude;
    s.eps = op.eps;
    if (s.max_blocks <= op.n_blocks) return PK_OK;  // no context is long enough for a choice
    const unsigned rows = static_cast<unsigned>(std::min(l.max_tokens, state.max_step_rows));
    if (int32_t e = launch(l, "sparse keys", sparse_keys_kernel, dim3(static_cast<unsigned>(std::min(s.max_blocks, 256)), rows), dim3(kThreads), op.index_width * 4, s)) return e;
    return launch(l, "sparse attend", sparse_attend_kernel, dim3(static_cast<unsigned>(attend_blocks(l.ctx, l.max_tokens))), dim3(kThreads), op.n_blocks * 4, s);
}

}  // namespace pk
