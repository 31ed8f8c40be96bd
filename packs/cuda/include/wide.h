// Rows of a tensor can be read 16 bytes at a time.
#pragma once
#include "../../pack.h"

namespace pk {

inline bool is_wide(const pk_tensor &x) { return x.cols % 8 == 0 && x.stride % 16 == 0 && x.data % 16 == 0; }

}  // namespace pk
