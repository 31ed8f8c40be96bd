// Matrix products under AVX2 (see matmul_level.h).
#include "matmul_level.h"

namespace pk {
namespace {

int32_t block_rows(int64_t n) { return n <= 2 ? static_cast<int32_t>(n) : 4; }

PanelKernel panel(int32_t format, int32_t rows) {
    switch (rows) {
        case 1: return panel_of<1>(format);
        case 2: return panel_of<2>(format);
        default: return panel_of<4>(format);
    }
}

}  // namespace

const MatmulKernels &matmul_kernels_avx2() {
    static constexpr MatmulKernels kernels{4, block_rows, panel, pack_coded, pack_plain, finish_rows};
    return kernels;
}

}  // namespace pk
