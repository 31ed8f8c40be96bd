// Gated delta net for rows of many tokens: chunks of 64 tokens on tensor cores, heads of 128 x 128, convolution of width 4.
//
// With G_t the running sum of log decays in a chunk and S the state before it, the recurrence of pk_op_delta becomes
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

#include "../include/delta.cuh"
#include "../include/wgmma_attention.cuh"

namespace pk {
namespace {

constexpr int kThreads = 256, kWidth = 128, kSlice = 64, kMostSegment = 128, kMixHeads = 5, kHopperStages = 3;
constexpr int kWideBytes = kChunk * kWidth * 2;    // 64 rows of 128 elements
constexpr int kNarrowBytes = kChunk * kChunk * 2;  // 64 rows of 64

// Where the parts of the scratch lie, by slot of a segment and head; a segment has up to `most` slots. mixed: convolved heads of q, k and v, q and k of
// unit length.
struct ChunkScratch {
    int64_t most, mixed, u, w, p, decay, bytes;
    ChunkScratch(int64_t n_processors, int64_t tokens, int64_t channels, int64_t heads) {
        constexpr int64_t kItem = 2 * kWideBytes + kNarrowBytes + kChunk * 4;
        const int64_t mixed_bytes = channels / kWidth * kWideBytes;
        most = std::clamp<int64_t>(((n_processors << 20) + tokens * channels * 2) / (heads * kItem + mixed_bytes), 4, kMostSegment);
        const int64_t items = most * heads;
        mixed = 0;
        u = most * mixed_bytes;
        w = u + items * kWideBytes;
        p = w + items * kWideBytes;
        decay = p + items * kNarrowBytes;
        bytes = decay + items * kChunk * 4;
    }
};

struct ChunkArguments {
    DeltaArguments delta;
    uint8_t *mixed, *u, *w, *p;
    float *decay;  // G
    int32_t first_slot, n_slots;  // of the segment
};

// Heads of q, k and v in a slot of `mixed`, in this order.
__device__ __forceinline__ const uint8_t *mixed_tile(const ChunkArguments &a, int slot, int head) {
    return a.mixed + (static_cast<int64_t>(slot - a.first_slot) * (2 * a.delta.n_k_heads + a.delta.n_v_heads) + head) * kWideBytes;
}

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

// Tiles have rows of 128 bytes, whose 16-byte pieces are swizzled by the row; wide ones are two, left and right.
__device__ __forceinline__ uint32_t narrow(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
__device__ __forceinline__ uint32_t wide(int row, int piece) { return (piece >> 3) * kNarrowBytes + narrow(row, piece & 7); }

// ---- convolution: a warp per 128 channels of eight tokens. Grid: slots of the segment, any number of blocks over the heads of q, k and v ----

__device__ __forceinline__ float fast_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

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
            const int row = first + t;
            uint2 &to = *reinterpret_cast<uint2 *>(const_cast<uint8_t *>(mixed_tile(a, slot, head)) + wide(row, lane >> 1) + 8 * (lane & 1));
            if (row >= end) {
                to = make_uint2(0, 0);
                continue;
            }
            float v[4], squares = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[i] = fast_silu(conv[i].x * input(t, i) + conv[i].y * input(t + 1, i) + conv[i].z * input(t + 2, i) + conv[i].w * input(t + 3, i));
                squares += v[i] * v[i];
            }
            float by = 1.0f;
            if (head < 2 * d.n_k_heads) by = rsqrtf(warp_sum(squares) + 1e-6f) * (head < d.n_k_heads ? 0.08838834764831845f : 1.0f);
            to = make_uint2(pack_bf16(v[0] * by, v[1] * by), pack_bf16(v[2] * by, v[3] * by));
        }
    }
}

// ---- products of tiles ----

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

// kBytes from `from`, by thread tid of kThreadsOf.
template <int kBytes, int kThreadsOf = kThreads>
__device__ __forceinline__ void copy_tile(uint8_t *tile, const uint8_t *from, int tid) {
    const uint32_t to = shared_address(tile) + tid * 16;
    from += tid * 16;
#pragma unroll
    for (int i = 0; i < kBytes / (16 * kThreadsOf); ++i) copy16_async(to + i * 16 * kThreadsOf, from + i * 16 * kThreadsOf, true);
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

// By two warps: G and beta of a chunk's tokens.
__device__ __forceinline__ void put_decays(const DeltaArguments &d, int64_t token, int n, int h, float *decay, float *beta) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (warp == 0) {
        float x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            x[i] = lane + 32 * i < n ? log_decay(d, token + lane + 32 * i, h) : 0.0f;
            for (int o = 1; o < 32; o <<= 1) {
                const float up = __shfl_up_sync(~0u, x[i], o);
                if (lane >= o) x[i] += up;
            }
        }
        decay[lane] = x[0];
        decay[lane + 32] = x[1] + __shfl_sync(~0u, x[0], 31);
    } else if (warp == 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int t = lane + 32 * i;
            beta[t] = t < n ? 1.0f / (1.0f + expf(-d.b[(token + t) * d.b_stride + h])) : 0.0f;
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
                    const float by = s + e <= t ? __expf(decay[t] - decay[s + e]) : 0.0f;
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

#ifdef PK_WGMMA
constexpr int kPrepareHopper = 3 * kWideBytes + kNarrowBytes + kChunk * kMatrixStride * 4 + 2 * kChunk * 4 + 1024;

__device__ __forceinline__ void join_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void store_bytes(void *global, uint32_t shared, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(global), "r"(shared), "r"(bytes) : "memory");
}

// The same on Hopper: one warpgroup makes A and U, the other P and W; what goes to memory is put together in shared memory first, U over V and W
// over K.
__global__ void __launch_bounds__(kThreads, 3) delta_chunk_hopper_kernel(const __grid_constant__ ChunkArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(128) uint8_t dynamic[];
    const DeltaArguments &d = a.delta;
    wait_dependence();
    release_dependents();
    const int slot = a.first_slot + blockIdx.x;
    const Chunk chunk = chunk_of(d, slot);
    if (chunk.n == 0) return;
    const int h = blockIdx.y, g = key_head_of(d, h), tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = tid >> 7;
    uint8_t *qs = dynamic + (-shared_address(dynamic) & 1023), *ks = qs + kWideBytes, *vs = ks + kWideBytes, *ps = vs + kWideBytes;
    float *matrix = reinterpret_cast<float *>(ps + kNarrowBytes), *decay = matrix + kChunk * kMatrixStride, *beta = decay + kChunk;
    const int64_t token = d.state.row_start[chunk.row] + chunk.first, item = static_cast<int64_t>(blockIdx.x) * d.n_v_heads + h;
    copy_tile<kWideBytes>(qs, mixed_tile(a, slot, g), tid);
    copy_tile<kWideBytes>(ks, mixed_tile(a, slot, d.n_k_heads + g), tid);
    commit_async();
    copy_tile<kWideBytes>(vs, mixed_tile(a, slot, 2 * d.n_k_heads + h), tid);
    commit_async();
    put_decays(d, token, chunk.n, h, decay, beta);
    wait_async<1>();
    fence_async_proxy();
    __syncthreads();
    const int row = (warp & 3) * 16 + (lane >> 2), c = 2 * (lane & 3);
    float x[32];
    {
        // K K^T or Q K^T.
        const uint32_t left = shared_address(group ? qs : ks), right = shared_address(ks);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kWidth / 16; ++k) {
            const int at = (k >> 2) * kNarrowBytes + (k & 3) * 32;
            wgmma_scores_bf16(x, matrix_descriptor(left + at), matrix_descriptor(right + at), k > 0);
        }
        wgmma_commit();
        if (tid < kChunk) a.decay[item * kChunk + tid] = decay[tid];
        wgmma_wait<0>();
        settle(x);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = row + 8 * half;
            const float now = decay[t], factor = beta[t];
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const int s = 8 * n + c;
                const float2 then = *reinterpret_cast<const float2 *>(decay + s);
                const float low = s <= t ? x[4 * n + 2 * half] * __expf(now - then.x) : 0.0f, high = s + 1 <= t ? x[4 * n + 2 * half + 1] * __expf(now - then.y) : 0.0f;
                if (group) *reinterpret_cast<uint32_t *>(ps + narrow(t, n) + 2 * c) = pack_bf16(low, high);
                else *reinterpret_cast<float2 *>(matrix + t * kMatrixStride + s) = make_float2(s < t ? low * factor : 0.0f, s + 1 < t ? high * factor : 0.0f);
            }
        }
    }
    wait_async<0>();
    fence_async_proxy();
    __syncthreads();
    if (tid == 128) store_bytes(a.p + item * kNarrowBytes, shared_address(ps), kNarrowBytes);
    invert(matrix, reinterpret_cast<float *>(qs));
    // T diag(beta) or T diag(beta e^G) as fragments.
    uint32_t left[4][4];
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int s = 16 * k + 8 * i + c;
            float2 by = *reinterpret_cast<const float2 *>(beta + s);
            if (group) {
                const float2 then = *reinterpret_cast<const float2 *>(decay + s);
                by = make_float2(by.x * __expf(then.x), by.y * __expf(then.y));
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 v = *reinterpret_cast<const float2 *>(matrix + (row + 8 * half) * kMatrixStride + s);
                left[k][2 * i + half] = pack_bf16(v.x * by.x, v.y * by.y);
            }
        }
    uint8_t *tile = group ? ks : vs;
    // A loop, since ptxas takes both sides for one when they follow each other.
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k)
            wgmma_bf16_registers_n64_transposed(x, left[k][0], left[k][1], left[k][2], left[k][3], matrix_descriptor(shared_address(tile) + side * kNarrowBytes + k * 2048), k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        settle(x);
        join_group(group);  // this side of the tile has been read
#pragma unroll
        for (int i = 0; i < 16; ++i) *reinterpret_cast<uint32_t *>(tile + side * kNarrowBytes + narrow(row + 8 * (i & 1), i >> 1) + 2 * c) = pack_bf16(x[2 * i], x[2 * i + 1]);
    }
    fence_async_proxy();
    join_group(group);
    if ((tid & 127) == 0) {
        store_bytes((group ? a.w : a.u) + item * kWideBytes, shared_address(tile), kWideBytes);
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
#endif
}
#endif

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
// The same on Hopper. The two blocks of a head are a cluster: each fetches half of W, Q, K and P for both. One warpgroup makes D, the other O, each half of
// the state; P D of a chunk is added while the next one begins. All operands come from shared memory; D takes U's place. A third warpgroup norms, gates and
// stores what the second has left it; sums of squares over half a head go to the other block.
constexpr int kScanThreads = kThreads + 2 * 128, kHopperStage = 3 * kWideBytes + 2 * kNarrowBytes, kQueriesAt = kWideBytes, kKeysAt = 2 * kWideBytes, kScoresAt = 3 * kWideBytes, kValuesAt = kScoresAt + kNarrowBytes;
constexpr int kStateAt = kHopperStages * kHopperStage, kChangesAt = kStateAt + kWideBytes, kOutAt = kChangesAt + kNarrowBytes, kDecaysAt = kOutAt + kNarrowBytes;
// Sums of the block's own columns, then the other's of four chunks: it may be three ahead.
constexpr int kSumsAt = kDecaysAt + kHopperStages * kChunk * 4, kSumsKept = 4, kBarriersAt = kSumsAt + (1 + kSumsKept) * kChunk * 4, kScanHopper = kBarriersAt + (2 * kHopperStages + kSumsKept) * 8;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// d[64, 64] (+)= a[64, 16] b[16, 64], both in shared memory, b with its columns contiguous, a with its rows, or (kTransposed) its columns.
template <bool kTransposed>
__device__ __forceinline__ void wgmma_tile(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, %35, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposed));
}
__device__ __forceinline__ void copy_bytes_to_both(uint32_t shared, const void *global, int bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared), "l"(global), "r"(bytes), "r"(shared_address(barrier)),
                 "h"(static_cast<uint16_t>(3))
                 : "memory");
}
// Of two warpgroups: both wait; or this one does not.
__device__ __forceinline__ void meet(int what) { asm volatile("bar.sync %0, 256;" ::"r"(what) : "memory"); }
__device__ __forceinline__ void tell(int what) { asm volatile("bar.arrive %0, 256;" ::"r"(what) : "memory"); }
// At the same place of block `rank`, whose barrier counts the bytes.
__device__ __forceinline__ void store_at(const float *to, float v, const uint64_t *barrier, int rank) {
    asm volatile("{\n.reg .b32 there, b;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 b, %2, %3;\nst.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [b];\n}\n" ::"r"(shared_address(to)), "f"(v),
                 "r"(shared_address(barrier)), "r"(rank)
                 : "memory");
}
#endif

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kScanThreads, 1) delta_scan_hopper_kernel(const __grid_constant__ ChunkArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t whole[];
    uint8_t *const shared = whole;
    uint64_t *full = reinterpret_cast<uint64_t *>(shared + kBarriersAt), *empty = full + kHopperStages, *summed = empty + kHopperStages;
    float *own = reinterpret_cast<float *>(shared + kSumsAt), *others = own + kChunk;
    const DeltaArguments &d = a.delta;
    wait_dependence();
    release_dependents();
    const int r = blockIdx.y;
    if (r >= d.info->n_rows) return;
    const RecurrentRow q = recurrent_row(d.state, r);
    if (q.is_dead || q.n <= d.most) return;
    const int base = q.first / kChunk + r, begin = max(a.first_slot, base), end = min(a.first_slot + a.n_slots, base + (q.n + kChunk - 1) / kChunk);
    if (begin >= end) return;
    const int h = blockIdx.x >> 1, rank = blockIdx.x & 1, lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSumsKept; ++i) barrier_init(summed + i, 1);
        for (int i = 0; i < kHopperStages; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 2 * kThreads / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    if (warp >= kThreads / 32 + 4) {
        fewer_registers<40>();
        const int g = key_head_of(d, h);
        if (warp == kThreads / 32 + 4 && lane == 0)
            for (int slot = begin, i = 0; slot < end; ++slot, ++i) {
                const int at = i % kHopperStages;
                if (i >= kHopperStages) barrier_wait(empty + at, (i / kHopperStages - 1) & 1);
                barrier_expect(full + at, kHopperStage + kChunk * 4);
                const int64_t item = static_cast<int64_t>(slot - a.first_slot) * d.n_v_heads + h;
                const uint32_t stage = shared_address(shared) + at * kHopperStage, half = rank * kNarrowBytes;
                copy_bytes_to_both(stage + half, a.w + item * kWideBytes + half, kNarrowBytes, full + at);
                copy_bytes_to_both(stage + kQueriesAt + half, mixed_tile(a, slot, g) + half, kNarrowBytes, full + at);
                copy_bytes_to_both(stage + kKeysAt + half, mixed_tile(a, slot, d.n_k_heads + g) + half, kNarrowBytes, full + at);
                copy_bytes_to_both(stage + kScoresAt + half / 2, a.p + item * kNarrowBytes + half / 2, kNarrowBytes / 2, full + at);
                copy_bytes(stage + kValuesAt, a.u + item * kWideBytes + half, kNarrowBytes, full + at);
                copy_bytes(shared_address(shared) + kDecaysAt + at * kChunk * 4, a.decay + item * kChunk, kChunk * 4, full + at);
            }
        __syncwarp();
        cluster_sync();
        return;
    }
    if (warp >= kThreads / 32) {
        fewer_registers<88>();
        // Eight columns of four rows a thread.
        const int tid = threadIdx.x & 127, piece = tid & 7, column = h * kWidth + rank * kSlice + 8 * piece;
        auto is_wide = [](const void *p, int64_t stride, int32_t format) { return format == PK_BF16 && stride % 8 == 0 && reinterpret_cast<uint64_t>(p) % 16 == 0; };
        const bool is_whole = is_wide(d.out, d.out_stride, d.out_format) && is_wide(d.z, d.z_stride, d.z_format);
        float scale[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) scale[e] = d.scale[rank * kSlice + 8 * piece + e];
        for (int slot = begin, i = 0; slot < end; ++slot, ++i) {
            const int first = (slot - base) * kChunk + (tid >> 3), kept = i % kSumsKept;
            uint4 z[4], o[4];
            float squares[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (is_whole && first + 16 * k < q.n) z[k] = *reinterpret_cast<const uint4 *>(static_cast<const bf16 *>(d.z) + (q.first + first + 16 * k) * d.z_stride + column);
            meet(3);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                o[k] = *reinterpret_cast<const uint4 *>(shared + kOutAt + narrow((tid >> 3) + 16 * k, piece));
                squares[k] = own[(tid >> 3) + 16 * k];
            }
            barrier_wait(summed + kept, (i / kSumsKept) & 1);
#pragma unroll
            for (int k = 0; k < 4; ++k) squares[k] += others[kept * kChunk + (tid >> 3) + 16 * k];
            tell(4);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (first + 16 * k >= q.n) continue;
                const int64_t token = q.first + first + 16 * k;
                const float by = rsqrtf(squares[k] * (1.0f / kWidth) + d.eps);
                if (!is_whole) {
                    // By the piece that was read from shared memory: an element at a time.
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const uint32_t pair = (&o[k].x)[e >> 1];
                        store_from_f32(d.out, token * d.out_stride + column + e, d.out_format, (e & 1 ? high_f32(pair) : low_f32(pair)) * by * scale[e] * gate_of(d, load_as_f32(d.z, token * d.z_stride + column + e, d.z_format)));
                    }
                    continue;
                }
                uint4 v;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const uint32_t pair = (&o[k].x)[e], gates = (&z[k].x)[e];
                    (&v.x)[e] = pack_bf16(low_f32(pair) * by * scale[2 * e] * gate_of(d, low_f32(gates)), high_f32(pair) * by * scale[2 * e + 1] * gate_of(d, high_f32(gates)));
                }
                *reinterpret_cast<uint4 *>(static_cast<bf16 *>(d.out) + token * d.out_stride + column) = v;
            }
        }
        cluster_sync();
        return;
    }
    more_registers<168>();
    const int group = warp >> 2, srow = warp * 16 + (lane >> 2), scol = 2 * (lane & 3), row = (warp & 3) * 16 + (lane >> 2);
    const uint32_t ss = shared_address(shared) + kStateAt, changes = shared_address(shared) + kChangesAt;
    float *state = reinterpret_cast<float *>(q.memory + d.state_offset) + static_cast<int64_t>(h) * kWidth * kWidth + rank * kSlice;
    float s[32], x[32], o[32] = {};
    const bool is_zero = q.begins && begin == base;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 v = is_zero ? make_float2(0.0f, 0.0f) : *reinterpret_cast<const float2 *>(state + (srow + 8 * half) * kWidth + n * 8 + scol);
            s[4 * n + 2 * half] = v.x;
            s[4 * n + 2 * half + 1] = v.y;
        }
    auto release = [&](int at) {
        __syncwarp();
        // What was read has been waited for: no fence, which barrier_arrive_at would be.
        if (lane < 2)
            asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(shared_address(empty + at)), "r"(lane) : "memory");
    };
    // What Q S of the chunk before gave, in o, and P D: to memory.
    auto ask_output = [&](int at) {
        const uint32_t stage = shared_address(shared) + at * kHopperStage;
#pragma unroll
        for (int k = 0; k < kChunk / 16; ++k) wgmma_tile<false>(o, matrix_descriptor(stage + kScoresAt + 32 * k), matrix_descriptor(stage + kValuesAt + 2048 * k), 1);
        wgmma_commit();
    };
    // Chunk i's O to the warps that finish it.
    auto put_output = [&](int i) {
        if (i > 0) meet(4);
        const int kept = i % kSumsKept;
        if (threadIdx.x == kThreads - 128) barrier_expect(summed + kept, kChunk * 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float squares = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const float low = o[4 * n + 2 * half], high = o[4 * n + 2 * half + 1];
                squares += low * low + high * high;
                *reinterpret_cast<uint32_t *>(shared + kOutAt + narrow(row + 8 * half, n) + 2 * scol) = pack_bf16(low, high);
            }
            squares += __shfl_xor_sync(~0u, squares, 1);
            squares += __shfl_xor_sync(~0u, squares, 2);
            if ((lane & 3) == 0) {
                own[row + 8 * half] = squares;
                store_at(others + kept * kChunk + row + 8 * half, squares, summed + kept, rank ^ 1);
            }
        }
        tell(3);
    };
    int before = 0;
    auto run = [&]<bool kMakesO>() {
        for (int slot = begin, i = 0; slot < end; ++slot, ++i) {
            const int at = i % kHopperStages;
            uint8_t *stage = shared + at * kHopperStage;
            const uint32_t tiles = shared_address(stage);
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) *reinterpret_cast<uint32_t *>(shared + kStateAt + narrow(srow + 8 * half, n) + scol * 2) = pack_bf16(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
            fence_async_proxy();
            meet(1);
            barrier_wait(full + at, (i / kHopperStages) & 1);
            // W S or Q S, behind P D of the chunk before.
            wgmma_fence();
            if constexpr (kMakesO) ask_output(i > 0 ? before : at);  // of the first chunk nothing is kept
#pragma unroll
            for (int k = 0; k < kWidth / 16; ++k)
                wgmma_tile<false>(x, matrix_descriptor(tiles + (kMakesO ? kQueriesAt : 0) + (k >> 2) * kNarrowBytes + 32 * (k & 3)), matrix_descriptor(ss + 2048 * k), k > 0);
            wgmma_commit();
            const float *decay = reinterpret_cast<const float *>(shared + kDecaysAt) + at * kChunk;
            const float last = decay[kChunk - 1], near[2] = {decay[row], decay[row + 8]}, shrink = __expf(last);
            const float by[2] = {kMakesO ? __expf(near[0]) : __expf(last - near[0]), kMakesO ? __expf(near[1]) : __expf(last - near[1])};
            if constexpr (kMakesO) {
                wgmma_wait<1>();
                settle(o);
                if (i > 0) {
                    release(before);
                    put_output(i - 1);
                }
            }
            wgmma_wait<0>();
            settle(x);
            if constexpr (kMakesO) {
#pragma unroll
                for (int e = 0; e < 32; ++e) o[e] = x[e] * by[e >> 1 & 1];
            } else {
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t to = narrow(row + 8 * half, n) + 2 * scol;
                        uint32_t &u = *reinterpret_cast<uint32_t *>(stage + kValuesAt + to);
                        const float low = low_f32(u) - x[4 * n + 2 * half], high = high_f32(u) - x[4 * n + 2 * half + 1];
                        u = pack_bf16(low, high);
                        *reinterpret_cast<uint32_t *>(shared + kChangesAt + to) = pack_bf16(low * by[half], high * by[half]);
                    }
                fence_async_proxy();
            }
#pragma unroll
            for (int e = 0; e < 32; ++e) s[e] *= shrink;
            meet(2);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kChunk / 16; ++k) wgmma_tile<true>(s, matrix_descriptor(tiles + kKeysAt + group * kNarrowBytes + 2048 * k), matrix_descriptor(changes + 2048 * k), 1);
            wgmma_commit();
            wgmma_wait<0>();
            settle(s);
            if constexpr (!kMakesO) release(at);
            before = at;
        }
        if constexpr (kMakesO) {
            wgmma_fence();
            ask_output(before);
            wgmma_wait<0>();
            settle(o);
            put_output(end - begin - 1);
            meet(4);
        }
    };
    if (warp >= 4) run.template operator()<true>();
    else run.template operator()<false>();
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) *reinterpret_cast<float2 *>(state + (srow + 8 * half) * kWidth + n * 8 + scol) = make_float2(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
    cluster_sync();
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
