// Keys and values as pages of the one-row launch keep them, and as its products take them: BF16, F16, or FP8 (e4m3) that becomes f16 in registers.
#pragma once
#include "../attention.cuh"
#include "../half.cuh"

namespace pk::persist {

enum Pages { kInBf16, kInFp8, kInF16 };

template <Pages kPages>
struct Kept {
    static constexpr bool kIsF16 = kPages != kInBf16;
    static __device__ __forceinline__ uint32_t pack(float x, float y) { return kIsF16 ? pair_f16(x, y) : pack_bf16(x, y); }
    // Of what may lie beyond the range. FP8's scales see to it that nothing does.
    static __device__ __forceinline__ uint32_t keep(float x, float y) { return kPages == kInF16 ? pack_f16(x, y) : pack(x, y); }
    static __device__ __forceinline__ float2 unpack(uint32_t v) { return kIsF16 ? unpack_f16(v) : make_float2(low_f32(v), high_f32(v)); }
    static __device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
        if constexpr (kIsF16) mma_f16(d, a0, a1, a2, a3, b0, b1);
        else mma_bf16(d, a0, a1, a2, a3, b0, b1);
    }
};

// Two e4m3 of the low or the high half of a word as f16.
__device__ __forceinline__ uint32_t widened(uint32_t word, int high) {
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(high ? word >> 16 : word & 0xffff), __NV_E4M3);
    return *reinterpret_cast<const uint32_t *>(&h);
}
// Four neighbours as they are kept.
__device__ __forceinline__ uint32_t narrowed(const float (&v)[4]) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0], v[1]), __NV_SATFINITE, __NV_E4M3), high = __nv_cvt_float2_to_fp8x2(make_float2(v[2], v[3]), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

}  // namespace pk::persist
