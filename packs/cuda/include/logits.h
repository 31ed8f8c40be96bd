// The product of logits and the draw behind it: what one leaves for the other.
#pragma once
#include "context.h"
#include "plain_tops.h"

namespace pk {

// What launch_logits leaves for the draw of the record behind it; none where it is an op like any other. Behind everything that either takes of the scratch.
Tops tops_of(const Launch &l, const pk_op_matmul &op);
int32_t launch_logits(const Launch &l, const pk_op_matmul &op, const Tops &tops);
int32_t launch_sample(const Launch &l, const pk_op_sample &op, const Tops &tops);

}  // namespace pk
