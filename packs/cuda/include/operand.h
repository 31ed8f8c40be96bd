// Tensors as kernels are told of them: where they lie, elements from row to row, format.
#pragma once
#include "../../pack.h"

namespace pk {

struct Operand {
    void *p;
    int64_t stride;  // elements
    int32_t format;
};

inline int64_t elements_apart(const pk_tensor &t) { return t.stride / (t.format == PK_F32 || t.format == PK_I32 ? 4 : t.format == PK_F16 || t.format == PK_BF16 ? 2 : 1); }
inline Operand operand(const pk_tensor &t) { return {reinterpret_cast<void *>(t.data), elements_apart(t), t.format}; }

}  // namespace pk
