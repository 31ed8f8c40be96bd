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

#include "../include/delta_chunk.cuh"
#ifdef PK_WGMMA
#include "../include/delta_hopper.cuh"
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

__global__ void __launch_bounds__(kThreads, 3) delta_chunk_kernel(const __grid_constant__ ChunkArguments a) {
    extern __shared__ __align__(128) uint8_t shared[];
    const DeltaArguments &d = a.delta;
    wait_dependence();
    release_dependents();
    const Chunk chunk = chunk_of(d, a.first_slot + blockIdx.x);
    if (chunk.n == 0) return;
    const int h = blockIdx.y, g = key_head_of(d, h), tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    uint8_t *qs = shared, *ks = qs + kWideBytes, *vs = ks + kWideBytes;
    // The queries are of no use once P is made: their place is scratch, and then T's.
    float *matrix = reinterpret_cast<float *>(vs + kWideBytes), *scratch = reinterpret_cast<float *>(qs);
    float *decay = matrix + kChunk * kMatrixStride, *beta = decay + kChunk;
    const int64_t token = d.state.row_start[chunk.row] + chunk.first, item = static_cast<int64_t>(blockIdx.x) * d.n_v_heads + h;
    const int slot = a.first_slot + blockIdx.x;
    copy_tile<kWideBytes>(qs, mixed_tile(a, slot, g), tid);
    copy_tile<kWideBytes>(ks, mixed_tile(a, slot, d.n_k_heads + g), tid);
    commit_async();
    copy_tile<kWideBytes>(vs, mixed_tile(a, slot, 2 * d.n_k_heads + h), tid);
    commit_async();
    put_decays(d, token, chunk.n, h, decay, beta);
    wait_async<1>();
    __syncthreads();
    if (tid < kChunk) a.decay[item * kChunk + tid] = decay[tid];

    // A (f32, here) and P (bf16, to memory): a warp makes 16 rows x 32 columns of each.
    const int row0 = (warp & 3) * 16, col0 = (warp >> 2) * 32;
    {
        float kk[4][4] = {}, qk[4][4] = {};
#pragma unroll
        for (int k = 0; k < kWidth / 16; ++k) {
            uint32_t ka[4], qa[4], b[2][4];
            load_a<wide>(ka, shared_address(ks), row0, 2 * k);
            load_a<wide>(qa, shared_address(qs), row0, 2 * k);
#pragma unroll
            for (int n = 0; n < 2; ++n) load_b<wide>(b[n], shared_address(ks), col0 + 16 * n, 2 * k);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                mma_bf16(kk[n], ka[0], ka[1], ka[2], ka[3], b[n >> 1][(n & 1) * 2], b[n >> 1][(n & 1) * 2 + 1]);
                mma_bf16(qk[n], qa[0], qa[1], qa[2], qa[3], b[n >> 1][(n & 1) * 2], b[n >> 1][(n & 1) * 2 + 1]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int t = row0 + (lane >> 2) + 8 * half, s = col0 + n * 8 + 2 * (lane & 3);
                float p[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float by = s + e <= t ? exp_of_two(decay[t] - decay[s + e]) : 0.0f;
                    p[e] = qk[n][2 * half + e] * by;
                    matrix[t * kMatrixStride + s + e] = s + e < t ? kk[n][2 * half + e] * by * beta[t] : 0.0f;
                }
                *reinterpret_cast<uint32_t *>(a.p + item * kNarrowBytes + narrow(t, s >> 3) + (s & 7) * 2) = pack_bf16(p[0], p[1]);
            }
    }
    __syncthreads();
    invert(matrix, scratch);
    // T diag(beta) and T diag(beta e^G) as bf16 tiles.
    uint8_t *tb = qs, *tg = qs + kNarrowBytes;
    for (int i = tid; i < kChunk * kChunk / 2; i += kThreads) {
        const int t = i >> 5, s = (i & 31) * 2;
        float x[2], y[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            x[e] = matrix[t * kMatrixStride + s + e] * beta[s + e];
            y[e] = x[e] * exp_of_two(decay[s + e]);
        }
        const uint32_t at = narrow(t, s >> 3) + (s & 7) * 2;
        *reinterpret_cast<uint32_t *>(tb + at) = pack_bf16(x[0], x[1]);
        *reinterpret_cast<uint32_t *>(tg + at) = pack_bf16(y[0], y[1]);
    }
    wait_async<0>();
    __syncthreads();
    // U = T diag(beta) V, W = T diag(beta e^G) K: a warp makes 16 rows x 64 columns of each.
    const int wide0 = (warp >> 2) * 64;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const uint32_t left = shared_address(which ? tg : tb), right = shared_address(which ? ks : vs);
        float acc[8][4] = {};
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
            uint32_t t[4];
            load_a<narrow>(t, left, row0, 2 * k);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32_t b[4];
                load_b_transposed<wide>(b, right, 16 * k, (wide0 + 16 * n) / 8);
                mma_bf16(acc[2 * n], t[0], t[1], t[2], t[3], b[0], b[1]);
                mma_bf16(acc[2 * n + 1], t[0], t[1], t[2], t[3], b[2], b[3]);
            }
        }
        uint8_t *out = (which ? a.w : a.u) + item * kWideBytes + 4 * (lane & 3);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row0 + (lane >> 2) + 8 * half;
                *reinterpret_cast<uint32_t *>(out + wide(row, wide0 / 8 + n)) = pack_bf16(acc[n][2 * half], acc[n][2 * half + 1]);
            }
    }
}

// ---- from chunk to chunk: D, O and the state. Grid: value heads x slices of 64 columns, rows ----

constexpr int kScanStage = 3 * kWideBytes + 2 * kNarrowBytes + kChunk * 4;  // W, Q, K; P, U; G
constexpr int kScanState = 2 * kWidth * 64 * 2;                             // S [128, 64]; D and its decayed copy [64, 64]

// W, Q, K, P, U and G of a chunk (slots from `end` on: nothing), as one group of copies. slice: 0 or 1.
template <int kThreadsOf>
__device__ __forceinline__ void copy_scan_stage(const ChunkArguments &a, int slot, int end, int h, int slice, uint8_t *stage, int tid) {
    const DeltaArguments &d = a.delta;
    if (slot < end) {
        const int64_t item = static_cast<int64_t>(slot - a.first_slot) * d.n_v_heads + h;
        const int g = key_head_of(d, h);
        copy_tile<kWideBytes, kThreadsOf>(stage, a.w + item * kWideBytes, tid);
        copy_tile<kWideBytes, kThreadsOf>(stage + kWideBytes, mixed_tile(a, slot, g), tid);
        copy_tile<kWideBytes, kThreadsOf>(stage + 2 * kWideBytes, mixed_tile(a, slot, d.n_k_heads + g), tid);
        copy_tile<kNarrowBytes, kThreadsOf>(stage + 3 * kWideBytes, a.p + item * kNarrowBytes, tid);
        copy_tile<kNarrowBytes, kThreadsOf>(stage + 3 * kWideBytes + kNarrowBytes, a.u + item * kWideBytes + slice * kNarrowBytes, tid);
        if (tid < 16) copy16_async(shared_address(stage) + 3 * kWideBytes + 2 * kNarrowBytes + tid * 16, a.decay + item * kChunk + tid * 4, true);
    }
    commit_async();
}

// kStages 2: the next chunk is copied during this one. One stage fits where a block has 99 KB.
template <int kStages>
__global__ void __launch_bounds__(kThreads, 1) delta_scan_kernel(const __grid_constant__ ChunkArguments a) {
    extern __shared__ __align__(128) uint8_t shared[];
    const DeltaArguments &d = a.delta;
    wait_dependence();
    release_dependents();
    const int r = blockIdx.y;
    if (r >= d.info->n_rows) return;
    const RecurrentRow q = recurrent_row(d.state, r);
    if (q.is_dead || q.n <= d.most) return;
    const int base = q.first / kChunk + r, begin = max(a.first_slot, base), end = min(a.first_slot + a.n_slots, base + (q.n + kChunk - 1) / kChunk);
    if (begin >= end) return;
    const int h = blockIdx.x >> 1, slice = (blockIdx.x & 1) * kSlice, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint8_t *ss = shared + kStages * kScanStage, *ds = ss + kWidth * 128, *decayed = ds + kNarrowBytes;

    auto copy_stage = [&](int slot) { copy_scan_stage<kThreads>(a, slot, end, h, slice / kSlice, shared + slot % kStages * kScanStage, threadIdx.x); };
    if constexpr (kStages == 2) copy_stage(begin);
    // The state: a warp holds rows 16 w .. + 15 of S, all 64 columns, as accumulators.
    float *state = reinterpret_cast<float *>(q.memory + d.state_offset) + static_cast<int64_t>(h) * kWidth * kWidth + slice;
    float s[8][4];
    const int srow = warp * 16 + (lane >> 2), scol = 2 * (lane & 3);
    const bool is_zero = q.begins && begin == base;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 v = is_zero ? make_float2(0.0f, 0.0f) : *reinterpret_cast<const float2 *>(state + (srow + 8 * half) * kWidth + n * 8 + scol);
            s[n][2 * half] = v.x;
            s[n][2 * half + 1] = v.y;
        }
    const int row0 = (warp & 3) * 16, col0 = (warp >> 2) * 32, row = row0 + (lane >> 2);
    const bool is_paired = d.out_format == PK_BF16 && d.out_stride % 2 == 0 && reinterpret_cast<uint64_t>(d.out) % 4 == 0;
    for (int slot = begin; slot < end; ++slot) {
        // bf16 copy of the state for the products.
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) *reinterpret_cast<uint32_t *>(ss + narrow(srow + 8 * half, n) + scol * 2) = pack_bf16(s[n][2 * half], s[n][2 * half + 1]);
        copy_stage(slot + kStages - 1);
        wait_async<kStages - 1>();
        __syncthreads();
        const uint8_t *stage = shared + slot % kStages * kScanStage;
        const uint32_t ws = shared_address(stage), qs = ws + kWideBytes, ks = qs + kWideBytes, ps = ks + kWideBytes;
        const uint8_t *us = stage + 3 * kWideBytes + kNarrowBytes;
        const float *decay = reinterpret_cast<const float *>(us + kNarrowBytes);
        float dd[4][4] = {}, o[4][4] = {};
#pragma unroll
        for (int k = 0; k < kWidth / 16; ++k) {
            uint32_t wa[4], qa[4];
            load_a<wide>(wa, ws, row0, 2 * k);
            load_a<wide>(qa, qs, row0, 2 * k);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                uint32_t b[4];
                load_b_transposed<narrow>(b, shared_address(ss), 16 * k, (col0 + 16 * n) / 8);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    mma_bf16(dd[2 * n + i], wa[0], wa[1], wa[2], wa[3], b[2 * i], b[2 * i + 1]);
                    mma_bf16(o[2 * n + i], qa[0], qa[1], qa[2], qa[3], b[2 * i], b[2 * i + 1]);
                }
            }
        }
        const float last = decay[kChunk - 1];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int t = row + 8 * half;
                const uint32_t at = narrow(t, (col0 + n * 8) >> 3) + 4 * (lane & 3);
                const uint32_t u = *reinterpret_cast<const uint32_t *>(us + at);
                const float x = low_f32(u) - dd[n][2 * half], y = high_f32(u) - dd[n][2 * half + 1], by = exp_of_two(last - decay[t]), grown = exp_of_two(decay[t]);
                *reinterpret_cast<uint32_t *>(ds + at) = pack_bf16(x, y);
                *reinterpret_cast<uint32_t *>(decayed + at) = pack_bf16(x * by, y * by);
                o[n][2 * half] *= grown;
                o[n][2 * half + 1] *= grown;
            }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
            uint32_t pa[4];
            load_a<narrow>(pa, ps, row0, 2 * k);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                uint32_t b[4];
                load_b_transposed<narrow>(b, shared_address(ds), 16 * k, (col0 + 16 * n) / 8);
                mma_bf16(o[2 * n], pa[0], pa[1], pa[2], pa[3], b[0], b[1]);
                mma_bf16(o[2 * n + 1], pa[0], pa[1], pa[2], pa[3], b[2], b[3]);
            }
        }
        const float shrink = exp_of_two(last);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] *= shrink;
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) {
            uint32_t ka[4];
            load_a_transposed<wide>(ka, ks, 16 * k, warp * 2);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32_t b[4];
                load_b_transposed<narrow>(b, shared_address(decayed), 16 * k, 2 * n);
                mma_bf16(s[2 * n], ka[0], ka[1], ka[2], ka[3], b[0], b[1]);
                mma_bf16(s[2 * n + 1], ka[0], ka[1], ka[2], ka[3], b[2], b[3]);
            }
        }
        const int first = (slot - base) * kChunk;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = first + row + 8 * half;
            if (t >= q.n) continue;
            const int64_t out = (q.first + t) * d.out_stride + h * kWidth + slice + col0 + 2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (is_paired) {
                    *reinterpret_cast<uint32_t *>(static_cast<bf16 *>(d.out) + out + n * 8) = pack_bf16(o[n][2 * half], o[n][2 * half + 1]);
                } else {
                    store_from_f32(d.out, out + n * 8, d.out_format, o[n][2 * half]);
                    store_from_f32(d.out, out + n * 8 + 1, d.out_format, o[n][2 * half + 1]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) *reinterpret_cast<float2 *>(state + (srow + 8 * half) * kWidth + n * 8 + scol) = make_float2(s[n][2 * half], s[n][2 * half + 1]);
}

// ---- output norm and gate, in place. A warp per head of four tokens. Grid: chunk slots, value heads ----

__global__ void __launch_bounds__(kThreads) delta_finish_kernel(const __grid_constant__ DeltaArguments d) {
    wait_dependence();
    release_dependents();
    const Chunk chunk = chunk_of(d, blockIdx.x);
    const int lane = threadIdx.x & 31, h = blockIdx.y;
    const int64_t start = chunk.n ? d.state.row_start[chunk.row] + chunk.first : 0;
    auto is_wide = [](const void *p, int64_t stride, int32_t format) { return format == PK_BF16 && stride % 4 == 0 && reinterpret_cast<uint64_t>(p) % 8 == 0; };
    const bool wide = is_wide(d.out, d.out_stride, d.out_format) && is_wide(d.z, d.z_stride, d.z_format);
    const float4 scale = *reinterpret_cast<const float4 *>(d.scale + lane * 4);
    constexpr int kEach = 4;  // tokens that a warp has under way
    for (int first = (threadIdx.x >> 5) * kEach; first < chunk.n; first += kThreads / 32 * kEach) {
        float o[kEach][4], z[kEach][4];
#pragma unroll
        for (int t = 0; t < kEach; ++t) {
            const int64_t token = start + min(first + t, chunk.n - 1), out = token * d.out_stride + h * kWidth + lane * 4, at = token * d.z_stride + h * kWidth + lane * 4;
            if (wide) {
                const uint2 a = *reinterpret_cast<const uint2 *>(static_cast<const bf16 *>(d.out) + out), b = *reinterpret_cast<const uint2 *>(static_cast<const bf16 *>(d.z) + at);
                o[t][0] = low_f32(a.x);
                o[t][1] = high_f32(a.x);
                o[t][2] = low_f32(a.y);
                o[t][3] = high_f32(a.y);
                z[t][0] = low_f32(b.x);
                z[t][1] = high_f32(b.x);
                z[t][2] = low_f32(b.y);
                z[t][3] = high_f32(b.y);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    o[t][i] = load_as_f32(d.out, out + i, d.out_format);
                    z[t][i] = load_as_f32(d.z, at + i, d.z_format);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < kEach; ++t) {
            if (first + t >= chunk.n) continue;
            const int64_t out = (start + first + t) * d.out_stride + h * kWidth + lane * 4;
            const float by = rsqrtf(warp_sum(o[t][0] * o[t][0] + o[t][1] * o[t][1] + o[t][2] * o[t][2] + o[t][3] * o[t][3]) / kWidth + d.eps);
            const float v[4] = {o[t][0] * by * scale.x * gate_of(d, z[t][0]), o[t][1] * by * scale.y * gate_of(d, z[t][1]), o[t][2] * by * scale.z * gate_of(d, z[t][2]), o[t][3] * by * scale.w * gate_of(d, z[t][3])};
            if (wide) {
                *reinterpret_cast<uint2 *>(static_cast<bf16 *>(d.out) + out) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) store_from_f32(d.out, out + i, d.out_format, v[i]);
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
    int most_shared = 0;
    if (int32_t e = check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, l.ctx->device), "delta")) return e;
    const int stages = most_shared >= 2 * kScanStage + kScanState + 1024 ? 2 : 1;
    const bool is_wide = delta.taps.format == PK_BF16 && delta.taps.stride % 4 == 0 && reinterpret_cast<uint64_t>(delta.taps.x) % 8 == 0;
    const unsigned n_segments = static_cast<unsigned>((slots + s.most - 1) / s.most), segment = (slots + n_segments - 1) / n_segments;
    for (unsigned first = 0; first < slots; first += segment) {
        a.first_slot = static_cast<int32_t>(first);
        a.n_slots = static_cast<int32_t>(std::min(segment, slots - first));
        if (int32_t e = launch(l, "delta_mix", is_wide ? delta_mix_kernel<true> : delta_mix_kernel<false>, dim3(a.n_slots, (2 * op.n_k_heads + heads + kMixHeads - 1) / kMixHeads), dim3(kThreads), 0, a)) return e;
        int n_threads = kThreads, prepare_bytes = kPrepareShared, scan_bytes = stages * kScanStage + kScanState + 1024;
        auto prepare = delta_chunk_kernel, scan = stages == 2 ? delta_scan_kernel<2> : delta_scan_kernel<1>;
#ifdef PK_WGMMA
        prepare = delta_chunk_hopper_kernel;
        prepare_bytes = kPrepareHopper;
        scan = delta_scan_hopper_kernel;
        scan_bytes = kScanHopper;
        n_threads = kScanThreads;
#endif
        if (int32_t e = launch(l, "delta_chunk", prepare, dim3(a.n_slots, heads), dim3(kThreads), prepare_bytes, a)) return e;
        if (int32_t e = launch(l, "delta_scan", scan, dim3(2 * heads, rows), dim3(n_threads), scan_bytes, a)) return e;
    }
    if (int32_t e = launch_tails(l, delta.taps, delta.most)) return e;
#ifdef PK_WGMMA
    return PK_OK;
#else
    return launch(l, "delta_finish", delta_finish_kernel, dim3(slots, heads), dim3(kThreads), 0, delta);
#endif
}

}  // namespace pk
