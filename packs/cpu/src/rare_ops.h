// The larger ops of rare.h, one file each.
#pragma once
#include "../../rare.h"
#include "ops.h"

namespace pk {

int64_t sparse_workspace_bytes(const Context &context, const pk_op_sparse &op, const pk_state &state);

int64_t settle_workspace_bytes(const Context &context, const pk_op_settle &op, const pk_state &state);
int64_t settle_workspace_bytes(const pk_op_settle_mamba &op);

void run_keep(Run &run, const pk_op_keep &op);
void run_settle(Run &run, const pk_op_settle &op);
void run_settle(Run &run, const pk_op_settle_mamba &op);
void run_settle(Run &run, const pk_op_settle_conv &op);
void run_shift(Run &run);
void run_guess(Run &run, const pk_op_guess &op);
void run_experts_fetched(Run &run, const pk_op_experts_fetched &op);
void run_ngram(Run &run, const pk_op_ngram &op);
void run_streams(Run &run, const pk_op_streams &op);
void run_dilated(Run &run, const pk_op_dilated &op);
void run_sparse(Run &run, const pk_op_sparse &op);

}  // namespace pk
