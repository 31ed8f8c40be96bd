// Records as phases of the persistent decode kernel, before they are put together to runs (src/persist/read.cu).
#pragma once
#include "plan.h"

namespace pk::persist {

// A phase before it knows where packets lie.
struct Draft {
    Phase phase = {};
    int64_t n_records = 0;
    pk_tensor x = {}, y = {}, add = {};
    uint64_t normed = 0;
};

inline int64_t element_bytes(const pk_tensor &t) { return t.format == PK_F32 ? 4 : 2; }
inline Place place_of(const pk_tensor &t) { return {t.data, t.data ? t.stride / element_bytes(t) : 0, t.format, 0, 0}; }

// The phase that begins with record i. False: none of this kernel's.
bool read_phase(const Launch &l, const Records &records, int64_t i, Draft *d);

}  // namespace pk::persist
