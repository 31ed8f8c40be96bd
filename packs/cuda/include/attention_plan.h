// What the warps of decode attention take first in a step of single tokens (src/attention/decode.cu), found once a step: every layer's launch begins with two reads of it
// in place of going through all rows, which takes longer than what it is for where contexts are short.
#pragma once
#include "context.h"
#include "../../pack.h"

namespace pk {

constexpr int32_t kPlanRows = 2;  // one row's step has other kernels
// Lies behind the scratch, for as many multiprocessors.
constexpr int64_t kPlanProcessors = 256, kPlanEntryBytes = 256, kPlanBytes = kPlanProcessors * 2 * 4 * kPlanEntryBytes;
inline int64_t plan_offset(const pk_state &state) { return (state.workspace_bytes - kPlanBytes) / 256 * 256; }
inline uint8_t *plan_at(const Launch &l) { return l.scratch + l.scratch_bytes; }

// Whether such an op of such a step asks for it; it looks whether what it finds is of rows and heads like its own.
bool is_planned(const Launch &l, const pk_op_attention &op);
// Finds it. The kernels behind may read it once one has begun that waited for this one.
int32_t launch_plan(const Launch &l, const pk_op_attention &op);

}  // namespace pk
