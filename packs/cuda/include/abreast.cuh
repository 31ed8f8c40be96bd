// Products of one normed row in one launch (src/matmul/abreast.cu): which records of a program it stands for, and its arguments.
#pragma once
#include <vector>

#include "../../host/program.h"
#include "device.cuh"
#include "experts.cuh"

namespace pk {

struct AbreastWeight {
    ExpertWeight w;
    const float *bias;
    void *y;  // where its first row's product goes
    int32_t y_format, first_tile, is_own;  // is_own: of the launch's format; otherwise BF16
    float scale;
};

// Products with the norm of `residual`, row 0 of it.
struct AbreastArguments {
    static constexpr int32_t kMost = 8;
    AbreastWeight w[kMost];
    const float *norm, *residual;
    bf16 *normed;
    const StepInfo *info;
    int64_t rows_symbol;
    int32_t n_w, n_tiles, m, warps_k;  // warps_k: of a block's
    float eps;
};

// Records [first, last): a norm and the products that follow it.
struct Abreast {
    int64_t first = 0, last = 0;
    int32_t format = 0;
    AbreastArguments arguments = {};
};

// Where a norm is followed by several products of what it writes; none where a format or a size is not for this kernel.
std::vector<Abreast> find_abreast(const Launch &l, const Records &records);
int32_t launch_abreast(const Launch &l, const Abreast &abreast);

}  // namespace pk
