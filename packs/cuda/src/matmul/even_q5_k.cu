// Even matmul of block formats (include/even_units.cuh): Q5_K.
#include "../../include/even_launch.cuh"
#if defined(PK_WGMMA)
#include "../../include/even_units_launch.cuh"

namespace pk {

template int32_t launch_even_format<PK_Q5_K>(const Launch &, const GemmArguments &, const EvenRows &, const EvenCut &, int);

}  // namespace pk
#endif
