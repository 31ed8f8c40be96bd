// A row's 128 columns to e4m3, as src/matmul/quantise.cu does, by a warp that has four of them a lane.
#pragma once
#include "device.cuh"

namespace pk {

// Rounded to bf16 first, as a product would find them.
__device__ __forceinline__ uint32_t codes_of_row(float4 v, float &scale) {
    const uint32_t low = pack_bf16(v.x, v.y), high = pack_bf16(v.z, v.w);
    const float own = fmaxf(fmaxf(fabsf(low_f32(low)), fabsf(high_f32(low))), fmaxf(fabsf(low_f32(high)), fabsf(high_f32(high))));
    const float most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(own)));  // in the order of their bits: none is negative
    scale = most > 0.0f ? most / 448.0f : 1.0f;
    const float inverse = 1.0f / scale;
    auto codes = [&](uint32_t pair) { return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(low_f32(pair) * inverse, high_f32(pair) * inverse), __NV_SATFINITE, __NV_E4M3)); };
    return codes(low) | codes(high) << 16;
}

}  // namespace pk
