// Experts that the host computes while the device fetches and computes the others: the matrices as the host reads them, and its kernels.
#pragma once
#include <cstdint>

namespace pk {

// One expert's matrix in host memory, as pk_repack left it (context.h, Packed).
struct ColdMatrix {
    const uint8_t *data = nullptr;
    int32_t format = 0, rows = 0, cols = 0;
    int64_t row_bytes = 0;            // of row-major formats
    int64_t n_units = 0;              // of block formats: units from one tile of 16 rows to the next
    const float *row_scales = nullptr, *block_scales = nullptr;
    int32_t block_stride = 0;
    float scale = 1.0f;
};

constexpr int32_t kColdTile = 16;     // rows of a matrix that are computed at once
constexpr int32_t kColdTogether = 4;  // rows of x that share one decoding

// Kernels of one instruction level.
struct ColdKernels {
    // A row of x as products with a format read it: cold_floats of them. x: bf16 [cols].
    void (*prepare)(int32_t format, const uint16_t *x, int32_t cols, float *out);
    // out[i, r] = row 16 tile + r of the matrix times x[i], n rows of x, at most kColdTogether. Columns and rows past the end count as zeros.
    void (*multiply)(const ColdMatrix &m, int32_t tile, const float *const *x, int32_t n, float (*out)[kColdTile]);
};

const ColdKernels &cold_kernels_avx2();
const ColdKernels &cold_kernels_avx512();
const ColdKernels &cold_kernels_avx512_bf16();
// Of this machine; null: it has none of them. name: for people.
const ColdKernels *cold_kernels(const char **name);

// Whether there are kernels for a stored format, and floats of a prepared row of so many columns.
bool has_cold_format(int32_t format);
int64_t cold_floats(int32_t format, int64_t cols);

}  // namespace pk
