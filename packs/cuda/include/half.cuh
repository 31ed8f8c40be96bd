// F16 as queries, keys and values are kept in it: what lies beyond its range becomes its largest number, not infinity.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

namespace pk {

__device__ __forceinline__ float in_f16(float v) { return v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v; }
__device__ __forceinline__ uint32_t pair_f16(float low, float high) {  // both within the range
    const __half2 h = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&h);
}
__device__ __forceinline__ uint32_t pack_f16(float low, float high) { return pair_f16(in_f16(low), in_f16(high)); }
__device__ __forceinline__ float2 unpack_f16(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2 *>(&pair)); }

}  // namespace pk
