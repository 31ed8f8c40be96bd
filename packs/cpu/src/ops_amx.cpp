// The kernel table of the AMX level.
#include "attention_amx.h"
#include "ops_level.h"

namespace pk {

const Kernels &kernels_amx() {
    static constexpr Kernels table{norm,         gate,    add,     copy,    scale,   qkv,  attend_decode, attend_prefill_amx,
                                   attend_merge, largest, sum_exp, count,   find_sum, collect};
    return table;
}

}  // namespace pk
