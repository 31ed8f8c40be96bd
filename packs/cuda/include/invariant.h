// A context whose numbers of a row depend on the row alone: neither on how many rows a step has nor on where a prompt was cut.
//
// Products: the skinny kernel for all rows, whose cuts along K depend on the weights alone (elsewhere the mma.sync tiles, which are not cut).
// Attention: the decode kernel's second form for all rows. Launches that serve one row alone, and what rows share, are left out.
#pragma once
#include "context.h"

namespace pk {

bool is_invariant(const pk_ctx *ctx);

}  // namespace pk
