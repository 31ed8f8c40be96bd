// The kernel table of the AVX2 level.
#include "attention_level.h"
#include "ops_level.h"

namespace pk {

const Kernels &kernels_avx2() {
    static constexpr Kernels table{norm,         gate,    add,     copy,    scale,   qkv,  attend_decode, attend_prefill,
                                   attend_merge, largest, sum_exp, count,   find_sum, collect};
    return table;
}

}  // namespace pk
