// Mamba 2: convolution, state update and skip by one kernel, gate and norm (which joins heads) by a second.
//
// A block owns one head of one row: the state [N, P] lies in registers, a column and every n-th row a thread, and is read and
// written once a step. Tokens come in batches of kBatch: their convolved inputs lie in shared memory, so that nothing waits
// between the tokens of a batch. All arithmetic is f32. Does not handle: heads with more than 32768 numbers of state.
#include <algorithm>

#include "../include/operand.h"
#include "../include/recurrent.cuh"

namespace pk {
namespace {

constexpr int kThreads = 256, kBatch = 8, kMostState = 32768;

struct MambaArguments {
    RecurrentState state;
    const StepInfo *info;
    Taps taps;
    const void *z;
    void *out;
    const float *dt, *a_log, *dt_bias, *d, *scale;
    const int32_t *token_row;
    float *raw;  // [T, H P], before gate and norm
    int64_t dt_stride, z_stride, out_stride, state_offset;
    int32_t z_format, out_format, n_heads, head_width, n_groups, state_width, n_norms;
    float eps, dt_low, dt_high;
};

// Grid: heads, rows. Shared: u [kBatch, P + 2 N], parts [kBatch, kThreads].
template <int kMost>
__global__ void __launch_bounds__(kThreads) mamba_kernel(const __grid_constant__ MambaArguments a) {
    extern __shared__ float u[];
    __shared__ float steps[kBatch], decays[kBatch];
    wait_dependence();
    release_dependents();
    const int h = blockIdx.x, r = blockIdx.y, tid = threadIdx.x, p = a.head_width, n = a.state_width, wide = p + 2 * n;
    if (r >= a.info->n_rows) return;
    const RecurrentRow q = recurrent_row(a.state, r);
    if (q.is_dead || q.n == 0) return;
    const int values = a.n_heads * p, group_at = h / (a.n_heads / a.n_groups) * n, lanes = kThreads / p, j = tid % p, lane = tid / p;
    float *parts = u + kBatch * wide;
    float *state = reinterpret_cast<float *>(q.memory + a.state_offset) + static_cast<int64_t>(h) * n * p;
    float s[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        const int row = lane + i * lanes;
        s[i] = lane < lanes && row < n && !q.begins ? state[row * p + j] : 0.0f;
    }
    const float rate = -expf(a.a_log[h]), bias = a.dt_bias[h], skip = a.d[h];
    for (int first = 0; first < q.n; first += kBatch) {
        const int count = min(kBatch, q.n - first);
        for (int i = tid; i < count * wide; i += kThreads) {
            const int t = i / wide, k = i % wide;
            const int c = k < p ? h * p + k : k < p + n ? values + group_at + k - p : values + a.n_groups * n + group_at + k - p - n;
            u[i] = convolved(a.taps, q, first + t, c);
        }
        if (tid < count) {
            const float x = a.dt[(q.first + first + tid) * a.dt_stride + h] + bias;
            steps[tid] = fminf(fmaxf(x > 20.0f ? x : log1pf(expf(x)), a.dt_low), a.dt_high);
            decays[tid] = expf(rate * steps[tid]);
        }
        __syncthreads();
        if (lane < lanes) {
            for (int t = 0; t < count; ++t) {
                const float *b = u + t * wide + p, *c = b + n, decay = decays[t], by = steps[t] * u[t * wide + j];
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < kMost; ++i) {
                    const int row = lane + i * lanes;
                    if (row >= n) continue;
                    s[i] = fmaf(decay, s[i], b[row] * by);
                    sum = fmaf(c[row], s[i], sum);
                }
                parts[t * kThreads + tid] = sum;
            }
        }
        __syncthreads();
        for (int i = tid; i < count * p; i += kThreads) {
            const int t = i / p, k = i % p;
            float sum = skip * u[t * wide + k];
            for (int w = 0; w < lanes; ++w) sum += parts[t * kThreads + w * p + k];
            a.raw[static_cast<int64_t>(q.first + first + t) * values + h * p + k] = sum;
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        const int row = lane + i * lanes;
        if (lane < lanes && row < n) state[row * p + j] = s[i];
    }
}

// out = y silu(z) / rms * scale over one of n_norms parts. Grid: tokens, parts.
__global__ void __launch_bounds__(kThreads) mamba_finish_kernel(const __grid_constant__ MambaArguments a) {
    __shared__ float shared[33];
    wait_dependence();
    release_dependents();
    const int t = blockIdx.x, n = a.n_heads * a.head_width / a.n_norms, first = blockIdx.y * n;
    if (t >= a.info->n_tokens) return;
    const bool is_dead = (a.state.row_flags[a.token_row[t]] & PK_ROW_DEAD) != 0;
    float *raw = a.raw + static_cast<int64_t>(t) * a.n_heads * a.head_width + first;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < n && !is_dead; i += kThreads) {
        const float v = raw[i] * silu(load_as_f32(a.z, t * a.z_stride + first + i, a.z_format));
        raw[i] = v;
        squares += v * v;
    }
    const float by = rsqrtf(block_sum(squares, shared) / n + a.eps);
    for (int i = threadIdx.x; i < n; i += kThreads) store_from_f32(a.out, t * a.out_stride + first + i, a.out_format, is_dead ? 0.0f : raw[i] * by * a.scale[first + i]);
}

}  // namespace

int32_t check_mamba(const pk_op_mamba &op, int64_t at) {
    const int64_t n = static_cast<int64_t>(op.state_width) * op.head_width;
    const bool fits = op.head_width <= kThreads && (op.state_width + kThreads / op.head_width - 1) / (kThreads / op.head_width) <= kMostState / kThreads;
    return fits ? PK_OK : fail(PK_UNSUPPORTED, "op %lld (mamba): heads with %lld numbers of state; the CUDA pack takes up to %d", (long long)at, (long long)n, kMostState);
}

int64_t mamba_scratch(const pk_op_mamba &op, int64_t max_tokens) { return max_tokens * op.out.cols * 4; }

int32_t launch_mamba(const Launch &l, const pk_op_mamba &op) {
    auto floats = [](const pk_tensor &t) { return reinterpret_cast<const float *>(t.data); };
    MambaArguments a = {};
    a.state = recurrent_state(*l.state);
    a.info = l.info;
    a.taps = taps_of(op.xbc, op.conv, op.bias, op.conv_width, op.conv_offset);
    a.z = reinterpret_cast<const void *>(op.z.data);
    a.out = reinterpret_cast<void *>(op.out.data);
    a.dt = floats(op.dt);
    a.a_log = floats(op.a_log);
    a.dt_bias = floats(op.dt_bias);
    a.d = floats(op.d);
    a.scale = floats(op.scale);
    a.token_row = reinterpret_cast<const int32_t *>(l.state->token_row);
    a.raw = reinterpret_cast<float *>(l.scratch);
    a.dt_stride = elements_apart(op.dt);
    a.z_stride = elements_apart(op.z);
    a.out_stride = elements_apart(op.out);
    a.state_offset = op.state_offset;
    a.z_format = op.z.format;
    a.out_format = op.out.format;
    a.n_heads = op.n_heads;
    a.head_width = op.head_width;
    a.n_groups = op.n_groups;
    a.state_width = op.state_width;
    a.n_norms = op.n_norms;
    a.eps = op.eps;
    a.dt_low = op.dt_low;
    a.dt_high = op.dt_high;
    const int lanes = kThreads / op.head_width, rows_each = (op.state_width + lanes - 1) / lanes;
    const dim3 grid(op.n_heads, static_cast<unsigned>(max_rows_of(l)));
    const int64_t bytes = kBatch * (op.head_width + 2 * op.state_width + kThreads) * 4;
    auto kernel = rows_each <= 32 ? mamba_kernel<32> : rows_each <= 64 ? mamba_kernel<64> : mamba_kernel<128>;
    if (int32_t e = launch(l, "mamba", kernel, grid, dim3(kThreads), bytes, a)) return e;
    if (int32_t e = launch_tails(l, a.taps, 0)) return e;
    return launch(l, "mamba_finish", mamba_finish_kernel, dim3(l.max_tokens, op.n_norms), dim3(kThreads), 0, a);
}

}  // namespace pk
