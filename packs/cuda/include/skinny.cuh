// Arguments of the skinny matmul (src/matmul/skinny.cu): 3 to 128 rows of x on Hopper.
#pragma once
#include <cuda.h>

#include "context.h"

namespace pk {

constexpr int32_t kMaxBlocks = 512;
constexpr int64_t kSkinnyFlagBytes = 4 * kMaxBlocks * 4;  // the last of the workspace's counters

struct SkinnyWeight {
    const uint8_t *data;
    const float *row_scale;    // [rows] or null
    const float *block_scale;  // [rows/128][K/128] or null
    const float *bias;         // [rows] or null
    int32_t rows;
    int32_t n_tiles16;  // tiles of 16 rows in memory
    int32_t first_tile;
    int32_t first_column;
    int32_t block_stride;
    float scale;
};

// The norm between two products, in halves: the product in front leaves its y, times the norm's weight, in bf16 and sums of squares
// of 16 columns each; the product behind multiplies its own sums by what those make of a row.
struct HalfNorm {
    void *out;  // bf16, of the product in front, or null
    const float *w;
    float *squares;           // [columns / 16][stride]
    const float *row_squares;  // of the product behind, or null
    int64_t out_stride;
    int32_t stride, n_cols;
    float eps;
};

// What becomes of queries, keys and values of 128 where their product ends (pk_op_qkv).
struct HeadsEnd {
    void *q;  // bf16; null: nothing, they are a product's columns
    uint8_t *kv;
    const float *q_norm, *k_norm, *v_norm, *frequency, *gains;
    const int32_t *position, *page;
    int64_t q_stride, page_stride, k_offset, v_offset;
    int32_t n_heads, n_kv_heads, page_tokens, kv_format;
    float magnitude, eps;
};

struct SkinnyArguments {
    SkinnyWeight w[3];
    HalfNorm norm;
    HeadsEnd heads;
    const void *x;    // bf16, rows of 16-byte multiples
    void *y;
    const void *add;
    const StepInfo *info;
    float *partial;   // [blocks][2][tile]
    int32_t *flags;   // 4 x kMaxBlocks, zero before the first launch, then the kernel's own
    int64_t x_stride, y_stride, add_stride;  // elements
    int64_t rows_symbol;
    int32_t y_format, add_format;
    int32_t n_w, k, n_units, n_tiles;
    int32_t min_rows, max_rows;  // the launch does nothing for other row counts
    int32_t first_row;           // of x that this launch is about; it takes at most 128
    int32_t act;
    float scale, softcap;
};

// Ops beside a product that it does with its own: norms of which it makes a half, heads; null: none.
struct Beside {
    const pk_op_norm *before = nullptr, *after = nullptr;
    const pk_op_qkv *heads = nullptr;
};
// Whether the norm between two products can be made in halves by them, in a step of l's bounds; whether a product can do with heads what the op behind it would.
bool halves_norm(const Launch &l, const pk_op_matmul &front, const pk_op_norm &norm, const pk_op_matmul &back);
bool ends_heads(const Launch &l, const pk_op_matmul &op, const pk_op_qkv &heads);

// Formats that have all widths; seldom ones have half of them: an instance takes seconds to compile.
constexpr bool has_all_widths(int32_t format) { return format == PK_BF16 || format == PK_FP8_E4M3 || format == PK_Q8_0 || format == PK_Q4_K || format == PK_Q6_K; }

// Bytes of the partial sums.
int64_t skinny_partial_bytes(int32_t n_processors, int64_t max_rows);

template <int kFormat>
int32_t launch_skinny(const Launch &l, SkinnyArguments arguments, const Packed *const *packed, int64_t max_rows);

}  // namespace pk
