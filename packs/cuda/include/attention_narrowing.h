// Attention of a step of single tokens that leaves its rows narrowed to FP8 for the product behind it (src/attention/attention.cu).
#pragma once
#include "quantise.cuh"

namespace pk {

// Whether launch_attention's kernel for such a step can; where in the scratch its partial sums end, behind which the rows may go.
bool can_narrow(const Launch &l, const pk_op_attention &op);
int64_t attention_parts_bytes(const pk_ctx *ctx);
int32_t launch_attention_narrowing(const Launch &l, const pk_op_attention &op, const Narrowed &to);

}  // namespace pk
