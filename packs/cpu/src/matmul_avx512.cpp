// Matrix products under AVX-512 with VNNI (see matmul_level.h).
#include "matmul_level.h"

namespace pk {
namespace {

int32_t block_rows(int64_t n) { return n <= 4 ? static_cast<int32_t>(n) : n <= 6 ? 6 : 8; }

PanelKernel panel(int32_t format, int32_t rows) {
    switch (rows) {
        case 1: return panel_of<1>(format);
        case 2: return panel_of<2>(format);
        case 3: return panel_of<3>(format);
        case 4: return panel_of<4>(format);
        case 6: return panel_of<6>(format);
        default: return panel_of<8>(format);
    }
}

}  // namespace

const MatmulKernels &matmul_kernels_avx512() {
    static constexpr MatmulKernels kernels{8, block_rows, panel, pack_coded, pack_plain, finish_rows};
    return kernels;
}

}  // namespace pk
