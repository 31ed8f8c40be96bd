// Products of five to eight rows with AMX: what matmul.cpp takes from matmul_few_amx.cpp.
#pragma once
#include "matmul_kernels.h"

namespace pk {

// Up to 8 rows as few_panel_amx's kernels take them; no larger than 8 rows of CodedX.
void pack_few_amx(const float *x, int64_t stride, int64_t cols, int64_t n_rows, void *out);
// The kernel for 8 rows, or nullptr for plain formats.
PanelKernel few_panel_amx(int32_t format);

}  // namespace pk
