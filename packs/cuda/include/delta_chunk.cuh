// What the kernels over chunks of a gated delta net share (src/delta_chunk.cu): where tiles lie in scratch, which chunk a slot stands for, products of
// tiles by mma.sync, the inverse of a unit lower triangle.
#pragma once
#include <algorithm>

#include "delta.cuh"

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

// ---- T of a chunk, and its decays ----

constexpr int kMatrixStride = kChunk + 4;
constexpr int kPrepareShared = 3 * kWideBytes + kChunk * kMatrixStride * 4 + 2 * kChunk * 4;

// Of each pair of diagonal blocks of kSize: A21 T11 to `scratch`, or -T22 times that to where A21 was. In TF32 (T is rounded to bf16 afterwards), 16 x 8 a warp.
constexpr int kScratchStride = 40;
__device__ __forceinline__ uint32_t to_tf32(float v) {
    uint32_t u;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(u) : "f"(v));
    return u;
}
template <int kSize, bool kIsSecond>
__device__ __forceinline__ void multiply_blocks(float *a, float *scratch) {
    constexpr int kS = kMatrixStride, kAcross = kSize / 8, kPerPair = kSize / 16 * kAcross, kTasks = kChunk / (2 * kSize) * kPerPair;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    if (warp >= kTasks) return;
    const int top = warp / kPerPair * 2 * kSize, low = top + kSize, row = low + warp % kPerPair / kAcross * 16 + g, col = warp % kAcross * 8;
    const float *left = a + row * kS + (kIsSecond ? low : top) + t;
    float d[4] = {};
#pragma unroll
    for (int k = 0; k < kSize; k += 8) {
        const float *right = kIsSecond ? scratch + (low + k + t) * kScratchStride + col + g : a + (top + k + t) * kS + top + col + g;
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(to_tf32(left[k])), "r"(to_tf32(left[k + 8 * kS])), "r"(to_tf32(left[k + 4])), "r"(to_tf32(left[k + 4 + 8 * kS])), "r"(to_tf32(right[0])),
                       "r"(to_tf32(right[4 * (kIsSecond ? kScratchStride : kS)])));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (kIsSecond) *reinterpret_cast<float2 *>(a + (row + 8 * half) * kS + top + col + 2 * t) = make_float2(-d[2 * half], -d[2 * half + 1]);
        else *reinterpret_cast<float2 *>(scratch + (row + 8 * half) * kScratchStride + col + 2 * t) = make_float2(d[2 * half], d[2 * half + 1]);
    }
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
    multiply_blocks<16, false>(a, scratch);
    __syncthreads();
    multiply_blocks<16, true>(a, scratch);
    __syncthreads();
    multiply_blocks<32, false>(a, scratch);
    __syncthreads();
    multiply_blocks<32, true>(a, scratch);
    __syncthreads();
}

__device__ __forceinline__ float exp_of_two(float x) {
    float v;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}

// By two warps: G, as a power of two, and beta of a chunk's tokens.
__device__ __forceinline__ void put_decays(const DeltaArguments &d, int64_t token, int n, int h, float *decay, float *beta) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (warp == 0) {
        float x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            x[i] = lane + 32 * i < n ? 1.4426950408889634f * log_decay(d, token + lane + 32 * i, h) : 0.0f;
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

}  // namespace
}  // namespace pk
