// Matrix products over packed weights: what matmul*.cpp and repack.cpp give to the rest of the pack.
//
// Activations are F32 rows. Every function may be called from the thread that holds the context only; parallel work
// goes through context.pool. Errors: `return fail(PK_UNSUPPORTED, "...")` with one sentence (host/error.h).
#pragma once
#include "context.h"

namespace pk {

// Bytes of `source` after repack, for the level of this context. PK_UNSUPPORTED, naming the format and those that are
// supported, for a format without kernels; PK_BAD_ARG when the source does not hold what its shape and format say.
int32_t packed_bytes(const Context &context, const pk_source &source, int64_t *out);

// Writes exactly packed_bytes bytes at dst (64-byte aligned). May use the pool.
int32_t repack(Context &context, const pk_source &source, void *dst, int64_t n_bytes);

// Called once per record at load, after the walker has checked shapes (K equal, N sums to y's columns, biases, add,
// n_w 1..3, act) and that x, y, add, bias are F32 rows. Checks what only the kernels know: formats, alignments.
int32_t matmul_check(const Context &context, const pk_op_matmul &op, int64_t op_index);

// Scratch for one product with n_rows rows of x (the largest step); 64-byte aligned memory of this size comes back in matmul().
int64_t matmul_workspace_bytes(const Context &context, const pk_op_matmul &op, int64_t n_rows);

// Runs one record. n_rows: rows of x, y and add in this step (0 is allowed: nothing happens).
void matmul(Context &context, const pk_op_matmul &op, int64_t n_rows, void *workspace);

// Row `row` of a packed matrix as F32 (embedding lookup from a tied table). Thread safe.
void packed_row_to_f32(const Context &context, const pk_tensor &w, int64_t row, float *out);

// One row of `cols` elements as the checkpoint stores it (layout PK_ROWS, any weight format). False: no decoder. Thread safe.
bool source_row_to_f32(int32_t format, const void *row, int64_t cols, float *out);

// True when packed weights of this format can be used.
bool is_packed_format(int32_t format);

}  // namespace pk
