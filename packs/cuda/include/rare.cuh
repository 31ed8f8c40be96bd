// What the kernels of rare.h's ops share: lookups in packed tables (src/dequantize.cu), attention over chosen blocks (src/attention/sparse.cu),
// guessed tokens (src/guess.cu).
#pragma once
#include "../../rare.h"
#include "context.h"

namespace pk {

// out[t] = row ids[t] of a stack of pieces of table.rows rows, table.stride bytes apart, n_rows in all; zeros where ids[t] is negative.
int32_t launch_lookup(const Launch &l, const pk_tensor &table, int32_t n_rows, const int32_t *ids, const pk_tensor &out);

int32_t launch_sparse(const Launch &l, const pk_op_sparse &op);
int64_t sparse_scratch(const pk_ctx *ctx, const pk_op_sparse &op, const pk_state &state);
int32_t check_sparse(const pk_op_sparse &op, const pk_state &state, int64_t at);

int32_t launch_keep(const Launch &l, const pk_op_keep &op);
int32_t launch_settle(const Launch &l, const pk_op_settle &op);
int32_t launch_settle(const Launch &l, const pk_op_settle_mamba &op);
int32_t launch_settle(const Launch &l, const pk_op_settle_conv &op);
int32_t launch_shift(const Launch &l);
int32_t launch_guess(const Launch &l, const pk_op_guess &op);
int32_t check_settle(const pk_op_settle &op, int64_t at);
int32_t check_settle(const pk_op_settle_mamba &op, int64_t at);

}  // namespace pk
