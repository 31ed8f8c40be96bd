// Gated delta net on the device: arguments of its kernels, and what they share.
#pragma once
#include "recurrent.cuh"

namespace pk {

struct DeltaArguments {
    RecurrentState state;
    const StepInfo *info;
    Taps taps;  // over qkv
    const void *z;
    const float *b, *a, *a_log, *dt_bias, *scale;
    void *out;
    int32_t *counters;  // [rows * G], zero between launches
    int64_t z_stride, b_stride, a_stride, out_stride, state_offset;
    int32_t z_format, out_format;
    int32_t n_k_heads, n_v_heads, k_width, v_width, keys, is_tiled;
    int32_t most;  // rows of more tokens are left to the chunked kernels
    float eps;
    int32_t is_sigmoid;  // the output is gated by sigmoid(z), not silu(z)
};

// What the normed output is multiplied with.
__device__ __forceinline__ float gate_of(const DeltaArguments &a, float z) { return __fdividef(a.is_sigmoid ? 1.0f : z, 1.0f + __expf(-z)); }

constexpr int kChunk = 64;       // tokens of a chunk
constexpr int kStepTokens = 8;   // rows of up to this many tokens run token after token

__device__ __forceinline__ int key_head_of(const DeltaArguments &a, int h) { return a.is_tiled ? h % a.n_k_heads : h / (a.n_v_heads / a.n_k_heads); }

// exp of the decay's logarithm is what the state is multiplied by.
__device__ __forceinline__ float log_decay(const DeltaArguments &a, int64_t token, int h) {
    const float x = a.a[token * a.a_stride + h] + a.dt_bias[h];
    return -expf(a.a_log[h]) * (x > 20.0f ? x : log1pf(expf(x)));
}

// Rows of more than kStepTokens tokens of a layer with Dk = Dv = 128 and W = 4, in chunks on tensor cores.
bool has_chunks(const pk_op_delta &op);
int64_t delta_chunk_scratch(const pk_ctx *ctx, const pk_op_delta &op, int64_t max_tokens);
int32_t launch_delta_chunks(const Launch &l, const pk_op_delta &op, const DeltaArguments &a);

}  // namespace pk
