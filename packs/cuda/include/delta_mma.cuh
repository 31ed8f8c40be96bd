// Chunks of a gated delta net by mma.sync, where there is no wgmma: the kernel that makes U, W, P and G of all chunks, the scan from chunk to chunk, and
// the output's norm and gate. delta_hopper.cuh has the same for Hopper.
#pragma once
#include "delta_chunk.cuh"

namespace pk {
namespace {

// ---- all chunks side by side: U, W, P and G. Grid: slots of the segment, value heads ----

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

// U, W, P and G of a segment's chunks, then the scan over them.
int32_t launch_segment(const Launch &l, const ChunkArguments &a, unsigned heads, unsigned rows) {
    int most_shared = 0;
    if (int32_t e = check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, l.ctx->device), "delta")) return e;
    const int stages = most_shared >= 2 * kScanStage + kScanState + 1024 ? 2 : 1;
    if (int32_t e = launch(l, "delta_chunk", delta_chunk_kernel, dim3(a.n_slots, heads), dim3(kThreads), kPrepareShared, a)) return e;
    return launch(l, "delta_scan", stages == 2 ? delta_scan_kernel<2> : delta_scan_kernel<1>, dim3(2 * heads, rows), dim3(kThreads), stages * kScanStage + kScanState + 1024, a);
}

int32_t launch_finish(const Launch &l, const DeltaArguments &delta, unsigned slots, unsigned heads) {
    return launch(l, "delta_finish", delta_finish_kernel, dim3(slots, heads), dim3(kThreads), 0, delta);
}

}  // namespace
}  // namespace pk
