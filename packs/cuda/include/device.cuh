// Device vocabulary: conversions, loads of 8 elements, reductions, mma, cp.async, programmatic dependence.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include "../../pack.h"
#include "context.h"

namespace pk {

using bf16 = __nv_bfloat16;
using bf162 = __nv_bfloat162;

// Waits for the kernels before this one and lets the next one start its prologue. Every block of every kernel calls it
// before it reads or writes anything that another kernel touches.
__device__ __forceinline__ void wait_dependence() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void release_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ int rows_of(const StepInfo *info, int64_t rows) {
    return rows == PK_ROWS_T ? info->n_tokens : rows == PK_ROWS_S ? info->n_samples : static_cast<int>(rows);
}

__device__ __forceinline__ uint32_t bits(bf162 v) { return *reinterpret_cast<uint32_t *>(&v); }
__device__ __forceinline__ bf162 as_bf162(uint32_t v) { return *reinterpret_cast<bf162 *>(&v); }
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) { return bits(__floats2bfloat162_rn(low, high)); }
__device__ __forceinline__ float low_f32(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_f32(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float e4m3_to_f32(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }
__device__ __forceinline__ float e5m2_to_f32(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E5M2))); }

__device__ __forceinline__ float load_as_f32(const void *base, int64_t i, int32_t format) {
    switch (format) {
        case PK_F32: return static_cast<const float *>(base)[i];
        case PK_F16: return __half2float(static_cast<const __half *>(base)[i]);
        case PK_BF16: return __bfloat162float(static_cast<const bf16 *>(base)[i]);
        case PK_FP8_E4M3: return e4m3_to_f32(static_cast<const uint8_t *>(base)[i]);
        default: return e5m2_to_f32(static_cast<const uint8_t *>(base)[i]);
    }
}
__device__ __forceinline__ void store_from_f32(void *base, int64_t i, int32_t format, float v) {
    switch (format) {
        case PK_F32: static_cast<float *>(base)[i] = v; break;
        case PK_F16: static_cast<__half *>(base)[i] = __float2half(v); break;
        case PK_BF16: static_cast<bf16 *>(base)[i] = __float2bfloat16(v); break;
        case PK_FP8_E4M3: static_cast<uint8_t *>(base)[i] = __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3); break;
        default: static_cast<uint8_t *>(base)[i] = __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E5M2); break;
    }
}

// Eight neighbours, 16- or 32-byte aligned, F32 or BF16.
__device__ __forceinline__ void load8(const void *base, int64_t i, int32_t format, float (&v)[8]) {
    if (format == PK_F32) {
        const float4 *p = reinterpret_cast<const float4 *>(static_cast<const float *>(base) + i);
        float4 a = p[0], b = p[1];
        v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
    } else {
        uint4 a = *reinterpret_cast<const uint4 *>(static_cast<const bf16 *>(base) + i);
        v[0] = low_f32(a.x); v[1] = high_f32(a.x); v[2] = low_f32(a.y); v[3] = high_f32(a.y);
        v[4] = low_f32(a.z); v[5] = high_f32(a.z); v[6] = low_f32(a.w); v[7] = high_f32(a.w);
    }
}
__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}
__device__ __forceinline__ void store8(void *base, int64_t i, int32_t format, const float (&v)[8]) {
    if (format == PK_F32) {
        float4 *p = reinterpret_cast<float4 *>(static_cast<float *>(base) + i);
        p[0] = make_float4(v[0], v[1], v[2], v[3]);
        p[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        *reinterpret_cast<uint4 *>(static_cast<bf16 *>(base) + i) = pack8(v);
    }
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
// Sum over the block; every thread gets it. `shared` holds 33 floats.
__device__ __forceinline__ float block_sum(float v, float *shared) {
    v = warp_sum(v);
    int warp = threadIdx.x >> 5, n = (blockDim.x + 31) >> 5;
    if (n == 1) return v;
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[warp] = v;
    __syncthreads();
    if (warp == 0) {
        float s = warp_sum((threadIdx.x & 31) < n ? shared[threadIdx.x & 31] : 0.0f);
        if (threadIdx.x == 0) shared[32] = s;
    }
    __syncthreads();
    return shared[32];
}

// tanh by one exponential: a tenth of the code of tanhf, absolute error below 1e-6.
__device__ __forceinline__ float quick_tanh(float x) { return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * fminf(x, 40.0f))); }

__device__ __forceinline__ float activate(float v, int32_t act) {
    switch (act) {
        case PK_ACT_SILU: return v / (1.0f + __expf(-v));
        case PK_ACT_GELU_TANH: return 0.5f * v * (1.0f + quick_tanh(0.7978845608028654f * (v + 0.044715f * v * v * v)));
        case PK_ACT_GELU_ERF: return 0.5f * v * (1.0f + erff(v * 0.7071067811865476f));
        case PK_ACT_RELU2: return v > 0.0f ? v * v : 0.0f;
        default: return v;
    }
}

__device__ __forceinline__ uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void copy16_async(uint32_t shared, const void *global, bool is_valid) {
    int n = is_valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(n) : "memory");
}
__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrix4(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared));
}
__device__ __forceinline__ void load_matrix4_transposed(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared));
}
// d[16,8] += a[16,16] b[16,8], bf16 operands.
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load_stream(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_stream2(const void *p) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t load_stream1(const void *p) {
    uint32_t v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

}  // namespace pk
