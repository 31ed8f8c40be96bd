// Queries, keys and values where a flat product ends (skinny.cuh, HeadsEnd): tiles of eight rows of a head and the eight 64 behind
// them, which are rotated together, so that a lane has both. What a head's norm wants beside is one number a row of x from each
// of its eight tiles: packets of a sum and the launch's number, which whoever has a tile awaits.
#pragma once
#include "device.cuh"
#include "flat_plan.h"
#include "half.cuh"
#include "turn.cuh"

namespace pk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ const float *head_norm(const HeadsEnd &e, int head) { return head < e.n_heads ? e.q_norm : head < e.n_heads + e.n_kv_heads ? e.k_norm : e.v_norm; }

// v: of rows low and low + 64 of a head, x's rows n0 and n0 + 1 each. Leaves them scaled, and their squares to whoever waits. Not is_real: nobody waits, nothing is left (flat.cuh).
__device__ __forceinline__ void begin_head(const SkinnyArguments &a, const SkinnyWeight &w, const FlatPackets &packets, int head, int tile, int row, int n0, int lane, const float *factors, uint32_t now, bool is_real, float (&v)[4]) {
    float squares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float f = w.scale * a.scale * (w.row_scale ? w.row_scale[row + 64 * h] : 1.0f), b = w.bias ? w.bias[row + 64 * h] * a.scale : 0.0f;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            v[2 * h + e] = v[2 * h + e] * (f * factors[n0 + e]) + b;
            squares[e] += v[2 * h + e] * v[2 * h + e];
        }
    }
    if (head_norm(a.heads, head) == nullptr) return;
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int far = 4; far < 32; far *= 2) squares[e] += __shfl_xor_sync(~0u, squares[e], far);
    if (lane < 4 && is_real)
        asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1,%2};" ::"l"(packets.squares + tile * kFlatRows + n0), "l"(static_cast<unsigned long long>(now) << 32 | __float_as_uint(squares[0])), "l"(static_cast<unsigned long long>(now) << 32 | __float_as_uint(squares[1])) : "memory");
}

// Where a lane's two rows of x are in their sequences, and the page of the one that it stores.
struct HeadRows {
    int position[2] = {}, page = 0;
};
__device__ __forceinline__ HeadRows head_rows(const HeadsEnd &e, int n8, int lane, int n_rows) {
    HeadRows rows;
    const int n0 = n8 + 2 * (lane & 3), n = n0 + (lane >> 2 & 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) rows.position[i] = n0 + i < n_rows ? __ldg(e.position + n0 + i) : 0;
    rows.page = n < n_rows ? __ldg(e.page + n) : 0;
    return rows;
}

// What a lane's two rows of W in a head are multiplied by, for its two rows of x.
struct HeadTurn {
    float sine[2] = {0.0f, 0.0f}, cosine[2] = {1.0f, 1.0f}, gain[2] = {1.0f, 1.0f}, own_gain = 1.0f;
};
// What of that lies in memory; nothing is made of it, so that nobody waits for it where it is asked for. frequency: negative where nothing is rotated.
struct HeadGains {
    float frequency = -1.0f, gain[2] = {1.0f, 1.0f}, own_gain = 1.0f;
};
__device__ __forceinline__ HeadGains head_gains(const HeadsEnd &e, int head, int tile, int lane) {
    HeadGains g;
    const int low = (tile & 7) * 8 + (lane >> 2);
    const float *norm = head_norm(e, head);
    if (head < e.n_heads + e.n_kv_heads && e.frequency != nullptr) g.frequency = __ldg(e.frequency + low);
#pragma unroll
    for (int h = 0; h < 2; ++h)
        if (norm != nullptr) g.gain[h] = __ldg(norm + low + 64 * h);
    if (e.gains != nullptr) g.own_gain = __ldg(e.gains + head);
    return g;
}
__device__ __forceinline__ HeadTurn head_turn(const HeadsEnd &e, const HeadRows &rows, const HeadGains &g) {
    HeadTurn t;
    if (g.frequency >= 0.0f) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float s, c;
            turn(static_cast<float>(rows.position[i]) * g.frequency, &s, &c);
            t.sine[i] = s * e.magnitude;
            t.cosine[i] = c * e.magnitude;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) t.gain[h] = g.gain[h];
    t.own_gain = g.own_gain;
    return t;
}

// The rest of it. A warp has eight rows of x, from n8 on. kHalf: all three are kept in F16.
template <bool kHalf>
__device__ __forceinline__ void end_head(const SkinnyArguments &a, const FlatPackets &packets, const HeadRows &rows, const HeadTurn &t, int head, int tile, int n8, int lane, int n_rows, uint32_t now, bool is_real, float (&v)[4]) {
    const HeadsEnd &e = a.heads;
    const int low = (tile & 7) * 8 + (lane >> 2), n0 = n8 + 2 * (lane & 3);
    const bool is_q = head < e.n_heads, is_v = head >= e.n_heads + e.n_kv_heads;
    if (head_norm(e, head) != nullptr) {
        // Lane 4 t + q asks for tile t's two rows.
        const unsigned long long *from = packets.squares + ((tile & ~7) + (lane >> 2)) * kFlatRows + n0;
        unsigned long long p[2];
        do asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];" : "=l"(p[0]), "=l"(p[1]) : "l"(from) : "memory");
        while (is_real && (static_cast<uint32_t>(p[0] >> 32) != now || static_cast<uint32_t>(p[1] >> 32) != now));
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float squares = __uint_as_float(static_cast<uint32_t>(p[i]));
#pragma unroll
            for (int far = 4; far < 32; far *= 2) squares += __shfl_xor_sync(~0u, squares, far);
            const float f = rsqrtf(squares / 128 + e.eps);
            v[i] *= f * t.gain[0];
            v[2 + i] *= f * t.gain[1];
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float x = v[i], y = v[2 + i];
        v[i] = x * t.cosine[i] - y * t.sine[i];
        v[2 + i] = x * t.sine[i] + y * t.cosine[i];
    }
    // Lanes four apart have neighbouring rows of W: the even one takes both of x's first row, the odd one both of the next.
    const bool odd = lane & 4;
    const int n = n0 + odd, p = odd ? rows.position[1] : rows.position[0], kv_head = head - e.n_heads - (is_v ? e.n_kv_heads : 0), at = low & ~1;
    uint8_t *to;
    if (is_q) to = static_cast<uint8_t *>(e.q) + (n * e.q_stride + (static_cast<int64_t>(head) << 7)) * 2;
    else to = e.kv + rows.page * e.page_stride + (is_v ? e.v_offset : e.k_offset) + ((static_cast<int64_t>(kv_head) * e.page_tokens + p % e.page_tokens) << 7) * (kHalf || e.kv_format == PK_BF16 ? 2 : 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float other = __shfl_xor_sync(~0u, odd ? v[2 * h] : v[2 * h + 1], 4), first = t.own_gain * (odd ? other : v[2 * h]), second = t.own_gain * (odd ? v[2 * h + 1] : other);
        if (n >= n_rows) continue;
        if constexpr (kHalf) *reinterpret_cast<uint32_t *>(to + 2 * (at + 64 * h)) = pack_f16(first, second);
        else if (is_q || e.kv_format == PK_BF16) *reinterpret_cast<uint32_t *>(to + 2 * (at + 64 * h)) = pack_bf16(first, second);
        else *reinterpret_cast<uint16_t *>(to + at + 64 * h) = __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
    }
}
#endif

}  // namespace pk
