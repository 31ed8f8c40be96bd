// Copies of what a launch reads once (weights): the first to leave the second-level cache, so that what everybody reads stays there: x, sums, and the code of
// this launch's end and of the next, which would come from memory behind the weights.
#pragma once
#include "wgmma.cuh"

namespace pk {

constexpr uint64_t kReadOnce = 0x12f0000000000000, kReadOften = 0x1000000000000000;  // policies: evict first, evict normally

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// As copy_bytes and copy_box_at.
__device__ __forceinline__ void copy_bytes_once(uint32_t shared, const void *global, int bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared), "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(kReadOnce) : "memory");
}
__device__ __forceinline__ void copy_box_once(uint32_t shared, const CUtensorMap *map, int x, int y, uint64_t *barrier, uint64_t policy = kReadOnce) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "l"(policy)
                 : "memory");
}
#endif

}  // namespace pk
