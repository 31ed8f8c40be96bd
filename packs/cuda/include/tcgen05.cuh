// Blackwell's tensor memory and its products (sm_100, sm_103): tcgen05. UNVALIDATED: nobody has run this on such a card.
//
// Tensor memory is 128 lanes x 512 columns of 32 bits; an address is lane << 16 | column. A warp reads the 32 lanes of its
// number modulo four. Source: PTX ISA 9.0, 9.7.16 (tcgen05).
#pragma once
#include "device.cuh"

namespace pk {

#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ == 1000
#define PK_TCGEN05_DEVICE

// The whole warp calls these two. The address of all 512 columns is written to shared memory.
__device__ __forceinline__ void tensor_memory_take(uint32_t *where) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 512;" ::"r"(shared_address(where)) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}
__device__ __forceinline__ void tensor_memory_give(uint32_t address) { asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 512;" ::"r"(address)); }

__device__ __forceinline__ void tensor_fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void tensor_fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// Rows of 128 bytes, swizzled by 128, groups of eight rows 1024 bytes apart: version 1, layout 2.
__device__ __forceinline__ uint64_t tensor_descriptor(uint32_t shared) {
    return (uint64_t{2} << 61) | (uint64_t{1} << 46) | (uint64_t{64} << 32) | (uint64_t{1} << 16) | ((shared & 0x3ffff) >> 4);
}
// d F32, a and b BF16 or E4M3, both with K contiguous.
template <bool kFp8, int kM, int kN>
constexpr uint32_t kTensorKind = 1u << 4 | (kFp8 ? 0u : 1u << 7 | 1u << 10) | (kN / 8) << 17 | (kM / 16) << 24;

// d[kM, kN] (+)= a[kM, 32 bytes] b[kN, 32 bytes]^T by one thread.
template <bool kFp8, int kM, int kN>
__device__ __forceinline__ void tensor_mma(uint32_t d, uint64_t a, uint64_t b, bool accumulate) {
    constexpr uint32_t kKind = kTensorKind<kFp8, kM, kN>;
    if constexpr (kFp8)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\ntcgen05.mma.cta_group::1.kind::f8f6f4 [%0], %1, %2, %3, p;\n}\n" ::"r"(d), "l"(a), "l"(b), "r"(kKind), "r"(accumulate ? 1 : 0) : "memory");
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\ntcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(d), "l"(a), "l"(b), "r"(kKind), "r"(accumulate ? 1 : 0) : "memory");
}
// The barrier gets an arrival when the products that this thread has issued are done.
__device__ __forceinline__ void tensor_commit(uint64_t *barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Sixteen columns of this thread's lane.
__device__ __forceinline__ void tensor_load16(float (&v)[16], uint32_t address) {
    uint32_t r[16];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]), "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15])
                 : "r"(address));
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = __uint_as_float(r[i]);
}
// Loads have arrived: their registers may be read after this only.
__device__ __forceinline__ void tensor_wait(float (&v)[16], float (&u)[16]) {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(v[i]), "+f"(u[i])::"memory");
}
#endif

}  // namespace pk
