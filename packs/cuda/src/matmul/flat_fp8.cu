// Flat matmul (include/flat.cuh) of FP8 weights.
#include "../../include/flat_plan.h"
#if defined(PK_WGMMA)
#include "../../include/flat_launch.cuh"

namespace pk {

template int32_t launch_flat_format<PK_FP8_E4M3>(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &);

}  // namespace pk
#endif
