// Gated delta net for rows of many tokens: chunks of 64 tokens on tensor cores, heads of 128 x 128, convolution of width 4.
//
// With G_t the running sum of log decays in a chunk (kept as powers of two) and S the state before it, the recurrence of pk_op_delta becomes
//   (I + A) D = diag(beta) (V - diag(e^G) K S),  A[t, s] = beta_t e^{G_t - G_s} k_t . k_s for s < t
//   O = diag(e^G) Q S + P D,  P[t, s] = e^{G_t - G_s} q_t . k_s for s <= t;   S' = e^{G_last} S + K^T diag(e^{G_last - G}) D
// so that U = T diag(beta) V and W = T diag(beta e^G) K with T = (I + A)^-1 are made for all chunks side by side, and only
// D = U - W S, O and S' go from chunk to chunk. Source: Yang et al. 2024 (Gated Delta Networks), sections 3.2 and 3.3.
//
// Chunk slot c of the step: row r owns slots start[r] / 64 + r and up, which never meet those of the next row. Slots are worked
// off in segments so that scratch stays small (a megabyte a multiprocessor beside q, k and v); the state lies in the slot's memory between segments. Rows of up to
// `most` tokens and dead rows are the step kernel's. Operands bf16, sums and state f32. Every tile lies in scratch as it will lie in shared memory, so that
// a copy is a run of bytes.
#include <algorithm>

#ifdef PK_WGMMA
#include "../include/delta_hopper.cuh"
#else
#include "../include/delta_mma.cuh"
#endif

namespace pk {
namespace {

// ---- convolution: a warp per 128 channels of eight tokens. Grid: slots of the segment, any number of blocks over the heads of q, k and v ----

// x / (1 + e^-x) by the two units for it; what is too large for them is x or zero.
__device__ __forceinline__ float fast_silu(float x) {
    float v;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(1.0f + exp_of_two(-1.4426950408889634f * x)));
    return x * v;
}

// kWide: inputs are BF16, four neighbours one load. Then the tail is BF16 too, widened, and narrowing it loses nothing.
template <bool kWide>
__global__ void __launch_bounds__(kThreads, kWide ? 4 : 2) delta_mix_kernel(const __grid_constant__ ChunkArguments a) {
    const DeltaArguments &d = a.delta;
    wait_dependence();
    release_dependents();
    const int slot = a.first_slot + blockIdx.x;
    const Chunk chunk = chunk_of(d, slot);
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 8, end = min(first + 8, chunk.n), n_heads = 2 * d.n_k_heads + d.n_v_heads;
    if (chunk.n == 0) return;
    const RecurrentRow q = recurrent_row(d.state, chunk.row);
    for (int head = blockIdx.y; head < n_heads; head += gridDim.y) {
        const int c = head * kWidth + lane * 4;
        // All inputs of the eight tokens and the three before are on their way at once.
        uint2 raw[kWide ? 11 : 1];
        float x[kWide ? 1 : 11][4];
#pragma unroll
        for (int w = 0; w < 11; ++w) {
            const int t = chunk.first + first + w - 3;
            if constexpr (kWide) {
                raw[w] = make_uint2(0, 0);
                if (first + w - 3 >= end) continue;
                if (w >= 3 || t >= 0)
                    raw[w] = *reinterpret_cast<const uint2 *>(static_cast<const bf16 *>(d.taps.x) + (q.first + t) * d.taps.stride + c);
                else
                    raw[w] = make_uint2(pack_bf16(input_of(d.taps, q, t, c), input_of(d.taps, q, t, c + 1)), pack_bf16(input_of(d.taps, q, t, c + 2), input_of(d.taps, q, t, c + 3)));
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) x[w][i] = first + w - 3 < end ? input_of(d.taps, q, t, c + i) : 0.0f;
            }
        }
        auto input = [&](int w, float (&f)[4]) {
            if constexpr (kWide) {
                f[0] = low_f32(raw[w].x), f[1] = high_f32(raw[w].x), f[2] = low_f32(raw[w].y), f[3] = high_f32(raw[w].y);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) f[i] = x[w][i];
            }
        };
        float4 conv[4];  // taps of a channel
#pragma unroll
        for (int i = 0; i < 4; ++i) conv[i] = *reinterpret_cast<const float4 *>(d.taps.conv + (c + i) * 4);
        const bool has_length = head < 2 * d.n_k_heads;  // q and k have length one
        uint8_t *const tile = const_cast<uint8_t *>(mixed_tile(a, slot, head));
        float window[4][4];
#pragma unroll
        for (int w = 0; w < 3; ++w) input(w, window[w]);
#pragma unroll
        for (int first_of = 0; first_of < 8; first_of += 4) {
            float v[4][4], squares[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                input(first_of + t + 3, window[(t + 3) & 3]);
                squares[t] = 0.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    v[t][i] = fast_silu(conv[i].x * window[t][i] + conv[i].y * window[(t + 1) & 3][i] + conv[i].z * window[(t + 2) & 3][i] + conv[i].w * window[(t + 3) & 3][i]);
                    squares[t] += v[t][i] * v[t][i];
                }
            }
            if (has_length) {
                // The sums of four tokens at once: lanes halve what they hold and what they stand for. Lanes 8 t and up end up with token t's.
                const bool upper = lane & 16, odd = lane & 8;
                float two[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) two[k] = (upper ? squares[k + 2] : squares[k]) + __shfl_xor_sync(~0u, upper ? squares[k] : squares[k + 2], 16);
                float sum = (odd ? two[1] : two[0]) + __shfl_xor_sync(~0u, odd ? two[0] : two[1], 8);
#pragma unroll
                for (int far = 4; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
                const float by = rsqrtf(sum + 1e-6f) * (head < d.n_k_heads ? 0.08838834764831845f : 1.0f);
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    const float own = __shfl_sync(~0u, by, 8 * t);
#pragma unroll
                    for (int i = 0; i < 4; ++i) v[t][i] *= own;
                }
            }
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int row = first + first_of + t;
                *reinterpret_cast<uint2 *>(tile + wide(row, lane >> 1) + 8 * (lane & 1)) = row < end ? make_uint2(pack_bf16(v[t][0], v[t][1]), pack_bf16(v[t][2], v[t][3])) : make_uint2(0, 0);
            }
        }
    }
}

}  // namespace

bool has_chunks(const pk_op_delta &op) { return op.k_width == kWidth && op.v_width == kWidth && op.conv_width == 4; }

int64_t delta_chunk_scratch(const pk_ctx *ctx, const pk_op_delta &op, int64_t max_tokens) { return ChunkScratch(ctx->n_processors, max_tokens, op.qkv.cols, op.n_v_heads).bytes; }

int32_t launch_delta_chunks(const Launch &l, const pk_op_delta &op, const DeltaArguments &delta) {
    const unsigned rows = static_cast<unsigned>(max_rows_of(l)), slots = static_cast<unsigned>(l.max_tokens / kChunk) + rows, heads = op.n_v_heads;
    const ChunkScratch s(l.ctx->n_processors, l.max_tokens, op.qkv.cols, op.n_v_heads);
    if (s.bytes > l.scratch_bytes) return fail(PK_BAD_ARG, "delta: %lld bytes of scratch are needed, the workspace has %lld", (long long)s.bytes, (long long)l.scratch_bytes);
    ChunkArguments a = {};
    a.delta = delta;
    a.mixed = l.scratch + s.mixed;
    a.u = l.scratch + s.u;
    a.w = l.scratch + s.w;
    a.p = l.scratch + s.p;
    a.decay = reinterpret_cast<float *>(l.scratch + s.decay);
    const bool is_wide = delta.taps.format == PK_BF16 && delta.taps.stride % 4 == 0 && reinterpret_cast<uint64_t>(delta.taps.x) % 8 == 0;
    const unsigned n_segments = static_cast<unsigned>((slots + s.most - 1) / s.most), segment = (slots + n_segments - 1) / n_segments;
    for (unsigned first = 0; first < slots; first += segment) {
        a.first_slot = static_cast<int32_t>(first);
        a.n_slots = static_cast<int32_t>(std::min(segment, slots - first));
        if (int32_t e = launch(l, "delta_mix", is_wide ? delta_mix_kernel<true> : delta_mix_kernel<false>, dim3(a.n_slots, (2 * op.n_k_heads + heads + kMixHeads - 1) / kMixHeads), dim3(kThreads), 0, a)) return e;
        if (int32_t e = launch_segment(l, a, heads, rows)) return e;
    }
    if (int32_t e = launch_tails(l, delta.taps, delta.most)) return e;
    return launch_finish(l, delta, slots, heads);
}

}  // namespace pk
