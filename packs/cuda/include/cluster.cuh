// Where a block stands in its cluster.
#pragma once
#include <cstdint>

namespace pk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ __forceinline__ int cluster_rank() {
    int v;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
    return v;
}
__device__ __forceinline__ int cluster_blocks() {
    int v;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(v));
    return v;
}
// The place of a block's shared memory in that of another one.
__device__ __forceinline__ uint32_t address_at(uint32_t shared, int rank) {
    uint32_t v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(shared), "r"(rank));
    return v;
}
#endif

}  // namespace pk
