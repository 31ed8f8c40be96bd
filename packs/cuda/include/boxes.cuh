// Tensor copies of more than two dimensions: what a stage of a ring takes in one instruction of the copy engine, which counts them (LOG.md, M30, M46).
#pragma once
#include "once.cuh"

namespace pk {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Of x: columns of 64, the first of them `column`, all rows.
__device__ __forceinline__ void copy_columns(uint32_t to, const CUtensorMap *map, int column, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, 0, %3}], [%2];" ::"r"(to), "l"(map), "r"(shared_address(barrier)), "r"(column) : "memory");
}
// Of weights, the first to leave the second-level cache: chunks of 128 bytes of groups of eight rows.
__device__ __forceinline__ void copy_groups_once(uint32_t to, const CUtensorMap *map, int row, int chunk, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {0, %3, %4, 0}], [%2], %5;" ::"r"(to), "l"(map), "r"(shared_address(barrier)), "r"(row), "r"(chunk), "l"(kReadOnce) : "memory");
}
#endif

}  // namespace pk
