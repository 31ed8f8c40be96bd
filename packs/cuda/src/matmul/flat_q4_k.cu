// Flat matmul of block formats (include/flat_units.cuh): Q4_K.
#include "../../include/flat_plan.h"
#if defined(PK_WGMMA)
#include "../../include/flat_units_launch.cuh"

namespace pk {

template int32_t launch_flat_blocks<PK_Q4_K>(const Launch &, const SkinnyArguments &, const Packed *const *, const FlatPackets &);

}  // namespace pk
#endif
