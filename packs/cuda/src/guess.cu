// Guessed tokens on the device (rare.h): what layers with states need to take guesses back, and a model's own guess at the token after the next.
//
// Rows that check guesses come last in a step, so the kernels walk from the last row to the first that is none. Rows of one token have nothing
// to take back: steps of nothing else run without keep and settle.
#include <algorithm>
#include <climits>

#include "../include/delta.cuh"
#include "../include/operand.h"
#include "../include/rare.cuh"

namespace pk {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRowBlocks = 8;

// Rows of guesses, not of tokens to be rated.
__device__ __forceinline__ bool is_draft(int flags) { return (flags & (PK_ROW_DRAFT | PK_ROW_SCORE)) == PK_ROW_DRAFT; }

struct KeepArguments {
    RecurrentState state;
    const StepInfo *info;
    const void *x[3];
    int64_t stride[3];
    int32_t format[3], cols[3];
    int64_t from_offset, n_bytes, kept_offset, rows_offset;
    int32_t max_tokens;
};

// Grid: parts of a row, groups of rows.
__global__ void __launch_bounds__(kThreads) keep_kernel(const __grid_constant__ KeepArguments a) {
    wait_dependence();
    release_dependents();
    const int first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
    for (int r = a.info->n_rows - 1 - static_cast<int>(blockIdx.y); r >= 0 && (a.state.row_flags[r] & PK_ROW_DRAFT); r -= gridDim.y) {
        const RecurrentRow q = recurrent_row(a.state, r);
        if (q.is_dead || q.n < 2 || !is_draft(a.state.row_flags[r])) continue;
        const uint4 *from = reinterpret_cast<const uint4 *>(q.memory + a.from_offset);
        uint4 *kept = reinterpret_cast<uint4 *>(q.memory + a.kept_offset);
        for (int64_t i = first; i < a.n_bytes / 16; i += step) kept[i] = from[i];
        float *rows = reinterpret_cast<float *>(q.memory + a.rows_offset);
        const int n = min(q.n, a.max_tokens);
        for (int k = 0; k < 3; ++k) {
            for (int i = first; i < n * a.cols[k]; i += step) rows[i] = load_as_f32(a.x[k], (q.first + i / a.cols[k]) * a.stride[k] + i % a.cols[k], a.format[k]);
            rows += static_cast<int64_t>(a.max_tokens) * a.cols[k];
        }
    }
}

// What the kernels that take guesses back have in common.
struct Settle {
    RecurrentState state;
    const StepInfo *info;
    const int32_t *length;
    Taps taps;  // over kept inputs, behind the kept tail
    int64_t state_offset, conv_offset, kept_state, rows_offset;
    int32_t max_tokens;
};

// Row r as it is run again, with its kept inputs; false: it has nothing to take back.
__device__ __forceinline__ bool settled_row(const Settle &a, int r, RecurrentRow *q, Taps *taps) {
    *q = recurrent_row(a.state, r);
    const int n_right = a.length[a.state.row_slot[r]] - a.state.row_position[r];
    if (q->is_dead || !is_draft(a.state.row_flags[r]) || n_right >= q->n || n_right > a.max_tokens) return false;
    q->first = 0;
    q->n = n_right;
    *taps = a.taps;
    taps->x = q->memory + a.rows_offset;
    return true;
}

// Blocks of x move the tail of all channels.
__device__ __forceinline__ void move_tail(const Settle &a, const RecurrentRow &q, const Taps &taps) {
    float *tail = reinterpret_cast<float *>(q.memory + a.conv_offset);
    for (int c = blockIdx.x * kThreads + threadIdx.x; c < taps.channels; c += gridDim.x * kThreads)
        for (int i = 0; i < taps.width - 1; ++i) tail[i * taps.channels + c] = input_of(taps, q, q.n - taps.width + 1 + i, c);
}

struct DeltaSettle {
    Settle at;
    const float *a_log, *dt_bias;
    int32_t n_k_heads, n_v_heads, k_width, v_width, is_tiled;
};

// Value columns go their own ways: a lane has one, a warp at most kRows of its rows. S = decay S; d = beta (v - S^T k); S = S + k d^T.
template <int kRows>
__device__ __forceinline__ void settle_columns(const DeltaSettle &a, const RecurrentRow &q, const Taps &taps, int h) {
    __shared__ float key[256], value[32], parts[kWarps][32], gates[2];
    const int n_k = a.k_width, n_v = a.v_width, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, j = blockIdx.x * 32 + lane;
    const int g = a.is_tiled ? h % a.n_k_heads : h / (a.n_v_heads / a.n_k_heads), keys = a.n_k_heads * n_k, each = (n_k + kWarps - 1) / kWarps, i0 = warp * each;
    const int64_t at = static_cast<int64_t>(h) * n_k * n_v + j;
    const float *kept = reinterpret_cast<const float *>(q.memory + a.at.kept_state) + at, *b = static_cast<const float *>(taps.x) + static_cast<int64_t>(a.at.max_tokens) * taps.channels;
    const float *rate = b + static_cast<int64_t>(a.at.max_tokens) * a.n_v_heads;
    float *state = reinterpret_cast<float *>(q.memory + a.at.state_offset) + at;
    float s[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) s[i] = i < each && i0 + i < n_k && j < n_v && !q.begins ? kept[static_cast<int64_t>(i0 + i) * n_v] : 0.0f;
    for (int t = 0; t < q.n; ++t) {
        for (int c = threadIdx.x; c < n_k; c += kThreads) key[c] = convolved(taps, q, t, keys + g * n_k + c);
        if (warp == 1 && j < n_v) value[lane] = convolved(taps, q, t, 2 * keys + h * n_v + j);
        if (threadIdx.x == 64) {
            const float x = rate[t * a.n_v_heads + h] + a.dt_bias[h];
            gates[0] = expf(-expf(a.a_log[h]) * (x > 20.0f ? x : log1pf(expf(x))));
            gates[1] = 1.0f / (1.0f + expf(-b[t * a.n_v_heads + h]));
        }
        __syncthreads();
        float squares = 0.0f;
        for (int c = lane; c < n_k; c += 32) squares += key[c] * key[c];
        const float by = rsqrtf(warp_sum(squares) + 1e-6f);
        float seen = 0.0f;
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            if (i < each && i0 + i < n_k) {
                s[i] *= gates[0];
                seen += s[i] * (key[i0 + i] * by);
            }
        parts[warp][lane] = seen;
        __syncthreads();
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += parts[w][lane];
        const float d = gates[1] * (value[lane] - sum);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
            if (i < each && i0 + i < n_k) s[i] += key[i0 + i] * by * d;
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
        if (i < each && i0 + i < n_k && j < n_v) state[static_cast<int64_t>(i0 + i) * n_v] = s[i];
}

// Grid: groups of 32 columns of a value head, value heads and one that moves the tail, groups of rows.
template <int kRows>
__global__ void __launch_bounds__(kThreads, kRows <= 16 ? 3 : 2) settle_delta_kernel(const __grid_constant__ DeltaSettle a) {
    wait_dependence();
    release_dependents();
    for (int r = a.at.info->n_rows - 1 - static_cast<int>(blockIdx.z); r >= 0 && (a.at.state.row_flags[r] & PK_ROW_DRAFT); r -= gridDim.z) {
        RecurrentRow q;
        Taps taps;
        if (!settled_row(a.at, r, &q, &taps)) continue;
        if (blockIdx.y < a.n_v_heads)
            settle_columns<kRows>(a, q, taps, blockIdx.y);
        else
            move_tail(a.at, q, taps);
    }
}

struct MambaSettle {
    Settle at;
    const float *a_log, *dt_bias;
    int32_t n_heads, head_width, n_groups, state_width;
    float dt_low, dt_high;
};

// Head h: all elements of the state go their own ways. S = decay S + B (step x)^T. Shared: per token x, then B; then decays, then steps.
__device__ __forceinline__ void settle_head(const MambaSettle &a, const RecurrentRow &q, const Taps &taps, int h, float *shared) {
    const int n = a.state_width, p = a.head_width, each = n + p, group = h / (a.n_heads / a.n_groups);
    float *decays = shared + a.at.max_tokens * each, *steps = decays + a.at.max_tokens;
    const float *dt = static_cast<const float *>(taps.x) + static_cast<int64_t>(a.at.max_tokens) * taps.channels;
    for (int i = threadIdx.x; i < q.n * each; i += kThreads) {
        const int t = i / each, c = i % each;
        shared[i] = convolved(taps, q, t, c < p ? h * p + c : a.n_heads * p + group * n + c - p);
    }
    if (threadIdx.x < q.n) {
        const float x = dt[threadIdx.x * a.n_heads + h] + a.dt_bias[h];
        const float step = fminf(fmaxf(x > 20.0f ? x : log1pf(expf(x)), a.dt_low), a.dt_high);
        steps[threadIdx.x] = step;
        decays[threadIdx.x] = expf(-expf(a.a_log[h]) * step);
    }
    __syncthreads();
    const int64_t at = static_cast<int64_t>(h) * n * p;
    const float *kept = reinterpret_cast<const float *>(q.memory + a.at.kept_state) + at;
    float *state = reinterpret_cast<float *>(q.memory + a.at.state_offset) + at;
    for (int i = threadIdx.x; i < n * p; i += kThreads) {
        float s = q.begins ? 0.0f : kept[i];
        for (int t = 0; t < q.n; ++t) s = decays[t] * s + shared[t * each + p + i / p] * (steps[t] * shared[t * each + i % p]);
        state[i] = s;
    }
    __syncthreads();
}

// Grid: heads and some that move the tail, groups of rows.
__global__ void __launch_bounds__(kThreads) settle_mamba_kernel(const __grid_constant__ MambaSettle a) {
    extern __shared__ float shared[];
    wait_dependence();
    release_dependents();
    for (int r = a.at.info->n_rows - 1 - static_cast<int>(blockIdx.y); r >= 0 && (a.at.state.row_flags[r] & PK_ROW_DRAFT); r -= gridDim.y) {
        RecurrentRow q;
        Taps taps;
        if (!settled_row(a.at, r, &q, &taps)) continue;
        settle_head(a, q, taps, blockIdx.x, shared);
        move_tail(a.at, q, taps);
    }
}

// Inputs of a gated short convolution: three parts, of which the product of the first and the last is convolved. Grid: channels, groups of rows.
__global__ void __launch_bounds__(kThreads) settle_conv_kernel(const __grid_constant__ Settle a) {
    wait_dependence();
    release_dependents();
    for (int r = a.info->n_rows - 1 - static_cast<int>(blockIdx.y); r >= 0 && (a.state.row_flags[r] & PK_ROW_DRAFT); r -= gridDim.y) {
        RecurrentRow q;
        Taps taps;
        if (!settled_row(a, r, &q, &taps)) continue;
        const float *x = static_cast<const float *>(taps.x);
        float *tail = reinterpret_cast<float *>(q.memory + a.conv_offset);
        for (int c = blockIdx.x * kThreads + threadIdx.x; c < taps.channels; c += gridDim.x * kThreads)
            for (int i = 0; i < taps.width - 1; ++i) {
                const int t = q.n - taps.width + 1 + i;
                const float *row = x + static_cast<int64_t>(t) * 3 * taps.channels;
                tail[i * taps.channels + c] = t < 0 ? input_of(taps, q, t, c) : row[c] * row[2 * taps.channels + c];
            }
    }
}

struct TextArguments {
    const StepInfo *info;
    const int32_t *token_row, *position, *row_slot, *row_flags, *length, *sample_row, *sample_at;
    int32_t *token_id, *tokens;
    const float *logits;
    int64_t context, logits_stride;
    int32_t n_vocab, n_cols;
};

TextArguments text_of(const Launch &l) {
    const pk_state &s = *l.state;
    auto ints = [](uint64_t address) { return reinterpret_cast<int32_t *>(address); };
    return {l.info, ints(s.token_row), ints(s.token_position), ints(s.row_slot), ints(s.row_flags), ints(s.length), ints(s.sample_row), ints(s.sample_at), ints(s.token_id),
            ints(s.tokens), nullptr, s.max_ctx_tokens + 1, 0, s.n_vocab, 0};
}

// Grid: tokens.
__global__ void __launch_bounds__(kThreads) shift_kernel(const __grid_constant__ TextArguments a) {
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x * kThreads + threadIdx.x;
    if (t >= a.info->n_tokens) return;
    const int row = a.token_row[t];
    if (a.row_flags[row] & PK_ROW_DEAD) return;
    const int token = a.tokens[a.row_slot[row] * a.context + a.position[t] + 1];
    a.token_id[t] = token < 0 || token >= a.n_vocab ? 0 : token;
}

// A block a draw. Grid: draws.
__global__ void __launch_bounds__(1024) guess_kernel(const __grid_constant__ TextArguments a) {
    __shared__ float tops[32];
    __shared__ int places[32];
    wait_dependence();
    release_dependents();
    const int i = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (i >= a.info->n_samples) return;
    const int row = a.sample_row[i], slot = a.row_slot[row], length = a.length[slot];
    if ((a.row_flags[row] & PK_ROW_DEAD) || a.position[a.sample_at[i]] != length - 1 || length + 2 > a.context) return;
    const float *logits = a.logits + i * a.logits_stride;
    float top = -INFINITY;
    int place = INT_MAX;
    auto take = [&](float v, int at) {
        if (v > top || (v == top && at < place)) {
            top = v;
            place = at;
        }
    };
    for (int k = threadIdx.x; k < a.n_cols; k += 1024) take(logits[k], k);
    for (int o = 16; o; o >>= 1) {
        const float v = __shfl_xor_sync(~0u, top, o);
        const int at = __shfl_xor_sync(~0u, place, o);
        take(v, at);
    }
    if (lane == 0) {
        tops[warp] = top;
        places[warp] = place;
    }
    __syncthreads();
    if (warp != 0) return;
    top = tops[lane];
    place = places[lane];
    for (int o = 16; o; o >>= 1) {
        const float v = __shfl_xor_sync(~0u, top, o);
        const int at = __shfl_xor_sync(~0u, place, o);
        take(v, at);
    }
    if (lane == 0) a.tokens[slot * a.context + length + 1] = place == INT_MAX ? 0 : place;
}

// Rows of guesses of a launch are worked off by so many blocks at most.
unsigned row_blocks(const Launch &l) { return static_cast<unsigned>(std::min(max_rows_of(l), kRowBlocks)); }

int64_t mamba_shared(const pk_op_settle_mamba &op) { return 4 * int64_t{op.max_tokens} * (op.mamba.state_width + op.mamba.head_width + 2); }

}  // namespace

int32_t check_settle(const pk_op_settle &op, int64_t at) {
    if (op.delta.k_width <= 256) return PK_OK;
    return fail(PK_UNSUPPORTED, "op %lld (settle): keys of %d; the CUDA pack takes up to 256", (long long)at, op.delta.k_width);
}

int32_t check_settle(const pk_op_settle_mamba &op, int64_t at) {
    if (mamba_shared(op) <= 48 * 1024 && op.max_tokens <= kThreads) return PK_OK;
    return fail(PK_UNSUPPORTED, "op %lld (settle_mamba): %d tokens of heads of %d and %d; the CUDA pack takes fewer", (long long)at, op.max_tokens, op.mamba.state_width, op.mamba.head_width);
}

int32_t launch_keep(const Launch &l, const pk_op_keep &op) {
    if (l.decode_only) return PK_OK;
    KeepArguments a = {};
    a.state = recurrent_state(*l.state);
    a.info = l.info;
    const pk_tensor *inputs[3] = {&op.x, &op.b, &op.a};
    for (int k = 0; k < 3; ++k) {
        a.x[k] = reinterpret_cast<const void *>(inputs[k]->data);
        a.stride[k] = elements_apart(*inputs[k]);
        a.format[k] = inputs[k]->format;
        a.cols[k] = static_cast<int32_t>(inputs[k]->cols);
    }
    a.from_offset = op.from_offset;
    a.n_bytes = op.n_bytes;
    a.kept_offset = op.kept_offset;
    a.rows_offset = op.rows_offset;
    a.max_tokens = op.max_tokens;
    const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(op.n_bytes / (16 * 4 * kThreads), 1, 2 * l.ctx->n_processors));
    return launch(l, "keep", keep_kernel, dim3(blocks, row_blocks(l)), dim3(kThreads), 0, a);
}

// Of an op that takes guesses back, whose layer convolves x.
template <class Op>
Settle settle_of(const Launch &l, const Op &op, const Taps &taps, int64_t state_offset, int64_t conv_offset) {
    Settle a = {recurrent_state(*l.state), l.info, reinterpret_cast<const int32_t *>(l.state->length), taps, state_offset, conv_offset,
                op.kept_offset + state_offset - op.from_offset, op.rows_offset, op.max_tokens};
    a.taps.offset = op.kept_offset + conv_offset - op.from_offset;
    a.taps.stride = a.taps.channels;
    a.taps.format = PK_F32;
    return a;
}

int32_t launch_settle(const Launch &l, const pk_op_settle &op) {
    if (l.decode_only) return PK_OK;
    const pk_op_delta &delta = op.delta;
    const Settle at = settle_of(l, op, taps_of(delta.qkv, delta.conv, {}, delta.conv_width, 0), delta.state_offset, delta.conv_offset);
    const DeltaSettle a = {at, reinterpret_cast<const float *>(delta.a_log.data), reinterpret_cast<const float *>(delta.dt_bias.data), delta.n_k_heads, delta.n_v_heads, delta.k_width, delta.v_width, delta.is_tiled};
    return launch(l, "settle", delta.k_width <= 128 ? settle_delta_kernel<16> : settle_delta_kernel<32>, dim3((delta.v_width + 31) / 32, delta.n_v_heads + 1, row_blocks(l)), dim3(kThreads), 0, a);
}

int32_t launch_settle(const Launch &l, const pk_op_settle_mamba &op) {
    if (l.decode_only) return PK_OK;
    const pk_op_mamba &m = op.mamba;
    const Settle at = settle_of(l, op, taps_of(m.xbc, m.conv, m.bias, m.conv_width, 0), m.state_offset, m.conv_offset);
    const MambaSettle a = {at, reinterpret_cast<const float *>(m.a_log.data), reinterpret_cast<const float *>(m.dt_bias.data), m.n_heads, m.head_width, m.n_groups, m.state_width, m.dt_low, m.dt_high};
    return launch(l, "settle", settle_mamba_kernel, dim3(m.n_heads, row_blocks(l)), dim3(kThreads), mamba_shared(op), a);
}

int32_t launch_settle(const Launch &l, const pk_op_settle_conv &op) {
    if (l.decode_only) return PK_OK;
    Taps taps = taps_of(op.conv.x, op.conv.conv, {}, op.conv.conv_width, 0);
    taps.channels = static_cast<int32_t>(op.conv.out.cols);
    const Settle a = settle_of(l, op, taps, op.conv.conv_offset, op.conv.conv_offset);
    return launch(l, "settle", settle_conv_kernel, dim3((taps.channels + kThreads - 1) / kThreads, row_blocks(l)), dim3(kThreads), 0, a);
}

int32_t launch_shift(const Launch &l) { return launch(l, "shift", shift_kernel, dim3(static_cast<unsigned>((l.max_tokens + kThreads - 1) / kThreads)), dim3(kThreads), 0, text_of(l)); }

int32_t launch_guess(const Launch &l, const pk_op_guess &op) {
    TextArguments a = text_of(l);
    a.logits = reinterpret_cast<const float *>(op.logits.data);
    a.logits_stride = op.logits.stride / 4;
    a.n_cols = static_cast<int32_t>(op.logits.cols);
    return launch(l, "guess", guess_kernel, dim3(static_cast<unsigned>(l.max_samples)), dim3(1024), 0, a);
}

}  // namespace pk
