// Products of experts in host memory under AVX2 (see level.h).
#include <immintrin.h>

#include <cstdint>

#include "../../../pack.h"
#include "../../include/cold.h"

#pragma GCC target("avx2,fma,f16c")
#include "level.h"

namespace pk {

const ColdKernels &cold_kernels_avx2() {
    static constexpr ColdKernels kernels{prepare, multiply};
    return kernels;
}

}  // namespace pk
