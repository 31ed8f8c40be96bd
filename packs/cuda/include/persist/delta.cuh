// A gated delta net's step of one row, from the product's raw q, k, v and z to the gated outputs: convolution, gates, norms, state and tails.
//
// A block takes a value head of 128 x 128. Its state does not depend on this step, so producers send it through the rings ahead of need; from there on it
// is in registers, and the outputs go out before it does. Value heads that share a key head all read its channels' tail; the first of them moves it when
// it has seen outputs of the others.
#pragma once
#include "../delta_head.cuh"
#include "phase.h"
#include "ring.cuh"
#include "stage.cuh"

namespace pk::persist {

static_assert(sizeof(head::Shared) <= kDeltaBytes && kConsumers == head::kThreads && kDeltaWidth == head::kWidth && kDeltaRows == head::kRows);

// The value head of this block; -1: none.
__device__ __forceinline__ int delta_head(const Phase &p) {
    const int n = gridDim.x, at = blockIdx.x + p.shift, b = at < n ? at : at - n;
    return b < p.delta.n_v_heads ? b : -1;
}

__device__ __forceinline__ float *state_of(const Delta &t, const Arguments &a, const RowFacts &facts, int head) {
    return reinterpret_cast<float *>(a.recurrent + facts.slot * a.recurrent_stride + t.state_offset) + head * (kDeltaWidth * kDeltaWidth);
}

// The packet of the raw product's BF16 element `at`, and the element.
__device__ __forceinline__ const uint8_t *raw_at(const Place &p, int at) { return packet_at<false>(p.packets, at & ~1); }
__device__ __forceinline__ float raw_of(const uint2 &packet, int at) { return at & 1 ? high_f32(packet.x) : low_f32(packet.x); }

// By all multiplying threads. area: kDeltaBytes of shared memory. base: phases before this launch; at: this phase.
__device__ __forceinline__ void delta_step(const Phase &p, const Arguments &a, const RowFacts &facts, uint8_t *shared, Taker &taker, uint32_t base, int at) {
    const Delta &t = p.delta;
    const int h = delta_head(p);
    if (h < 0) return;
    const int tid = thread_here(), lane = tid & 31, warp = tid >> 5, j = tid & (kDeltaWidth - 1);
    const uint32_t epoch = base + at + 1, before = base + p.x.source + 1;
    const bool is_value = tid < kDeltaWidth;  // of q and v; the others have k
    if (facts.is_dead) {
        if (is_value) write_output(p.y, h * kDeltaWidth + j, 0.0f, true, epoch);
        return;
    }
    head::Shared &m = *reinterpret_cast<head::Shared *>(shared);
    const int n_k = t.n_k_heads, sharers = t.n_v_heads / n_k, group = t.is_tiled ? h % n_k : h / sharers, channels = (2 * n_k + t.n_v_heads) * kDeltaWidth;
    const int channel[2] = {(is_value ? group : n_k + group) * kDeltaWidth + j, (2 * n_k + h) * kDeltaWidth + j};
    const bool begins = facts.position == 0;
    float *tail = reinterpret_cast<float *>(a.recurrent + facts.slot * a.recurrent_stride + t.tail_offset);
    float old[2][3];
    float4 taps[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        taps[i] = __ldg(reinterpret_cast<const float4 *>(t.conv) + channel[i]);
#pragma unroll
        for (int w = 0; w < 3; ++w) old[i][w] = begins ? 0.0f : __ldcg(tail + w * channels + channel[i]);
    }
    const float scale = __ldg(t.scale + j), rate = __ldg(t.a_log + h), offset = __ldg(t.dt_bias + h);
    float4 s[kDeltaRows];
#pragma unroll
    for (int i = 0; i < kDeltaRows; ++i) {
        if (i % kPieceRows == 0) taker.await(i / kPieceRows);
        s[i] = *reinterpret_cast<const float4 *>(taker.slot_at(i / kPieceRows) + (i % kPieceRows) * (4 * kDeltaWidth) + 16 * lane);
    }
    uint32_t used = 0;
#pragma unroll
    for (int i = 0; i < kDeltaRows; ++i) used ^= __float_as_uint(s[i].x) ^ __float_as_uint(s[i].w);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kDeltaRows / kPieceRows; ++i) taker.release(lane, used);
    if (begins)
#pragma unroll
        for (int i = 0; i < kDeltaRows; ++i) s[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    join_consumers(kConsumers);  // nobody multiplies any more with what lies here
    // All that a thread waits for is asked for at once: a channel of q or k, one of v and its gate; one thread b and a instead.
    const bool is_gate = tid == kConsumers - 1;
    const int z_at = channels + h * kDeltaWidth + j;
    const uint32_t wanted = is_gate ? base + p.add.source + 1 : before;
    const uint8_t *const numbers = reinterpret_cast<const uint8_t *>(p.add.packets) + h * 8;
    const uint8_t *const from[3] = {raw_at(p.x, channel[0]), is_value ? raw_at(p.x, channel[1]) : is_gate ? numbers : raw_at(p.x, channel[0]),
                                    is_value ? raw_at(p.x, z_at) : is_gate ? numbers + t.n_v_heads * 8 : raw_at(p.x, channel[0])};
    uint2 raw[3];
    do {
#pragma unroll
        for (int i = 0; i < 3; ++i) raw[i] = load_packet(from[i]);
    } while (!__all_sync(~0u, raw[0].y == before && raw[1].y == wanted && raw[2].y == wanted));
    const float x[2] = {raw_of(raw[0], channel[0]), raw_of(raw[1], channel[1])}, z = raw_of(raw[2], z_at);
    if (is_gate) head::put_gates(m, rate, __uint_as_float(raw[2].x) + offset, __uint_as_float(raw[1].x));
    __syncwarp();
    mark(at, 1);
    float u[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sum = taps[i].x * old[i][0] + taps[i].y * old[i][1] + taps[i].z * old[i][2] + taps[i].w * x[i];
        u[i] = __fdividef(sum, 1.0f + __expf(-sum));
    }
    head::put_inputs(m, tid, u[0], u[1]);
    join_consumers(kConsumers);
    head::sum_rows(m, tid, [&](int i) { return s[i]; });
    join_consumers(kConsumers);
    const float o = is_value ? head::output_of(m, tid) : 0.0f;
    join_consumers(kConsumers);
    if (is_value) {
        const float gate = __fdividef(t.is_sigmoid ? 1.0f : z, 1.0f + __expf(-z));
        write_output(p.y, h * kDeltaWidth + j, o * head::norm_of(m, t.eps) * scale * gate, true, epoch);
#pragma unroll
        for (int w = 0; w < 3; ++w) tail[w * channels + channel[1]] = w < 2 ? old[1][w + 1] : x[1];
    }
    mark(at, 3);
    const float4 d = head::changes_of(m, lane);
    float4 *state = reinterpret_cast<float4 *>(state_of(t, a, facts, h) + warp * kDeltaRows * kDeltaWidth) + lane;
#pragma unroll
    for (int i = 0; i < kDeltaRows; ++i) __stcs(state + i * (kDeltaWidth / 4), head::updated(m, warp, i, s[i], d));
    const int first = t.is_tiled ? group : group * sharers, apart = t.is_tiled ? n_k : 1;
    if (h == first) {
        // An output of a head is there after its block has read the tails.
        if (lane > 0 && lane < sharers) await_packet(added_at(p.y, static_cast<int64_t>(first + lane * apart) * kDeltaWidth), epoch);
        __syncwarp();
#pragma unroll
        for (int w = 0; w < 3; ++w) tail[w * channels + channel[0]] = w < 2 ? old[0][w + 1] : x[0];
    }
    mark(at, 4);
}

}  // namespace pk::persist
