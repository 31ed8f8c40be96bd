// Captured steps (src/graph.cu).
#pragma once
#include "program.h"

namespace pk {

// One graph of all records (without the two ends of a step when with_ends is false).
int32_t capture(pk_program &p, const pk_program::View &view, const Launch &l, bool with_ends, pk_program::Graph *out);
// Switches nodes off, or on again; is_off: as they are.
int32_t switch_off(const pk_program::Graph &g, const std::vector<cudaGraphNode_t> &nodes, bool off, bool *is_off);
void drop(pk_program::Graph &g);

}  // namespace pk
