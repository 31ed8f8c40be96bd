// Even products (src/matmul/gemm_even.cu): what the matmul op asks before it launches one.
#pragma once
#include "gemm.cuh"
#include "plain_tops.h"

namespace pk {

constexpr int64_t kEvenRows = 128;  // one tile
constexpr int64_t kEvenUnitsRows = 256;  // of block formats by two launches

// Of x, that a launch is about: those from `first` on, a tile at most, in steps of at most `most`. The operands begin with the first.
struct EvenRows {
    int32_t first, most;
};

// Whether such a product is an even one, which can multiply by what a norm left, make a norm's first half and end heads (a.heads is looked at).
bool is_even(const Launch &l, const GemmArguments &a, int64_t max_rows, bool is_fp8);
// Whether a gated product of FP8 weights of so many rows and K can leave y narrowed.
bool even_leaves_narrowed(const Launch &l, int64_t max_rows, int64_t k);
// tops: of a product of logits.
int32_t launch_gemm_even(const Launch &l, const GemmArguments &a, int64_t max_rows, const Tops &tops = {});
// Tiles of a product of logits.
int32_t even_tiles(const Launch &l, const GemmArguments &a, int64_t max_rows, bool is_fp8, int32_t *n);

// Block formats (even_units.cuh), packed: of the arguments' weights. Whether such a weight can be multiplied so, whether a product can, and heads of weights in
// several formats in one launch; then the launch.
bool has_even_units(const Packed &weight);
bool are_even_units(const Launch &l, const GemmArguments &a, const Packed *const *packed);
bool are_multiplied_together(const Packed *const *packed, int n);
int32_t launch_even_units(const Launch &l, const GemmArguments &a, const EvenRows &rows, const Packed *const *packed);

}  // namespace pk
