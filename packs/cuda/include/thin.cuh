// Products of many rows with a few rows of BF16 weights (src/matmul/thin.cu).
#pragma once
#include "gemm.cuh"

namespace pk {

constexpr int64_t kThinLeast = 1024;  // rows

bool is_thin(const Launch &l, const GemmArguments &a, int64_t max_rows);
int32_t launch_thin(const Launch &l, const GemmArguments &a, int64_t max_rows);

}  // namespace pk
