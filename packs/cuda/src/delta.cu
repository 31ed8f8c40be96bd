// Gated delta net, token after token: convolution, gates, l2 norm, state update, output norm and gate in one kernel.
//
// A block owns one value head of one row. Heads of 128 x 128 hold the state on the multiprocessor, 16 rows a warp and four columns a
// lane, read once and written once (delta_head.cuh); other heads update it in memory, a column a thread. All arithmetic is f32. Value heads
// that share a key head all read its channels' tail; the last of them to finish moves it.
#include <climits>

#include "../include/delta.cuh"
#include "../include/delta_head.cuh"
#include "../include/flat_plan.h"
#include "../include/invariant.h"
#include "../include/operand.h"
#include "../include/wgmma.cuh"

namespace pk {
namespace {

constexpr int kThreads = head::kThreads, kWidth = head::kWidth, kRows = head::kRows, kHeldBytes = 4 * kWidth * kWidth;

// The convolved, normalised inputs of one token of this head: q [Dk], k [Dk], v [Dv] in shared memory, and the two gates.
__device__ __forceinline__ void prepare_token(const DeltaArguments &a, const RecurrentRow &q, int t, int h, int g, float *u, float *gates) {
    const int n_k = a.k_width, n = 2 * n_k + a.v_width, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const int c = i < n_k ? g * n_k + i : i < 2 * n_k ? a.keys + g * n_k + i - n_k : 2 * a.keys + h * a.v_width + i - 2 * n_k;
        u[i] = convolved(a.taps, q, t, c);
    }
    __syncthreads();
    if (warp < 2) {
        float *x = u + warp * n_k, s = 0.0f;
        for (int i = lane; i < n_k; i += 32) s += x[i] * x[i];
        const float by = rsqrtf(warp_sum(s) + 1e-6f) * (warp == 0 ? rsqrtf(static_cast<float>(n_k)) : 1.0f);
        for (int i = lane; i < n_k; i += 32) x[i] *= by;
    } else if (warp == 2 && lane == 0) {
        const int64_t token = q.first + t;
        gates[0] = expf(log_decay(a, token, h));
        gates[1] = 1.0f / (1.0f + expf(-a.b[token * a.b_stride + h]));
    }
    __syncthreads();
}

__device__ __forceinline__ void put_gates(const DeltaArguments &a, head::Shared &m, int64_t token, int h) {
    head::put_gates(m, a.a_log[h], a.a[token * a.a_stride + h] + a.dt_bias[h], a.b[token * a.b_stride + h]);
}

// Of a head of 128 x 128: the first of a lane's four columns in the warp's rows.
__device__ __forceinline__ float4 *state_of(const DeltaArguments &a, const RecurrentRow &q, int h, int warp, int lane) {
    return reinterpret_cast<float4 *>(q.memory + a.state_offset + (static_cast<int64_t>(h) * kWidth * kWidth + warp * kRows * kWidth) * 4) + lane;
}

// Output norm and gate of column j, with the mean of squares over the head.
__device__ __forceinline__ void finish_column(const DeltaArguments &a, const RecurrentRow &q, int t, int h, int j, float o, float squares) {
    const float z = load_as_f32(a.z, (q.first + t) * a.z_stride + h * a.v_width + j, a.z_format);
    const float v = o * rsqrtf(squares / a.v_width + a.eps) * a.scale[j] * gate_of(a, z);
    store_from_f32(a.out, (q.first + t) * a.out_stride + h * a.v_width + j, a.out_format, v);
}

__device__ __forceinline__ void zero_outputs(const DeltaArguments &a, const RecurrentRow &q, int h) {
    for (int i = threadIdx.x; i < q.n * a.v_width; i += blockDim.x)
        store_from_f32(a.out, (q.first + i / a.v_width) * a.out_stride + h * a.v_width + i % a.v_width, a.out_format, 0.0f);
}

// Every thread of the block has read what it needs of the tail.
__device__ __forceinline__ void keep_tails(const DeltaArguments &a, const RecurrentRow &q, int r, int h, int g, int *is_last) {
    const int sharers = a.n_v_heads / a.n_k_heads, n_k = a.k_width;
    __syncthreads();
    if (threadIdx.x == 0) {
        *is_last = 1;
        if (sharers > 1) {
            int32_t *counter = a.counters + r * a.n_k_heads + g;
            __threadfence();
            *is_last = atomicAdd(counter, 1) == sharers - 1;
            if (*is_last) *counter = 0;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.v_width; i += blockDim.x) keep_tail(a.taps, q, 2 * a.keys + h * a.v_width + i);
    if (!*is_last) return;
    for (int i = threadIdx.x; i < 2 * n_k; i += blockDim.x) keep_tail(a.taps, q, i < n_k ? g * n_k + i : a.keys + g * n_k + i - n_k);
}

// Heads of any widths up to 256. Grid: value heads, rows. Shared: u [2 Dk + Dv], o [Dv].
__global__ void __launch_bounds__(kThreads) delta_any_kernel(const __grid_constant__ DeltaArguments a) {
    extern __shared__ float u[];
    __shared__ float gates[2], sums[33];
    __shared__ int is_last;
    wait_dependence();
    release_dependents();
    const int h = blockIdx.x, r = blockIdx.y, g = key_head_of(a, h), n_k = a.k_width, n_v = a.v_width;
    if (r >= a.info->n_rows) return;
    const RecurrentRow q = recurrent_row(a.state, r);
    if (q.is_dead) return zero_outputs(a, q, h);
    if (q.n == 0) return;
    float *state = reinterpret_cast<float *>(q.memory + a.state_offset) + static_cast<int64_t>(h) * n_k * n_v;
    float *o = u + 2 * n_k + n_v;
    for (int t = 0; t < q.n; ++t) {
        prepare_token(a, q, t, h, g, u, gates);
        const bool is_zero = q.begins && t == 0;
        float squares = 0.0f;
        for (int j = threadIdx.x; j < n_v; j += kThreads) {
            float seen = 0.0f, sum = 0.0f;
            for (int i = 0; i < n_k; ++i) {
                const float s = is_zero ? 0.0f : state[i * n_v + j] * gates[0];
                state[i * n_v + j] = s;
                seen += s * u[n_k + i];
            }
            const float d = gates[1] * (u[2 * n_k + j] - seen);
            for (int i = 0; i < n_k; ++i) {
                const float s = state[i * n_v + j] + u[n_k + i] * d;
                state[i * n_v + j] = s;
                sum += s * u[i];
            }
            o[j] = sum;
            squares += sum * sum;
        }
        squares = block_sum(squares, sums);
        for (int j = threadIdx.x; j < n_v; j += kThreads) finish_column(a, q, t, h, j, o[j], squares);
        __syncthreads();
    }
    keep_tails(a, q, r, h, g, &is_last);
}

struct StepShared : head::Shared {
    int is_last;
};

// Rows of up to `most` tokens, heads of 128 x 128: the state in registers, read once and written once. Grid: value heads, rows.
__global__ void __launch_bounds__(kThreads, 2) delta_step_kernel(const __grid_constant__ DeltaArguments a) {
    __shared__ StepShared m;
    wait_dependence();
    release_dependents();
    const int h = blockIdx.x, r = blockIdx.y, g = key_head_of(a, h), lane = threadIdx.x & 31, warp = threadIdx.x >> 5, j = threadIdx.x;
    if (r >= a.info->n_rows) return;
    const RecurrentRow q = recurrent_row(a.state, r);
    if (q.is_dead) return zero_outputs(a, q, h);
    if (q.n == 0 || q.n > a.most) return;
    float4 *state = state_of(a, q, h, warp, lane);
    float4 s[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) s[i] = q.begins ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : __ldcs(state + i * 32);
    for (int t = 0; t < q.n; ++t) {
        const float key = convolved(a.taps, q, t, j < kWidth ? g * kWidth + j : a.keys + g * kWidth + j - kWidth);
        const float value = j < kWidth ? convolved(a.taps, q, t, 2 * a.keys + h * kWidth + j) : 0.0f;
        __syncthreads();
        if (j == kThreads - 1) put_gates(a, m, q.first + t, h);
        head::put_inputs(m, j, key, value);
        __syncthreads();
        head::sum_rows(m, j, [&](int i) { return s[i]; });
        __syncthreads();
        const float o = j < kWidth ? head::output_of(m, j) : 0.0f;
        __syncthreads();
        if (j < kWidth) finish_column(a, q, t, h, j, o, head::sum4(m.sums));
        const float4 d = head::changes_of(m, lane);
#pragma unroll
        for (int i = 0; i < kRows; ++i) s[i] = head::updated(m, warp, i, s[i], d);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) __stcs(state + i * 32, s[i]);
    keep_tails(a, q, r, h, g, &m.is_last);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void store_bytes(void *global, uint32_t shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(global), "r"(shared), "r"(bytes) : "memory");
}
#endif

// Steps whose rows have one token each, width 4: everything but the state is asked for first, tails move while the state is on its way. kHeld (Hopper
// and later): the state comes into shared memory and leaves it as one copy each, so that three blocks find room on a multiprocessor; else into registers.
template <bool kHeld>
__global__ void __launch_bounds__(kThreads, kHeld ? 3 : 2) delta_decode_kernel(const __grid_constant__ DeltaArguments a) {
    constexpr int kTaps = 4;
    extern __shared__ float4 held[];
    __shared__ StepShared m;
    wait_dependence();
    release_dependents();
    const int h = blockIdx.x, r = blockIdx.y, g = key_head_of(a, h), lane = threadIdx.x & 31, warp = threadIdx.x >> 5, j = threadIdx.x;
    if (r >= a.info->n_rows) return;
    const RecurrentRow q = recurrent_row(a.state, r);
    if (q.is_dead) return zero_outputs(a, q, h);
    float4 *state = state_of(a, q, h, warp, lane);
    float *tail = reinterpret_cast<float *>(q.memory + a.taps.offset);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __shared__ uint64_t arrived;
    if (kHeld && j == 0 && !q.begins) {
        barrier_init(&arrived, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        barrier_expect(&arrived, kHeldBytes);
        copy_bytes(shared_address(held), state, kHeldBytes, &arrived);
    }
#endif
    // Channel 0 of a thread is one of the key head's (q or k), channel 1 (threads below kWidth) one of the value head's.
    const int channel[2] = {j < kWidth ? g * kWidth + j : a.keys + g * kWidth + j - kWidth, 2 * a.keys + h * kWidth + j};
    const int n_channels = j < kWidth ? 2 : 1;
    float input[2][kTaps];
    float4 conv[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (i >= n_channels) continue;
        conv[i] = *reinterpret_cast<const float4 *>(a.taps.conv + channel[i] * kTaps);
#pragma unroll
        for (int w = 0; w < kTaps; ++w) input[i][w] = input_of(a.taps, q, w - kTaps + 1, channel[i]);
    }
    float4 s[kHeld ? 1 : kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
        if constexpr (!kHeld) s[i] = q.begins ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : __ldcs(state + i * 32);
    const int64_t token = q.first;
    float z = 0.0f, scale = 0.0f;
    if (j < kWidth) {
        z = load_as_f32(a.z, token * a.z_stride + h * kWidth + j, a.z_format);
        scale = a.scale[j];
    } else if (j == kWidth) {
        put_gates(a, m, token, h);
    }
    float u[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (i >= n_channels) continue;
        const float sum = conv[i].x * input[i][0] + conv[i].y * input[i][1] + conv[i].z * input[i][2] + conv[i].w * input[i][3];
        u[i] = sum / (1.0f + expf(-sum));
    }
    head::put_inputs(m, j, u[0], u[1]);
    if (j < kWidth) {
#pragma unroll
        for (int w = 0; w < kTaps - 1; ++w) tail[w * a.taps.channels + channel[1]] = input[1][w + 1];
    }
    __syncthreads();
    if (j == 0) {
        const int sharers = a.n_v_heads / a.n_k_heads;
        int is_last = 1;
        if (sharers > 1) {
            int32_t *counter = a.counters + r * a.n_k_heads + g;
            __threadfence();
            is_last = atomicAdd(counter, 1) == sharers - 1;
            if (is_last) *counter = 0;
        }
        m.is_last = is_last;
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (kHeld && !q.begins) barrier_wait(&arrived, 0);
#endif
    float4 *const own = held + warp * kRows * 32 + lane;
    auto row = [&](int i) {
        if constexpr (kHeld) return q.begins ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : own[i * 32];
        else return s[i];
    };
    head::sum_rows(m, j, row);
    __syncthreads();
    const float o = j < kWidth ? head::output_of(m, j) : 0.0f;
    __syncthreads();
    const float4 d = head::changes_of(m, lane);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        if constexpr (kHeld) own[i * 32] = head::updated(m, warp, i, row(i), d);
        else __stcs(state + i * 32, head::updated(m, warp, i, row(i), d));
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (kHeld) {
        fence_async_proxy();
        __syncthreads();
        if (j == 0) store_bytes(state, shared_address(held), kHeldBytes);
    }
#endif
    if (m.is_last) {
#pragma unroll
        for (int w = 0; w < kTaps - 1; ++w) tail[w * a.taps.channels + channel[0]] = input[0][w + 1];
    }
    if (j < kWidth) store_from_f32(a.out, token * a.out_stride + h * kWidth + j, a.out_format, o * head::norm_of(m, a.eps) * scale * gate_of(a, z));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (kHeld && j == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

}  // namespace

int32_t check_delta(const pk_op_delta &op, const pk_state &state, int64_t at) {
    if (op.k_width > 256 || op.v_width > 256) return fail(PK_UNSUPPORTED, "op %lld (delta): heads of %d and %d; the CUDA pack takes up to 256", (long long)at, op.k_width, op.v_width);
    if (static_cast<int64_t>(state.max_step_rows) * op.n_k_heads * 4 > kZeroCounterBytes)
        return fail(PK_UNSUPPORTED, "op %lld (delta): %d rows of %d key heads; the CUDA pack counts up to %lld", (long long)at, state.max_step_rows, op.n_k_heads, (long long)(kZeroCounterBytes / 4));
    return PK_OK;
}

int64_t delta_scratch(const pk_ctx *ctx, const pk_op_delta &op, int64_t max_tokens) { return has_chunks(op) ? delta_chunk_scratch(ctx, op, max_tokens) : 0; }

int32_t launch_delta(const Launch &l, const pk_op_delta &op) {
    DeltaArguments a = {};
    auto floats = [](const pk_tensor &t) { return reinterpret_cast<const float *>(t.data); };
    a.state = recurrent_state(*l.state);
    a.info = l.info;
    a.taps = taps_of(op.qkv, op.conv, {}, op.conv_width, op.conv_offset);
    a.z = reinterpret_cast<const void *>(op.z.data);
    a.b = floats(op.b);
    a.a = floats(op.a);
    a.a_log = floats(op.a_log);
    a.dt_bias = floats(op.dt_bias);
    a.scale = floats(op.scale);
    a.out = reinterpret_cast<void *>(op.out.data);
    a.counters = l.counters;
    a.z_stride = elements_apart(op.z);
    a.b_stride = elements_apart(op.b);
    a.a_stride = elements_apart(op.a);
    a.out_stride = elements_apart(op.out);
    a.state_offset = op.state_offset;
    a.z_format = op.z.format;
    a.out_format = op.out.format;
    a.n_k_heads = op.n_k_heads;
    a.n_v_heads = op.n_v_heads;
    a.k_width = op.k_width;
    a.v_width = op.v_width;
    a.keys = op.n_k_heads * op.k_width;
    a.is_tiled = op.is_tiled;
    a.eps = op.eps;
    a.is_sigmoid = op.op != PK_OP_DELTA;
    const dim3 grid(op.n_v_heads, static_cast<unsigned>(max_rows_of(l)));
    const bool is_square = op.k_width == kWidth && op.v_width == kWidth;
    if (!is_square) return launch(l, "delta", delta_any_kernel, grid, dim3(kThreads), (2 * op.k_width + 2 * op.v_width) * 4, a);
    // Every token by itself: neither the order of the decode kernel nor chunks, which begin where a step begins.
    const bool is_invariant = pk::is_invariant(l.ctx);
    if (l.decode_only && op.conv_width == 4 && !is_invariant) {
        // Three states fit the shared memory of these; it pays where blocks come and go for long enough (LOG.md, N33).
        const bool is_held = l.ctx->capability >= 90 && l.ctx->capability < 120 && int64_t{op.n_v_heads} * max_rows_of(l) > 16 * l.ctx->n_processors;
        return launch(l, "delta_decode", is_held ? delta_decode_kernel<true> : delta_decode_kernel<false>, grid, dim3(kThreads), is_held ? kHeldBytes : 0, a);
    }
    const bool chunks = has_chunks(op) && !l.decode_only && l.max_tokens > kStepTokens && !is_invariant;
    a.most = chunks ? kStepTokens : INT_MAX;
    if (int32_t e = launch(l, "delta", delta_step_kernel, grid, dim3(kThreads), 0, a)) return e;
    return chunks ? launch_delta_chunks(l, op, a) : PK_OK;
}

}  // namespace pk
