// Flat matmul of block formats (include/flat_units.cuh): Q8_0.
#include "../../include/flat_plan.h"
#if defined(PK_WGMMA)
#include "../../include/flat_units_launch.cuh"

namespace pk {

template int32_t launch_flat_blocks<PK_Q8_0>(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &);

}  // namespace pk
#endif
