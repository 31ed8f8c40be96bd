// Products of a few rows in one launch (src/matmul/few_rows.cu): which records of a program run that way, and the kernel's arguments.
#pragma once
#include <vector>

#include "../../host/program.h"
#include "device.cuh"
#include "mixture.cuh"

namespace pk {

// One product, or a gate (0) and what it is multiplied with (1): then a tile is eight rows of each.
struct FewWeight {
    const uint8_t *data[2];
    const float *factors[2];  // of blocks of 128 x 128, or null
    const float *bias[2];
    void *y;          // where its first row's product goes
    const void *add;  // like y, or null
    int64_t y_stride, add_stride;  // elements
    int32_t y_format, add_format, rows, factor_stride, first_tile, n_sides, is_fp8, act;
    float scale[2], after;  // of the matrices; of the product before `add`
};

// Products with rows 0 to n - 1 of x.
struct FewRowsArguments {
    static constexpr int32_t kMost = 8;
    FewWeight w[kMost];
    const bf16 *x;
    const void *gate;  // a number a row, whose sigmoid multiplies the products; or null
    const StepInfo *info;
    int64_t x_stride, gate_stride, rows_symbol;  // elements
    int32_t gate_format, n_w, n_tiles, k;
    int32_t warps_k, max_rows, columns_log, n_buffers;  // of a launch: warps of a block that share a task; rows of x that are read, in pieces of 1 << columns_log columns, so many at once
};

// Records [first, last) of steps of a few rows: parts in turn, each of products in one launch or, where their x does not fit, of records one by one.
struct FewRows {
    struct Part {
        std::vector<int64_t> records;
        FewRowsArguments products = {};  // n_w 0: none
    };
    int64_t first = 0, last = 0;
    std::vector<Part> parts;
};

// Where products of a program with mixtures follow a norm, alone or beside each other. mixtures: of the same program.
std::vector<FewRows> find_few_rows(const Launch &l, const Records &records, const std::vector<Mixture> &mixtures);
// Whether steps of this launch are for the kernel, and whether the products are.
bool is_of_few_rows(const Launch &l);
bool fits_few_rows(const Launch &l, const FewRowsArguments &products);
int32_t launch_few_rows(const Launch &l, const FewRowsArguments &arguments);

}  // namespace pk
