// What compute-sanitizer says of hand-overs that PTX allows: each way by itself, in the form that the kernels use and in one that has every thread meet.
//
// Usage: nvcc -arch=sm_90a -o race packs/cuda/probe/race.cu; compute-sanitizer --tool racecheck ./race WAY (or synccheck). Prints whether what was read is what was written.
// A warp of writers stores numbers in shared memory, a warp of readers adds them up, over and over in the same place. LOG.md has what was seen.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

constexpr int kRounds = 64, kThreads = 512, kWriters = 128, kPart = 256;

__device__ __forceinline__ uint32_t address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void make_barrier(uint64_t *b, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(b)), "r"(count) : "memory"); }
__device__ __forceinline__ void arrive(uint64_t *b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(b)) : "memory"); }
__device__ __forceinline__ void wait(uint64_t *b, int parity) {
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(address(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void meet(int name, int n) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(n) : "memory"); }
__device__ __forceinline__ void tell(int name, int n) { asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(n) : "memory"); }

// kElected: one lane arrives behind a __syncwarp; else all 32 do.
template <bool kElected>
__global__ void mbarriers(uint32_t *out) {
    __shared__ uint32_t numbers[32];
    __shared__ uint64_t full, empty;
    const int lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        make_barrier(&full, kElected ? 1 : 32);
        make_barrier(&empty, kElected ? 1 : 32);
    }
    __syncthreads();
    auto hand_over = [&](uint64_t *b) {
        if constexpr (kElected) {
            __syncwarp();
            if (lane == 0) arrive(b);
        } else {
            arrive(b);
        }
    };
    uint32_t sum = 0;
    for (int i = 0; i < kRounds; ++i) {
        if (threadIdx.x < 32) {
            if (i > 0) wait(&empty, (i - 1) & 1);
            numbers[lane] = 1000 * i + lane;
            hand_over(&full);
        } else {
            wait(&full, i & 1);
            sum += numbers[lane ^ 5];
            hand_over(&empty);
        }
    }
    if (threadIdx.x >= 32) atomicAdd(out, sum);
}

// The first kPart of a block's threads hand over by named barriers: both sides wait (kTells false), or readers tell and go on. kWhole: by barriers of the whole block.
template <bool kTells, bool kWhole>
__global__ void named(uint32_t *out) {
    __shared__ uint32_t numbers[kWriters];
    const int tid = threadIdx.x;
    if (!kWhole && tid >= kPart) return;
    uint32_t sum = 0;
    for (int i = 0; i < kRounds; ++i) {
        if (tid < kWriters) numbers[tid] = 1000 * i + tid;
        if constexpr (kWhole) {
            __syncthreads();
        } else if (tid < kWriters && kTells) {
            tell(1, kPart);
        } else {
            meet(1, kPart);
        }
        if (tid >= kWriters && tid < kPart) sum += numbers[(tid - kWriters) ^ 5];
        if constexpr (kWhole) {
            __syncthreads();
        } else if (tid >= kWriters && kTells) {
            tell(2, kPart);
        } else {
            meet(2, kPart);
        }
    }
    if (tid >= kWriters && tid < kPart) atomicAdd(out, sum);
}

// As named<false, false>, with the block's other warps at its cluster's barrier meanwhile.
__global__ void __cluster_dims__(2) idle(uint32_t *out) {
    __shared__ uint32_t numbers[kWriters];
    const int tid = threadIdx.x;
    if (tid < kPart) {
        uint32_t sum = 0;
        for (int i = 0; i < kRounds; ++i) {
            if (tid < kWriters) numbers[tid] = 1000 * i + tid;
            meet(1, kPart);
            if (tid >= kWriters) sum += numbers[(tid - kWriters) ^ 5];
            meet(2, kPart);
        }
        if (tid >= kWriters && blockIdx.x == 0) atomicAdd(out, sum);
    }
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

int main(int n, char **words) {
    const char *way = n > 1 ? words[1] : "";
    uint32_t *out = nullptr, found = 0;
    cudaMalloc(&out, 4);
    cudaMemset(out, 0, 4);
    uint64_t n_readers = kWriters;
    if (!strcmp(way, "elected") || !strcmp(way, "all")) {
        n_readers = 32;
        if (way[0] == 'e') mbarriers<true><<<1, 64>>>(out);
        else mbarriers<false><<<1, 64>>>(out);
    } else if (!strcmp(way, "part")) named<false, false><<<1, kThreads>>>(out);
    else if (!strcmp(way, "telling")) named<true, false><<<1, kThreads>>>(out);
    else if (!strcmp(way, "whole")) named<false, true><<<1, kThreads>>>(out);
    else if (!strcmp(way, "idle")) idle<<<2, kThreads>>>(out);
    else return fprintf(stderr, "elected, all, part, telling, whole or idle\n"), 2;
    const cudaError_t e = cudaMemcpy(&found, out, 4, cudaMemcpyDeviceToHost);
    uint32_t wanted = 0;
    for (int i = 0; i < kRounds; ++i)
        for (uint32_t r = 0; r < n_readers; ++r) wanted += 1000 * i + r;
    printf("%s: %s, %s\n", way, cudaGetErrorString(e), found == wanted ? "right" : "WRONG");
    return e != cudaSuccess || found != wanted;
}
