// Rings of stages that tensor copies fill: their barriers, and where a producer or a consumer is.
#pragma once
#include "wgmma.cuh"

namespace pk {

template <int kStages>
struct RingTurn {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// One thread: a stage is full when its bytes are there, empty when so many have told.
template <int kStages>
__device__ __forceinline__ void init_ring(uint64_t (&full)[kStages], uint64_t (&empty)[kStages], int n_consumers) {
    for (int i = 0; i < kStages; ++i) {
        barrier_init(full + i, 1);
        barrier_init(empty + i, n_consumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
#endif

}  // namespace pk
