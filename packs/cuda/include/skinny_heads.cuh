// Queries, keys and values where their product ends: normed, rotated and written to where they are wanted (skinny.cuh, Heads).
#pragma once
#include "device.cuh"
#include "skinny.cuh"

namespace pk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Eight rows of x, from 8 j on, of a tile of 128 rows of W from `first` on, which is a head. from(part, s): what a block left of 16
// rows of W, a float4 a lane: rows (lane >> 2) and 8 more, columns 2 (lane & 3) and the next. A warp.
template <class From>
__device__ __forceinline__ void write_head(const SkinnyArguments &a, const SkinnyWeight &w, int first, int j, int lane, int n_rows, const float *factors, int n_parts, const From &from) {
    const HeadsEnd &e = a.heads;
    const int n0 = 8 * j + 2 * (lane & 3), head = (w.first_column + first) >> 7;
    const bool is_q = head < e.n_heads, is_v = head >= e.n_heads + e.n_kv_heads;
    float v[2][8][2] = {};  // of x's row n0 and the next: 16 rows of W apart, and 8
#pragma unroll 2
    for (int part = 0; part < n_parts; ++part)
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const float4 p = __ldcg(from(part, s));
            v[0][s][0] += p.x; v[1][s][0] += p.y; v[0][s][1] += p.z; v[1][s][1] += p.w;
        }
    const float *norm = is_q ? e.q_norm : is_v ? e.v_norm : e.k_norm;
    int position[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) position[i] = n0 + i < n_rows ? __ldg(e.position + n0 + i) : 0;
    float square[2] = {};
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first + 16 * s + 8 * h + (lane >> 2);
            const float f = w.scale * a.scale * (w.row_scale ? w.row_scale[row] : 1.0f), b = w.bias ? w.bias[row] * a.scale : 0.0f;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                v[i][s][h] = v[i][s][h] * (f * factors[n0 + i]) + b;
                square[i] += v[i][s][h] * v[i][s][h];
            }
        }
    if (norm != nullptr) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int far = 4; far < 32; far *= 2) square[i] += __shfl_xor_sync(~0u, square[i], far);
            square[i] = rsqrtf(square[i] / 128 + e.eps);
        }
#pragma unroll
        for (int s = 0; s < 8; ++s)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float gain = __ldg(norm + 16 * s + 8 * h + (lane >> 2));
                v[0][s][h] *= square[0] * gain;
                v[1][s][h] *= square[1] * gain;
            }
    }
    if (!is_v && e.frequency != nullptr) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            float x[8][2];
#pragma unroll
            for (int s = 0; s < 8; ++s)
#pragma unroll
                for (int h = 0; h < 2; ++h) x[s][h] = i ? v[1][s][h] : v[0][s][h];
#pragma unroll
            for (int s = 0; s < 4; ++s)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float sine, cosine;
                    sincosf(static_cast<float>(i ? position[1] : position[0]) * __ldg(e.frequency + 16 * s + 8 * h + (lane >> 2)), &sine, &cosine);
                    sine *= e.magnitude;
                    cosine *= e.magnitude;
                    const float low = x[s][h], high = x[s + 4][h];
                    x[s][h] = low * cosine - high * sine;
                    x[s + 4][h] = low * sine + high * cosine;
                }
#pragma unroll
            for (int s = 0; s < 8; ++s)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (i) v[1][s][h] = x[s][h];
                    else v[0][s][h] = x[s][h];
                }
        }
    }
    const float gain = e.gains != nullptr ? __ldg(e.gains + head) : 1.0f;
    // Lanes four apart have neighbouring rows of W: the even one takes both of x's first row, the odd one both of the next.
    const bool odd = lane & 4;
    const int n = n0 + odd, p = odd ? position[1] : position[0], kv_head = head - e.n_heads - (is_v ? e.n_kv_heads : 0);
    const int column = (lane >> 2) & 6;
    uint8_t *to;
    if (is_q) to = static_cast<uint8_t *>(e.q) + (n * e.q_stride + (static_cast<int64_t>(head) << 7)) * 2;
    else to = e.kv + (n < n_rows ? __ldg(e.page + n) : 0) * e.page_stride + (is_v ? e.v_offset : e.k_offset) + ((static_cast<int64_t>(kv_head) * e.page_tokens + p % e.page_tokens) << 7) * (e.kv_format == PK_BF16 ? 2 : 1);
    const bool is_wide = is_q || e.kv_format == PK_BF16;
#pragma unroll
    for (int s = 0; s < 8; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float other = __shfl_xor_sync(~0u, odd ? v[0][s][h] : v[1][s][h], 4), low = gain * (odd ? other : v[0][s][h]), high = gain * (odd ? v[1][s][h] : other);
            const int at = 16 * s + 8 * h + column;
            if (n >= n_rows) continue;
            if (is_wide) *reinterpret_cast<uint32_t *>(to + 2 * at) = pack_bf16(low, high);
            else *reinterpret_cast<uint16_t *>(to + at) = __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
        }
}
#endif

}  // namespace pk
