// Even matmul of FP8 weights (include/gemm_even.cuh). Tiles are 128 rows of W, which have one scale (gated products: of gate and of up, whose outputs' scales they meet).
#include "../../include/even_launch.cuh"

namespace pk {
namespace {

template <int kM>
int32_t launch_height(const Launch &l, const GemmArguments &a, int64_t max_rows, const EvenCut &cut, const Picked &picked) {
    switch (cut.end) {
        case kEndHeads: return launch_even<true, kM, 128, kEndHeads>(l, a, max_rows, cut, picked);
        case kEndGated: return launch_even<true, kM, 256, kEndGated>(l, a, max_rows, cut, picked);
        case kEndGatedCut: return launch_even<true, kM, 256, kEndGatedCut>(l, a, max_rows, cut, picked);
        case kEndWhole: return launch_even<true, kM, 256, kEndWhole>(l, a, max_rows, cut, picked);
        case kEndFront: return launch_even<true, kM, 128, kEndFront>(l, a, max_rows, cut, picked);
        default: return launch_even<true, kM, 128, kEndPlain>(l, a, max_rows, cut, picked);
    }
}

}  // namespace

int32_t launch_even_fp8(const Launch &l, const GemmArguments &a, int64_t max_rows, const EvenCut &cut, const Picked &picked) {
    return max_rows <= 64 ? launch_height<64>(l, a, max_rows, cut, picked) : launch_height<128>(l, a, max_rows, cut, picked);
}

}  // namespace pk
