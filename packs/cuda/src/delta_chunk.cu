// Gated delta net for rows of many tokens: chunks of 64 tokens on tensor cores, heads of 128 x 128, convolution of width 4.
//
// With G_t the running sum of log decays in a chunk and S the state before it, the recurrence of pk_op_delta becomes
//   (I + A) D = diag(beta) (V - diag(e^G) K S),  A[t, s] = beta_t e^{G_t - G_s} k_t . k_s for s < t
//   O = diag(e^G) Q S + P D,  P[t, s] = e^{G_t - G_s} q_t . k_s for s <= t;   S' = e^{G_last} S + K^T diag(e^{G_last - G}) D
// so that U = T diag(beta) V and W = T diag(beta e^G) K with T = (I + A)^-1 are made for all chunks side by side, and only
// D = U - W S, O and S' go from chunk to chunk. Source: Yang et al. 2024 (Gated Delta Networks), sections 3.2 and 3.3.
//
// Chunk slot c of the step: row r owns slots start[r] / 64 + r and up, which never meet those of the next row. Slots are worked
// off in segments so that scratch stays small (a megabyte a multiprocessor); the state lies in the slot's memory between segments. Rows of up to
// `most` tokens and dead rows are the step kernel's. Operands bf16, sums and state f32.
#include <algorithm>

#include "../include/delta.cuh"
#include "../include/wgmma.cuh"

namespace pk {
namespace {

constexpr int kThreads = 256, kWidth = 128, kSlice = 64, kMostSegment = 128, kMixHeads = 5, kHopperStages = 3;
constexpr int kWideBytes = kChunk * kWidth * 2;  // 64 rows of 256 bytes
constexpr int kNarrowBytes = kChunk * kChunk * 2;  // 64 rows of 128 bytes

int64_t round_up(int64_t n) { return (n + 255) / 256 * 256; }

// Where the parts of the scratch lie. mixed: [T, C] bf16, convolved, q and k of unit length; the others by slot of a segment and head.
struct ChunkScratch {
    int64_t segment, mixed, u, w, p, decay, bytes;
    ChunkScratch(int64_t n_processors, int64_t tokens, int64_t channels, int64_t heads) {
        constexpr int64_t kItem = 2 * kWideBytes + kNarrowBytes + kChunk * 4;
        segment = std::clamp<int64_t>((n_processors << 20) / (heads * kItem), 4, kMostSegment);
        const int64_t items = segment * heads;
        mixed = 0;
        u = round_up(tokens * channels * 2);
        w = u + items * kWideBytes;
        p = w + items * kWideBytes;
        decay = p + items * kNarrowBytes;
        bytes = decay + items * kChunk * 4;
    }
};

struct ChunkArguments {
    DeltaArguments delta;
    bf16 *mixed, *u, *w, *p;
    float *decay;  // G
    int32_t first_slot, n_slots;  // of the segment
};

// What a chunk slot stands for. n 0: nothing.
struct Chunk {
    int row, first, n;  // first: token in the row
};

__device__ __forceinline__ Chunk chunk_of(const DeltaArguments &a, int slot) {
    const int n_rows = a.info->n_rows;
    int low = 0, high = n_rows;
    while (high - low > 1) {
        const int mid = (low + high) >> 1;
        if (a.state.row_start[mid] / kChunk + mid <= slot) low = mid; else high = mid;
    }
    Chunk c = {low, 0, 0};
    if (n_rows == 0) return c;
    const int start = a.state.row_start[low], n = a.state.row_start[low + 1] - start;
    if (n <= a.most || (a.state.row_flags[low] & PK_ROW_DEAD)) return c;
    c.first = (slot - start / kChunk - low) * kChunk;
    c.n = min(max(n - c.first, 0), kChunk);
    return c;
}

// ---- convolution: a warp per 128 channels of eight tokens. Grid: chunk slots, any number of blocks over the heads of q, k and v ----

__device__ __forceinline__ float fast_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// kWide: inputs are BF16, four neighbours one load. Then the tail is BF16 too, widened, and narrowing it loses nothing.
template <bool kWide>
__global__ void __launch_bounds__(kThreads, kWide ? 4 : 2) delta_mix_kernel(const __grid_constant__ ChunkArguments a) {
    const DeltaArguments &d = a.delta;
    wait_dependence();
    release_dependents();
    const Chunk chunk = chunk_of(d, blockIdx.x);
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) * 8, end = min(first + 8, chunk.n), n_heads = 2 * d.n_k_heads + d.n_v_heads;
    if (first >= end) return;
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
                if (t >= 0)
                    raw[w] = *reinterpret_cast<const uint2 *>(static_cast<const bf16 *>(d.taps.x) + (q.first + t) * d.taps.stride + c);
                else
                    raw[w] = make_uint2(pack_bf16(input_of(d.taps, q, t, c), input_of(d.taps, q, t, c + 1)), pack_bf16(input_of(d.taps, q, t, c + 2), input_of(d.taps, q, t, c + 3)));
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) x[w][i] = first + w - 3 < end ? input_of(d.taps, q, t, c + i) : 0.0f;
            }
        }
        auto input = [&](int w, int i) {
            if constexpr (kWide) {
                const uint32_t pair = i < 2 ? raw[w].x : raw[w].y;
                return i & 1 ? high_f32(pair) : low_f32(pair);
            } else {
                return x[w][i];
            }
        };
        float4 conv[4];  // taps of a channel
#pragma unroll
        for (int i = 0; i < 4; ++i) conv[i] = *reinterpret_cast<const float4 *>(d.taps.conv + (c + i) * 4);
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            if (first + t >= end) continue;
            float v[4], squares = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[i] = fast_silu(conv[i].x * input(t, i) + conv[i].y * input(t + 1, i) + conv[i].z * input(t + 2, i) + conv[i].w * input(t + 3, i));
                squares += v[i] * v[i];
            }
            float by = 1.0f;
            if (head < 2 * d.n_k_heads) by = rsqrtf(warp_sum(squares) + 1e-6f) * (head < d.n_k_heads ? 0.08838834764831845f : 1.0f);
            *reinterpret_cast<uint2 *>(a.mixed + static_cast<int64_t>(q.first + chunk.first + first + t) * d.taps.channels + c) =
                make_uint2(pack_bf16(v[0] * by, v[1] * by), pack_bf16(v[2] * by, v[3] * by));
        }
    }
}

// ---- tiles in shared memory: rows of 256 or 128 bytes, 16-byte pieces swizzled by the row ----

__device__ __forceinline__ uint32_t wide(int row, int piece) { return row * 256 + ((piece ^ (row & 7)) << 4); }
__device__ __forceinline__ uint32_t narrow(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

// Fragment of 16 rows x 16 columns at (row, piece) as the A operand.
template <uint32_t (*kAt)(int, int)>
__device__ __forceinline__ void load_a(uint32_t (&r)[4], uint32_t tile, int row, int piece) {
    const int lane = threadIdx.x & 31;
    load_matrix4(r, tile + kAt(row + (lane & 15), piece + (lane >> 4)));
}
// The A operand from a tile that holds its transpose: [k, m].
template <uint32_t (*kAt)(int, int)>
__device__ __forceinline__ void load_a_transposed(uint32_t (&r)[4], uint32_t tile, int k, int piece) {
    const int lane = threadIdx.x & 31;
    load_matrix4_transposed(r, tile + kAt(k + (lane & 7) + ((lane >> 4) << 3), piece + ((lane >> 3) & 1)));
}
// Two B operands of 16 x 8 from rows of n: [n, k].
template <uint32_t (*kAt)(int, int)>
__device__ __forceinline__ void load_b(uint32_t (&r)[4], uint32_t tile, int n, int piece) {
    const int lane = threadIdx.x & 31;
    load_matrix4(r, tile + kAt(n + (lane & 7) + ((lane >> 4) << 3), piece + ((lane >> 3) & 1)));
}
// Two B operands of 16 x 8 from rows of k: [k, n].
template <uint32_t (*kAt)(int, int)>
__device__ __forceinline__ void load_b_transposed(uint32_t (&r)[4], uint32_t tile, int k, int piece) {
    const int lane = threadIdx.x & 31;
    load_matrix4_transposed(r, tile + kAt(k + (lane & 15), piece + (lane >> 4)));
}

// 64 rows of 256 bytes from `from`, rows past n as zeros; by thread tid of n_threads.
__device__ __forceinline__ void copy_wide(uint8_t *tile, const bf16 *from, int64_t stride, int n, int tid, int n_threads = kThreads) {
    for (int i = tid; i < kChunk * 16; i += n_threads) {
        const int row = i >> 4, piece = i & 15;
        copy16_async(shared_address(tile) + wide(row, piece), row < n ? from + row * stride + piece * 8 : from, row < n);
    }
}

// ---- all chunks side by side: U, W, P and G. Grid: slots of the segment, value heads ----

constexpr int kMatrixStride = kChunk + 4;
constexpr int kPrepareShared = 3 * kWideBytes + kChunk * kMatrixStride * 4 + 2 * kChunk * 4;

// Of each pair of diagonal blocks of kSize: the lower left one of `out` becomes A21 T11, or -T22 times that of `right`. A thread makes
// four neighbours.
template <int kSize, int kRightStride, int kOutStride>
__device__ __forceinline__ void multiply_blocks(const float *left, const float *right, float *out, bool is_second) {
    constexpr int kPerPair = kSize * kSize / 4, kPairs = kChunk / (2 * kSize);
    if (threadIdx.x >= kPairs * kPerPair) return;
    const int pair = threadIdx.x / kPerPair, row = threadIdx.x % kPerPair / (kSize / 4), col = threadIdx.x % (kSize / 4) * 4;
    const int top = pair * 2 * kSize, low = top + kSize;
    const float *l = left + (low + row) * kMatrixStride + (is_second ? low : top), *r = right + (is_second ? low : top) * kRightStride + top + col;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
        const float x = is_second ? -l[k] : l[k];
        const float4 y = *reinterpret_cast<const float4 *>(r + k * kRightStride);
        sum.x = fmaf(x, y.x, sum.x);
        sum.y = fmaf(x, y.y, sum.y);
        sum.z = fmaf(x, y.z, sum.z);
        sum.w = fmaf(x, y.w, sum.w);
    }
    *reinterpret_cast<float4 *>(out + (low + row) * kOutStride + top + col) = sum;
}

// T = (I + A)^-1 of the unit lower triangle in `a` [64, 68], in place: blocks of 16 by substitution, then doubled. What lies above
// the diagonal is zero, so sums run over whole blocks.
__device__ __forceinline__ void invert(float *a, float *scratch) {
    constexpr int kS = kMatrixStride;
    const int tid = threadIdx.x;
    if (tid < kChunk) {
        // Column j of its block: x_t = -(A[t, j] + sum of A[t, s] x_s over j < s < t).
        const int base = tid & ~15, j = tid & 15;
        float x[16];
#pragma unroll
        for (int t = 0; t < 16; ++t) {
            float sum = t == j ? 1.0f : 0.0f;
#pragma unroll
            for (int s = 0; s < t; ++s) sum -= a[(base + t) * kS + base + s] * x[s];
            x[t] = t < j ? 0.0f : sum;
        }
        __syncwarp();
#pragma unroll
        for (int t = 0; t < 16; ++t) a[(base + t) * kS + base + j] = x[t];
    }
    __syncthreads();
    multiply_blocks<16, kMatrixStride, kChunk>(a, a, scratch, false);
    __syncthreads();
    multiply_blocks<16, kChunk, kMatrixStride>(a, scratch, a, true);
    __syncthreads();
    multiply_blocks<32, kMatrixStride, kChunk>(a, a, scratch, false);
    __syncthreads();
    multiply_blocks<32, kChunk, kMatrixStride>(a, scratch, a, true);
    __syncthreads();
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
    const bf16 *mixed = a.mixed + token * d.taps.channels;
    copy_wide(qs, mixed + g * kWidth, d.taps.channels, chunk.n, tid);
    copy_wide(ks, mixed + d.keys + g * kWidth, d.taps.channels, chunk.n, tid);
    commit_async();
    copy_wide(vs, mixed + 2 * d.keys + h * kWidth, d.taps.channels, chunk.n, tid);
    commit_async();
    if (warp < 2) {
        float x = tid < chunk.n ? log_decay(d, token + tid, h) : 0.0f;
        for (int o = 1; o < 32; o <<= 1) {
            const float up = __shfl_up_sync(~0u, x, o);
            if (lane >= o) x += up;
        }
        decay[tid] = x;
        beta[tid] = tid < chunk.n ? 1.0f / (1.0f + expf(-d.b[(token + tid) * d.b_stride + h])) : 0.0f;
    }
    wait_async<1>();
    __syncthreads();
    if (tid >= 32 && tid < 64) decay[tid] += decay[31];
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
                    const float by = s + e <= t ? __expf(decay[t] - decay[s + e]) : 0.0f;
                    p[e] = qk[n][2 * half + e] * by;
                    matrix[t * kMatrixStride + s + e] = s + e < t ? kk[n][2 * half + e] * by * beta[t] : 0.0f;
                }
                *reinterpret_cast<uint32_t *>(a.p + item * kChunk * kChunk + t * kChunk + s) = pack_bf16(p[0], p[1]);
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
            y[e] = x[e] * __expf(decay[s + e]);
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
        bf16 *out = (which ? a.w : a.u) + item * kChunk * kWidth;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<uint32_t *>(out + (row0 + (lane >> 2) + 8 * half) * kWidth + wide0 + n * 8 + 2 * (lane & 3)) = pack_bf16(acc[n][2 * half], acc[n][2 * half + 1]);
    }
}

// ---- from chunk to chunk: D, O and the state. Grid: value heads x slices of 64 columns, rows ----

constexpr int kScanStage = 3 * kWideBytes + 2 * kNarrowBytes + kChunk * 4;  // W, Q, K; P, U; G
constexpr int kScanState = 2 * kWidth * 64 * 2;                             // S [128, 64]; D and its decayed copy [64, 64]

// W, Q, K, P, U and G of a chunk (slots from `end` on: nothing), as one group of copies.
__device__ __forceinline__ void copy_scan_stage(const ChunkArguments &a, const RecurrentRow &q, int base, int slot, int end, int h, int slice, uint8_t *stage, int tid, int n_threads) {
    const DeltaArguments &d = a.delta;
    const int g = key_head_of(d, h);
    if (slot < end) {
        const int first = (slot - base) * kChunk, n = min(q.n - first, kChunk);
        const int64_t item = static_cast<int64_t>(slot - a.first_slot) * d.n_v_heads + h;
        const bf16 *mixed = a.mixed + static_cast<int64_t>(q.first + first) * d.taps.channels;
        copy_wide(stage, a.w + item * kChunk * kWidth, kWidth, kChunk, tid, n_threads);
        copy_wide(stage + kWideBytes, mixed + g * kWidth, d.taps.channels, n, tid, n_threads);
        copy_wide(stage + 2 * kWideBytes, mixed + d.keys + g * kWidth, d.taps.channels, n, tid, n_threads);
        for (int i = tid; i < kChunk * 8; i += n_threads) {
            const int row = i >> 3, piece = i & 7;
            copy16_async(shared_address(stage) + 3 * kWideBytes + narrow(row, piece), a.p + item * kChunk * kChunk + row * kChunk + piece * 8, true);
            copy16_async(shared_address(stage) + 3 * kWideBytes + kNarrowBytes + narrow(row, piece), a.u + item * kChunk * kWidth + row * kWidth + slice + piece * 8, true);
        }
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

    auto copy_stage = [&](int slot) { copy_scan_stage(a, q, base, slot, end, h, slice, shared + slot % kStages * kScanStage, threadIdx.x, kThreads); };
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
                const float x = low_f32(u) - dd[n][2 * half], y = high_f32(u) - dd[n][2 * half + 1], by = __expf(last - decay[t]), grown = __expf(decay[t]);
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
        const float shrink = __expf(last);
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

#ifdef PK_WGMMA
// The same on Hopper: one warpgroup makes D, the other O, both the state; S, D and its decayed copy are B operands with their columns
// contiguous, W, Q, P and K come as fragments. A third warpgroup copies: a fence for what wgmma reads waits for all copies of its thread.
constexpr int kScanThreads = kThreads + 128;

__global__ void __launch_bounds__(kScanThreads, 1) delta_scan_hopper_kernel(const __grid_constant__ ChunkArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(128) uint8_t dynamic[];
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
    const bool makes_o = warp >= 4;
    uint8_t *ss = dynamic + (-shared_address(dynamic) & 1023), *ds = ss + kWidth * 128, *decayed = ds + kNarrowBytes, *stages = decayed + kNarrowBytes;
    if (warp >= 8) {
        auto copy_stage = [&](int slot) { copy_scan_stage(a, q, base, slot, end, h, slice, stages + slot % kHopperStages * kScanStage, threadIdx.x - kThreads, kScanThreads - kThreads); };
        for (int i = 0; i < kHopperStages - 1; ++i) copy_stage(begin + i);
        // In step with the barriers below: the chunk has arrived; D is there; all have read the chunk.
        for (int slot = begin; slot < end; ++slot) {
            wait_async<kHopperStages - 2>();
            __syncthreads();
            copy_stage(slot + kHopperStages - 1);
            __syncthreads();
            __syncthreads();
        }
        return;
    }
    float *state = reinterpret_cast<float *>(q.memory + d.state_offset) + static_cast<int64_t>(h) * kWidth * kWidth + slice;
    float s[32];
    const int srow = warp * 16 + (lane >> 2), scol = 2 * (lane & 3), row0 = (warp & 3) * 16, row = row0 + (lane >> 2);
    const bool is_zero = q.begins && begin == base, is_paired = d.out_format == PK_BF16 && d.out_stride % 2 == 0 && reinterpret_cast<uint64_t>(d.out) % 4 == 0;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 v = is_zero ? make_float2(0.0f, 0.0f) : *reinterpret_cast<const float2 *>(state + (srow + 8 * half) * kWidth + n * 8 + scol);
            s[4 * n + 2 * half] = v.x;
            s[4 * n + 2 * half + 1] = v.y;
        }
    for (int slot = begin; slot < end; ++slot) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) *reinterpret_cast<uint32_t *>(ss + narrow(srow + 8 * half, n) + scol * 2) = pack_bf16(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
        fence_async_proxy();
        __syncthreads();
        const uint8_t *stage = stages + slot % kHopperStages * kScanStage;
        const uint32_t at = shared_address(stage), ks = at + 2 * kWideBytes, ps = at + 3 * kWideBytes;
        const uint8_t *us = stage + 3 * kWideBytes + kNarrowBytes;
        const float *decay = reinterpret_cast<const float *>(us + kNarrowBytes);
        // W S or Q S.
        float x[32];
        uint32_t left[8][4];
#pragma unroll
        for (int k = 0; k < 8; ++k) load_a<wide>(left[k], at + (makes_o ? kWideBytes : 0), row0, 2 * k);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k) wgmma_bf16_registers_n64_transposed(x, left[k][0], left[k][1], left[k][2], left[k][3], matrix_descriptor(shared_address(ss) + k * 2048), k > 0);
        wgmma_commit();
        const float last = decay[kChunk - 1], near[2] = {decay[row], decay[row + 8]};
        const float shrink = __expf(last), by[2] = {makes_o ? __expf(near[0]) : __expf(last - near[0]), makes_o ? __expf(near[1]) : __expf(last - near[1])};
        uint32_t keys[4][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) load_a_transposed<wide>(keys[k], ks, 16 * k, warp * 2);
        wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float &low = x[4 * n + 2 * half], &high = x[4 * n + 2 * half + 1];
                if (makes_o) {
                    low *= by[half];
                    high *= by[half];
                } else {
                    const uint32_t to = narrow(row + 8 * half, n) + 4 * (lane & 3), u = *reinterpret_cast<const uint32_t *>(us + to);
                    low = low_f32(u) - low;
                    high = high_f32(u) - high;
                    *reinterpret_cast<uint32_t *>(ds + to) = pack_bf16(low, high);
                    *reinterpret_cast<uint32_t *>(decayed + to) = pack_bf16(low * by[half], high * by[half]);
                }
            }
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] *= shrink;
        fence_async_proxy();
        __syncthreads();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_bf16_registers_n64_transposed(s, keys[k][0], keys[k][1], keys[k][2], keys[k][3], matrix_descriptor(shared_address(decayed) + k * 2048), 1);
        wgmma_commit();
        wgmma_wait<0>();
        if (makes_o) {
#pragma unroll
            for (int k = 0; k < 4; ++k) load_a<narrow>(left[k], ps, row0, 2 * k);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) wgmma_bf16_registers_n64_transposed(x, left[k][0], left[k][1], left[k][2], left[k][3], matrix_descriptor(shared_address(ds) + k * 2048), 1);
            wgmma_commit();
            wgmma_wait<0>();
            const int first = (slot - base) * kChunk;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int t = first + row + 8 * half;
                if (t >= q.n) continue;
                const int64_t out = (q.first + t) * d.out_stride + h * kWidth + slice + scol;
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    if (is_paired) {
                        *reinterpret_cast<uint32_t *>(static_cast<bf16 *>(d.out) + out + n * 8) = pack_bf16(x[4 * n + 2 * half], x[4 * n + 2 * half + 1]);
                    } else {
                        store_from_f32(d.out, out + n * 8, d.out_format, x[4 * n + 2 * half]);
                        store_from_f32(d.out, out + n * 8 + 1, d.out_format, x[4 * n + 2 * half + 1]);
                    }
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) *reinterpret_cast<float2 *>(state + (srow + 8 * half) * kWidth + n * 8 + scol) = make_float2(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
#endif
}
#endif

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
    const ChunkScratch s(l.ctx->n_processors, l.max_tokens, op.qkv.cols, op.n_v_heads);
    if (s.bytes > l.scratch_bytes) return fail(PK_BAD_ARG, "delta: %lld bytes of scratch are needed, the workspace has %lld", (long long)s.bytes, (long long)l.scratch_bytes);
    ChunkArguments a = {};
    a.delta = delta;
    a.mixed = reinterpret_cast<bf16 *>(l.scratch + s.mixed);
    a.u = reinterpret_cast<bf16 *>(l.scratch + s.u);
    a.w = reinterpret_cast<bf16 *>(l.scratch + s.w);
    a.p = reinterpret_cast<bf16 *>(l.scratch + s.p);
    a.decay = reinterpret_cast<float *>(l.scratch + s.decay);
    int most_shared = 0;
    if (int32_t e = check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, l.ctx->device), "delta")) return e;
    int stages = most_shared >= 2 * kScanStage + kScanState + 1024 ? 2 : 1;
    const unsigned rows = static_cast<unsigned>(max_rows_of(l)), slots = static_cast<unsigned>(l.max_tokens / kChunk) + rows, heads = op.n_v_heads;
    const bool is_wide = delta.taps.format == PK_BF16 && delta.taps.stride % 4 == 0 && reinterpret_cast<uint64_t>(delta.taps.x) % 8 == 0;
    if (int32_t e = launch(l, "delta_mix", is_wide ? delta_mix_kernel<true> : delta_mix_kernel<false>, dim3(slots, (2 * op.n_k_heads + heads + kMixHeads - 1) / kMixHeads), dim3(kThreads), 0, a)) return e;
    if (int32_t e = launch_tails(l, delta.taps, delta.most)) return e;
    for (unsigned first = 0; first < slots; first += s.segment) {
        a.first_slot = static_cast<int32_t>(first);
        a.n_slots = static_cast<int32_t>(std::min<int64_t>(s.segment, slots - first));
        if (int32_t e = launch(l, "delta_chunk", delta_chunk_kernel, dim3(a.n_slots, heads), dim3(kThreads), kPrepareShared, a)) return e;
        int n_threads = kThreads;
        auto scan = stages == 2 ? delta_scan_kernel<2> : delta_scan_kernel<1>;
#ifdef PK_WGMMA
        scan = delta_scan_hopper_kernel;
        stages = kHopperStages;
        n_threads = kScanThreads;
#endif
        if (int32_t e = launch(l, "delta_scan", scan, dim3(2 * heads, rows), dim3(n_threads), stages * kScanStage + kScanState + 1024, a)) return e;
    }
    return launch(l, "delta_finish", delta_finish_kernel, dim3(slots, heads), dim3(kThreads), 0, delta);
}

}  // namespace pk
