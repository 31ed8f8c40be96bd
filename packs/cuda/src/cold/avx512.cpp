// Products of experts in host memory under AVX-512 (see level.h).
#include <immintrin.h>

#include <cstdint>

#include "../../../pack.h"
#include "../../include/cold.h"

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define PK_COLD_AVX512
#include "level.h"

namespace pk {

const ColdKernels &cold_kernels_avx512() {
    static constexpr ColdKernels kernels{prepare, multiply};
    return kernels;
}

}  // namespace pk
