// Even products (src/matmul/gemm_even.cu): what the matmul op asks before it launches one.
#pragma once
#include "gemm.cuh"

namespace pk {

constexpr int64_t kEvenRows = 128;  // one tile

// Whether such a product is an even one, which can multiply by what a norm left, make a norm's first half and end heads (a.heads is looked at).
bool is_even(const Launch &l, const GemmArguments &a, int64_t max_rows, bool is_fp8);
// Whether a gated product of FP8 weights of so many rows and K can leave y narrowed.
bool even_leaves_narrowed(const Launch &l, int64_t max_rows, int64_t k);
int32_t launch_gemm_even(const Launch &l, const GemmArguments &a, int64_t max_rows);

}  // namespace pk
