// The second half of a norm between flat products (skinny.cuh, HalfNorm).
#pragma once
#include "device.cuh"
#include "skinny.cuh"

namespace pk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What the sums of rows of x are multiplied by: 1 / rms, or one where no norm is left over. Two warps, each adds half of the squares.
template <int kNT>
__device__ __forceinline__ void row_factors(const HalfNorm &norm, int mine, int lane, float (&sums)[2][kNT], float (&factors)[kNT]) {
    asm volatile("" : "+r"(mine), "+r"(lane));  // nothing of what follows is made ahead
    lane &= 31;
    if (norm.row_squares == nullptr) {
#pragma unroll 1
        for (int n = lane + 32 * mine; n < kNT; n += 64) factors[n] = 1.0f;
        __syncwarp();
        return;
    }
    constexpr int kQuads = kNT / 4, kAtOnce = 32 / kQuads;
    const int quad = lane % kQuads, n_squares = norm.n_cols / 16;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (4 * quad < norm.stride) {
        const float *from = norm.row_squares + 4 * quad;
#pragma unroll 2
        for (int p = mine + 2 * (lane / kQuads); p < n_squares; p += 2 * kAtOnce) {
            const float4 v = __ldcg(reinterpret_cast<const float4 *>(from + p * norm.stride));
            sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
        }
    }
#pragma unroll
    for (int far = kQuads; far < 32; far *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, far);
        sum.y += __shfl_xor_sync(~0u, sum.y, far);
        sum.z += __shfl_xor_sync(~0u, sum.z, far);
        sum.w += __shfl_xor_sync(~0u, sum.w, far);
    }
    if (lane < kQuads) *reinterpret_cast<float4 *>(&sums[mine][4 * quad]) = sum;
    asm volatile("bar.sync 2, 64;" ::: "memory");
#pragma unroll 1
    for (int n = lane + 32 * mine; n < kNT; n += 64) factors[n] = rsqrtf(__fdividef(sums[0][n] + sums[1][n], static_cast<float>(norm.n_cols)) + norm.eps);
    __syncwarp();
}
#endif

}  // namespace pk
