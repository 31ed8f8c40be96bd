// What the attention kernels share: arguments, paged loads into swizzled shared memory, the mask.
#pragma once
#include "device.cuh"

namespace pk {

struct ShareHead;
struct ShareRow;
struct ShareGroup;

struct AttentionArguments {
    const void *q;
    void *out;
    const float *sinks, *gains;  // of every head, or null
    const StepInfo *info;
    const int32_t *row_slot, *row_start, *row_position, *row_flags, *token_row, *page_table;
    const uint8_t *kv;
    float *partial;     // per slot [16][width] of O, then [16][2]: largest logit (base 2) and sum
    int32_t *counters;  // zero between launches
    int64_t q_stride, out_stride, page_stride, k_offset, v_offset;
    int32_t q_format, out_format, kv_format;
    int32_t n_heads, n_kv_heads, head_width, v_width, window, page_tokens, page_shift, slot_pages, max_rows, is_bidirectional;
    float scale, softcap;
    // Shared prefixes (attention_share.cuh), or null: what rows share, and the partial sums of it: rows of the padded width, largest logit and sum.
    const ShareHead *share_head;
    const ShareRow *share_rows;
    const ShareGroup *share_groups;
    const int32_t *share_members;
    float *share_part;
    float2 *share_ml;
    int32_t share_width;
};

constexpr float kLog2e = 1.4426950408889634f;

// The page of a position; page_shift is -1 when pages do not hold a power of two.
__device__ __forceinline__ int page_of(const AttentionArguments &a, int p) { return a.page_shift >= 0 ? p >> a.page_shift : p / a.page_tokens; }

__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rows of at most 16 (token, head) pairs per KV head, and single tokens, belong to the decode kernel; others to prefill.
__device__ __forceinline__ bool is_decode_row(int n_tokens, int group) { return n_tokens == 1 || n_tokens * group <= 16; }

// Bytes of a row of kD bf16 in shared memory; the 16-byte pieces of row r are permuted by r.
template <int kD>
constexpr int kRowBytes = (kD * 2 + 127) / 128 * 128;
template <int kD>
__device__ __forceinline__ uint32_t piece_offset(int row, int piece) {
    return row * kRowBytes<kD> + ((piece ^ (row & 7)) << 4);
}

// Eight neighbours of a KV row as bf16.
__device__ __forceinline__ uint4 load_kv8(const uint8_t *base, int64_t element, int32_t format) {
    float v[8];
    if (format == PK_FP8_E4M3) {
        const uint2 w = *reinterpret_cast<const uint2 *>(base + element);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t word = i < 2 ? w.x : w.y;
            const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(word >> (16 * (i & 1)) & 0xffff), __NV_E4M3);
            const float2 f = __half22float2(*reinterpret_cast<const __half2 *>(&h));
            v[2 * i] = f.x;
            v[2 * i + 1] = f.y;
        }
    } else if (format == PK_F16) {
        const uint4 w = *reinterpret_cast<const uint4 *>(base + element * 2);
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 f = __half22float2(*reinterpret_cast<const __half2 *>(&words[i]));
            v[2 * i] = f.x;
            v[2 * i + 1] = f.y;
        }
    } else {
        load8(base, element, format, v);
    }
    return pack8(v);
}

// Two neighbours of a q or out row. Rows with an odd stride are not aligned to pairs.
__device__ __forceinline__ uint32_t load_q_pair(const AttentionArguments &a, int64_t at) {
    if (a.q_format == PK_BF16 && (a.q_stride & 1) == 0) return *reinterpret_cast<const uint32_t *>(static_cast<const bf16 *>(a.q) + at);
    return pack_bf16(load_as_f32(a.q, at, a.q_format), load_as_f32(a.q, at + 1, a.q_format));
}
__device__ __forceinline__ void store_out_pair(const AttentionArguments &a, int64_t at, float x, float y) {
    if (a.out_format == PK_BF16 && (a.out_stride & 1) == 0) {
        *reinterpret_cast<uint32_t *>(static_cast<bf16 *>(a.out) + at) = pack_bf16(x, y);
    } else {
        store_from_f32(a.out, at, a.out_format, x);
        store_from_f32(a.out, at + 1, a.out_format, y);
    }
}

// What a head's sums of values are multiplied by beside 1 / the sum of weights.
__device__ __forceinline__ float gain_of(const AttentionArguments &a, int head) { return a.gains != nullptr ? __ldg(a.gains + head) : 1.0f; }

// Dead rows see nothing: their outputs are zero.
__device__ __forceinline__ void clear_dead_rows(const AttentionArguments &a) {
    const int width = a.n_heads * a.v_width;
    for (int t = blockIdx.x; t < a.info->n_tokens; t += gridDim.x) {
        if (!(a.row_flags[a.token_row[t]] & PK_ROW_DEAD)) continue;
        for (int i = threadIdx.x; i < width; i += blockDim.x) store_from_f32(a.out, t * a.out_stride + i, a.out_format, 0.0f);
    }
}

// Tiles of kPairs (token, head) pairs of a row that belongs to the prefill kernels.
template <int kPairs>
__device__ __forceinline__ int tiles_of(const AttentionArguments &a, int r) {
    const int n = a.row_start[r + 1] - a.row_start[r], group = a.n_heads / a.n_kv_heads;
    if (is_decode_row(n, group) || (a.row_flags[r] & PK_ROW_DEAD)) return 0;
    return (n * group + kPairs - 1) / kPairs;
}

// Inclusive sum over a block; `warps` holds an int per warp.
__device__ __forceinline__ int block_scan(int v, int *warps) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int o = 1; o < 32; o <<= 1) {
        const int up = __shfl_up_sync(~0u, v, o);
        if (lane >= o) v += up;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = v;
    __syncthreads();
    for (int i = 0; i < warp; ++i) v += warps[i];
    return v;
}

// d[16,8] += a[16,16] b[16,8], f16 operands.
__device__ __forceinline__ void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Logit in base 2 of a raw score.
__device__ __forceinline__ float logit2(float s, float scale, float softcap) {
    s *= scale;
    if (softcap > 0.0f) s = softcap * quick_tanh(s / softcap);
    return s * kLog2e;
}

// The same for a fragment of raw scores: one decision for all of them.
template <int kN>
__device__ __forceinline__ void logits2(float *s, float scale, float softcap) {
    if (softcap > 0.0f) {
        const float in = scale / softcap, out = softcap * kLog2e;
#pragma unroll
        for (int i = 0; i < kN; ++i) s[i] = out * quick_tanh(s[i] * in);
    } else {
        const float f = scale * kLog2e;
#pragma unroll
        for (int i = 0; i < kN; ++i) s[i] *= f;
    }
}

}  // namespace pk
