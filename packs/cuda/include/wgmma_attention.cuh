// The wgmma shapes of attention: scores (both operands in shared memory, n = 64 or 128 positions) and values (a = weights in
// registers, b = V with its columns contiguous, n = 64 to 256 columns), for bf16 and f16 operands. sm_90a only.
//
// Fragments as in wgmma.cuh. Panels: 64 columns of 8 rows are one swizzled block of 1024 bytes; the blocks of a group of
// eight rows follow each other. Source: PTX ISA 9.0, 9.7.15.5 (shared memory matrix layouts).
#pragma once
#include "wgmma.cuh"

namespace pk {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Keeps the compiler from moving uses of an accumulator over a wait.
template <int kN>
__device__ __forceinline__ void settle(float (&d)[kN]) {
#pragma unroll
    for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// An operand in blocks of 1024 bytes: rows of k contiguous (scores), or columns contiguous (values). The low word is asked
// for once a tile and made uniform, so that a step of it costs one addition.
__device__ __forceinline__ uint32_t block_base(uint32_t shared) { return __shfl_sync(~0u, (64u << 16) | ((shared & 0x3ffff) >> 4), 0); }
template <int kPanels>
__device__ __forceinline__ uint64_t block_descriptor(uint32_t base, int bytes) {
    uint64_t d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(base + (bytes >> 4)), "n"((1 << 30) | (kPanels * 64)));
    return d;
}

#define PK_R8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define PK_R32 PK_R8(0, 1, 2, 3, 4, 5, 6, 7) ", " PK_R8(8, 9, 10, 11, 12, 13, 14, 15) ", " PK_R8(16, 17, 18, 19, 20, 21, 22, 23) ", " PK_R8(24, 25, 26, 27, 28, 29, 30, 31)
#define PK_R64 PK_R32 ", " PK_R8(32, 33, 34, 35, 36, 37, 38, 39) ", " PK_R8(40, 41, 42, 43, 44, 45, 46, 47) ", " PK_R8(48, 49, 50, 51, 52, 53, 54, 55) ", " PK_R8(56, 57, 58, 59, 60, 61, 62, 63)
#define PK_R96 PK_R64 ", " PK_R8(64, 65, 66, 67, 68, 69, 70, 71) ", " PK_R8(72, 73, 74, 75, 76, 77, 78, 79) ", " PK_R8(80, 81, 82, 83, 84, 85, 86, 87) ", " PK_R8(88, 89, 90, 91, 92, 93, 94, 95)
#define PK_R128 PK_R96 ", " PK_R8(96, 97, 98, 99, 100, 101, 102, 103) ", " PK_R8(104, 105, 106, 107, 108, 109, 110, 111) ", " PK_R8(112, 113, 114, 115, 116, 117, 118, 119) ", " PK_R8(120, 121, 122, 123, 124, 125, 126, 127)
#define PK_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define PK_D32(i) PK_D8(i), PK_D8(i + 8), PK_D8(i + 16), PK_D8(i + 24)
#define PK_D64 PK_D32(0), PK_D32(32)
#define PK_D96 PK_D64, PK_D32(64)
#define PK_D128 PK_D96, PK_D32(96)

// d[64, n] (+)= a[64, 16] b[n, 16]^T.
#define PK_SCORES(name, shape, type, n, registers, outputs, a_at, b_at, p_at)                                                                                          \
    __device__ __forceinline__ void name(float (&d)[n], uint64_t a, uint64_t b, int accumulate) {                                                                      \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_at ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" registers "}, %" #a_at ", %" #b_at \
                     ", p, 1, 1, 0, 0;\n}\n"                                                                                                                           \
                     : outputs                                                                                                                                         \
                     : "l"(a), "l"(b), "r"(accumulate));                                                                                                               \
    }
PK_SCORES(wgmma_scores_bf16, "m64n64k16", "bf16", 32, PK_R32, PK_D32(0), 32, 33, 34)
PK_SCORES(wgmma_scores_bf16, "m64n128k16", "bf16", 64, PK_R64, PK_D64, 64, 65, 66)
PK_SCORES(wgmma_scores_f16, "m64n64k16", "f16", 32, PK_R32, PK_D32(0), 32, 33, 34)
PK_SCORES(wgmma_scores_f16, "m64n128k16", "f16", 64, PK_R64, PK_D64, 64, 65, 66)

// d[64, n] (+)= a[64, 16] b[16, n].
#define PK_VALUES(name, shape, type, n, registers, outputs, a0_at, a1_at, a2_at, a3_at, b_at, p_at)                                                                         \
    __device__ __forceinline__ void name(float (&d)[n], const uint32_t (&a)[4], uint64_t b, int accumulate) {                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_at ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" registers "}, {%" #a0_at ", %" #a1_at     \
                     ", %" #a2_at ", %" #a3_at "}, %" #b_at ", p, 1, 1, 1;\n}\n"                                                                                             \
                     : outputs                                                                                                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                                                               \
    }
PK_VALUES(wgmma_values_bf16, "m64n64k16", "bf16", 32, PK_R32, PK_D32(0), 32, 33, 34, 35, 36, 37)
PK_VALUES(wgmma_values_bf16, "m64n128k16", "bf16", 64, PK_R64, PK_D64, 64, 65, 66, 67, 68, 69)
PK_VALUES(wgmma_values_bf16, "m64n192k16", "bf16", 96, PK_R96, PK_D96, 96, 97, 98, 99, 100, 101)
PK_VALUES(wgmma_values_bf16, "m64n256k16", "bf16", 128, PK_R128, PK_D128, 128, 129, 130, 131, 132, 133)
PK_VALUES(wgmma_values_f16, "m64n64k16", "f16", 32, PK_R32, PK_D32(0), 32, 33, 34, 35, 36, 37)
PK_VALUES(wgmma_values_f16, "m64n128k16", "f16", 64, PK_R64, PK_D64, 64, 65, 66, 67, 68, 69)
PK_VALUES(wgmma_values_f16, "m64n192k16", "f16", 96, PK_R96, PK_D96, 96, 97, 98, 99, 100, 101)
PK_VALUES(wgmma_values_f16, "m64n256k16", "f16", 128, PK_R128, PK_D128, 128, 129, 130, 131, 132, 133)

#undef PK_R8
#undef PK_R32
#undef PK_R64
#undef PK_R96
#undef PK_R128
#undef PK_D8
#undef PK_D32
#undef PK_D64
#undef PK_D96
#undef PK_D128
#undef PK_SCORES
#undef PK_VALUES

// A box of pages of K or V: 64 columns, 8 rows, panels, groups of eight rows, page.
__device__ __forceinline__ void copy_page(uint32_t shared, const void *map, int group, int page, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %3, %4, %5}], [%2];" ::"r"(shared), "l"(map),
                 "r"(shared_address(barrier)), "r"(0), "r"(group), "r"(page)
                 : "memory");
}
// A box of rows as they are stored: elements of a row, rows of a page, page.
__device__ __forceinline__ void copy_rows(uint32_t shared, const void *map, int row, int page, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared), "l"(map), "r"(shared_address(barrier)),
                 "r"(0), "r"(row), "r"(page)
                 : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_wait(int barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory"); }
template <int kThreads>
__device__ __forceinline__ void named_arrive(int barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory"); }

#endif

}  // namespace pk
