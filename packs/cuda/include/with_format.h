// A weight format as a constant, for kernels of which each format has its own.
#pragma once
#include <type_traits>

#include "../../host/error.h"
#include "../../pack.h"

namespace pk {

// Calls with the format as a constant. op: who asks, when there is no such format.
template <class Call>
int32_t with_format(const char *op, int32_t format, Call &&call) {
    switch (format) {
#define PK_CASE(F) case F: return call(std::integral_constant<int32_t, F>());
        PK_CASE(PK_BF16) PK_CASE(PK_F16) PK_CASE(PK_FP8_E4M3) PK_CASE(PK_FP8_E5M2) PK_CASE(PK_Q8_0) PK_CASE(PK_Q4_0) PK_CASE(PK_Q4_1) PK_CASE(PK_Q5_0) PK_CASE(PK_Q5_1)
        PK_CASE(PK_Q2_K) PK_CASE(PK_Q3_K) PK_CASE(PK_Q4_K) PK_CASE(PK_Q5_K) PK_CASE(PK_Q6_K) PK_CASE(PK_IQ4_NL) PK_CASE(PK_IQ4_XS) PK_CASE(PK_MXFP4) PK_CASE(PK_NVFP4)
#undef PK_CASE
        default: return fail(PK_UNSUPPORTED, "%s: no kernel for weight format %d", op, format);
    }
}

}  // namespace pk
