// FP8 products of 3 to 16 rows whose x is split in two (src/matmul/split.cu).
#pragma once
#include "flat_plan.h"

namespace pk {

// Whether a flat product of FP8 weights is one of these.
bool is_split(const Launch &l, const SkinnyArguments &a);
int32_t launch_split(const Launch &l, const SkinnyArguments &a, const Packed *const *packed, const FlatPackets &packets);

}  // namespace pk
