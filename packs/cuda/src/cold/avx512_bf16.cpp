// Products of experts in host memory under AVX-512 with products of bf16 (see level.h).
#include <immintrin.h>

#include <cstdint>

#include "../../../pack.h"
#include "../../include/cold.h"

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#define PK_COLD_AVX512
#define PK_COLD_BF16
#include "level.h"

namespace pk {

const ColdKernels &cold_kernels_avx512_bf16() {
    static constexpr ColdKernels kernels{prepare, multiply};
    return kernels;
}

}  // namespace pk
