// One token's step of a gated delta net head of 128 x 128, by 256 threads: 16 rows of the state a warp, four columns a lane.
//
// One pass over the old state gives S^T k and S^T q; the output follows from these without the new state,
//     d = beta (v - decay S^T k),   o = decay S^T q + (k.q) d,
// so that it is on its way before S = decay S + k d^T. q and k are normed by factors on what was summed. All threads meet between the parts.
#pragma once
#include "device.cuh"

namespace pk::head {

constexpr int kThreads = 256, kWidth = 128, kWarps = kThreads / 32, kRows = kWidth / kWarps;

struct Shared {
    __align__(16) float u[3 * kWidth], d[kWidth], parts[kWarps][2][kWidth];  // u: convolved q, k and v
    float squares[kWarps], dots[kWarps], sums[kWidth / 32], gates[2];        // gates: decay, beta
};

__device__ __forceinline__ float sum4(const float *v) { return (v[0] + v[1]) + (v[2] + v[3]); }
__device__ __forceinline__ void add4(float4 &to, float by, const float4 &v) {
    to.x = fmaf(by, v.x, to.x);
    to.y = fmaf(by, v.y, to.y);
    to.z = fmaf(by, v.z, to.z);
    to.w = fmaf(by, v.w, to.w);
}

// rate: the head's a_log; step: a + dt_bias.
__device__ __forceinline__ void put_gates(Shared &m, float rate, float step, float b) {
    m.gates[0] = expf(-expf(rate) * (step > 20.0f ? step : log1pf(expf(step))));
    m.gates[1] = 1.0f / (1.0f + expf(-b));
}

// A thread has a channel of q (threads below kWidth) or k, and one of v.
__device__ __forceinline__ void put_inputs(Shared &m, int tid, float key, float value) {
    m.u[tid] = key;
    if (tid < kWidth) m.u[2 * kWidth + tid] = value;
    const float squares = warp_sum(key * key);
    if ((tid & 31) == 0) m.squares[tid >> 5] = squares;
}

// row(i): of this thread's columns of the old state, the warp's row i.
template <class Row>
__device__ __forceinline__ void sum_rows(Shared &m, int tid, Row row) {
    const int lane = tid & 31, warp = tid >> 5;
    const float *const query = m.u + warp * kRows, *const key = query + kWidth;
    float4 seen = make_float4(0.0f, 0.0f, 0.0f, 0.0f), out = seen;
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const float4 s = row(i);
        add4(seen, key[i], s);
        add4(out, query[i], s);
        dot = fmaf(key[i], query[i], dot);
    }
    *reinterpret_cast<float4 *>(&m.parts[warp][0][4 * lane]) = seen;
    *reinterpret_cast<float4 *>(&m.parts[warp][1][4 * lane]) = out;
    if (lane == 0) m.dots[warp] = dot;
}

// By threads below kWidth: this column's output, not yet normed.
__device__ __forceinline__ float output_of(Shared &m, int tid) {
    const float decay = m.gates[0], by_q = rsqrtf(sum4(m.squares) + 1e-6f) * rsqrtf(static_cast<float>(kWidth)), by_k = rsqrtf(sum4(m.squares + 4) + 1e-6f);
    float seen = 0.0f, out = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        seen += m.parts[w][0][tid];
        out += m.parts[w][1][tid];
    }
    const float d = m.gates[1] * (m.u[2 * kWidth + tid] - decay * by_k * seen), o = decay * by_q * out + (sum4(m.dots) + sum4(m.dots + 4)) * by_q * by_k * d;
    m.d[tid] = by_k * d;
    const float squares = warp_sum(o * o);
    if ((tid & 31) == 0) m.sums[tid >> 5] = squares;
    return o;
}

__device__ __forceinline__ float norm_of(const Shared &m, float eps) { return rsqrtf(sum4(m.sums) * (1.0f / kWidth) + eps); }

// The warp's row i of the new state; d: of this thread's columns.
__device__ __forceinline__ float4 updated(const Shared &m, int warp, int i, const float4 &s, const float4 &d) {
    const float decay = m.gates[0];
    float4 to = make_float4(s.x * decay, s.y * decay, s.z * decay, s.w * decay);
    add4(to, m.u[kWidth + warp * kRows + i], d);
    return to;
}
__device__ __forceinline__ float4 changes_of(const Shared &m, int lane) { return *reinterpret_cast<const float4 *>(&m.d[4 * lane]); }

}  // namespace pk::head
