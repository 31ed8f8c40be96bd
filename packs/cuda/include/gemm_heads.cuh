// What clusters of blocks do beside their products (skinny.cuh): they multiply by what a norm left (HalfNorm), and queries, keys and
// values are normed, rotated and written to where they are wanted (HeadsEnd).
#pragma once
#include "device.cuh"
#include "gemm.cuh"
#include "turn.cuh"

namespace pk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What the sums of 128 rows of x are multiplied by: 1 / rms. Two warps, each adds half of the squares, of 64 columns each.
__device__ __forceinline__ void tile_factors(const HalfNorm &norm, int mine, int lane, float (&sums)[2][128], float (&factors)[128]) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (4 * lane < norm.stride) {
#pragma unroll 4
        for (int p = mine; p < norm.n_cols / 64; p += 2) {
            const float4 v = __ldcg(reinterpret_cast<const float4 *>(norm.row_squares + p * norm.stride) + lane);
            sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
        }
    }
    *reinterpret_cast<float4 *>(&sums[mine][4 * lane]) = sum;
    asm volatile("bar.sync 2, 64;" ::: "memory");
    for (int n = lane + 32 * mine; n < 128; n += 64) factors[n] = rsqrtf((sums[0][n] + sums[1][n]) / norm.n_cols + norm.eps);
    __syncwarp();
}

// A row of x of a head: lane c of four has columns 8 j + 2 c and the next of 128.
__device__ __forceinline__ void store_head(const GemmArguments &a, int head, int row, int c, int n_rows, float (&v)[16][2]) {
    const HeadsEnd &e = a.heads;
    const bool is_q = head < e.n_heads, is_v = head >= e.n_heads + e.n_kv_heads, is_in = row < n_rows;
    const float *norm = is_q ? e.q_norm : is_v ? e.v_norm : e.k_norm;
    const int position = is_in ? __ldg(e.position + row) : 0;
    if (norm != nullptr) {
        float square = 0.0f;
#pragma unroll
        for (int j = 0; j < 16; ++j) square += v[j][0] * v[j][0] + v[j][1] * v[j][1];
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        const float r = rsqrtf(square / 128 + e.eps);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float2 gain = __ldg(reinterpret_cast<const float2 *>(norm + 8 * j + 2 * c));
            v[j][0] *= r * gain.x;
            v[j][1] *= r * gain.y;
        }
    }
    if (!is_v && e.frequency != nullptr) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 frequency = __ldg(reinterpret_cast<const float2 *>(e.frequency + 8 * j + 2 * c));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float sine, cosine;
                turn(static_cast<float>(position) * (i ? frequency.y : frequency.x), &sine, &cosine);
                sine *= e.magnitude;
                cosine *= e.magnitude;
                const float low = v[j][i], high = v[j + 8][i];
                v[j][i] = low * cosine - high * sine;
                v[j + 8][i] = low * sine + high * cosine;
            }
        }
    }
    if (!is_in) return;
    if (e.gains != nullptr) {
        const float gain = __ldg(e.gains + head);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            v[j][0] *= gain;
            v[j][1] *= gain;
        }
    }
    if (is_q || e.kv_format == PK_BF16) {
        uint8_t *to = is_q ? static_cast<uint8_t *>(e.q) + (row * e.q_stride + (static_cast<int64_t>(head) << 7)) * 2
                           : e.kv + __ldg(e.page + row) * e.page_stride + (is_v ? e.v_offset : e.k_offset) + ((static_cast<int64_t>(head - e.n_heads - (is_v ? e.n_kv_heads : 0)) * e.page_tokens + position % e.page_tokens) << 8);
#pragma unroll
        for (int j = 0; j < 16; ++j) *reinterpret_cast<uint32_t *>(to + 16 * j + 4 * c) = pack_bf16(v[j][0], v[j][1]);
        return;
    }
    uint8_t *to = e.kv + __ldg(e.page + row) * e.page_stride + (is_v ? e.v_offset : e.k_offset) + ((static_cast<int64_t>(head - e.n_heads - (is_v ? e.n_kv_heads : 0)) * e.page_tokens + position % e.page_tokens) << 7);
#pragma unroll
    for (int j = 0; j < 16; ++j) *reinterpret_cast<uint16_t *>(to + 8 * j + 2 * c) = __nv_cvt_float2_to_fp8x2(make_float2(v[j][0], v[j][1]), __NV_SATFINITE, __NV_E4M3);
}
#endif

}  // namespace pk
